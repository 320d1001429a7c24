"""Let ranks agree on how a loss's terms add up, where each has learned it from its own rows."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.term_names import are_named
from lightning_memkit.micro_batching.graph.term_rules import Law, TermRule, is_same_sum


def agreed(own: LossRules | str | None, told: Sequence[LossRules | str | None]) -> LossRules | None:
    """A rank's rules, corrected by those of all ranks; None if their terms or laws contradict each other.

    Terms that were told apart go by the names of their parameters: other ranks may have other heads' terms.
    If only one of a rank's rows counts, a mean's divisor is 1 in the whole and in micro-batches, as a sum's
    would be. If another rank shows that the divisors add up, the term is a mean.

    Args:
        own: the rules that this rank has learned.
        told: the rules that each rank has learned.
    """
    rules = [one for one in told if isinstance(one, LossRules)]
    if not isinstance(own, LossRules) or len(rules) < len(told):
        return None
    if len({len(one.rules) for one in rules}) > 1:
        return None
    if not all(are_named(rule.name for rule in one.rules) for one in rules):
        return None
    merged = [_of_ranks(*of_one) for of_one in zip(own.rules, *(one.rules for one in rules), strict=True)]
    found = [rule for rule in merged if rule is not None]
    return LossRules(rules=tuple(found)) if len(found) == len(merged) else None


def _of_ranks(own: TermRule, *told: TermRule) -> TermRule | None:
    """The corrected rule of one term; see `agreed`."""
    if any((rule.index, rule.branch) != (own.index, own.branch) for rule in told):
        return None
    if not all(is_same_sum(rule.name, own.name) for rule in told):
        return None
    names = {name for rule in told for name in (rule.name, *rule.aliases)}
    own = replace(own, aliases=own.aliases | (names - {own.name}))
    if len({(rule.law, rule.divided) for rule in told}) == 1:
        return own
    if not all(rule.law is Law.MEAN or (rule.law is Law.SUM and rule.divided) for rule in told):
        return None
    return replace(
        own,
        law=Law.MEAN,
        divided=False,
        excess=max(rule.excess for rule in told),
        numbered=any(rule.numbered for rule in told),
    )
