"""Learn how a loss's terms add up from one batch that was run whole and in micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from lightning_memkit.micro_batching.graph.loss_rules import SMALL, VARYING_FACTOR, LossRules
from lightning_memkit.micro_batching.graph.loss_terms import Divisor, LossTerm, LossTerms, collapsed
from lightning_memkit.micro_batching.graph.origins import Key, origin_of
from lightning_memkit.micro_batching.graph.term_names import by_name, sources_of
from lightning_memkit.micro_batching.graph.term_rules import (
    ALIKE,
    Law,
    TermRule,
    difference_of,
    hidden_of,
    is_same_sum,
    rounding_of,
    same_factors,
)

_EPSILON = 1e-4  # relative to the smallest divisor: the most that is taken for an added epsilon
NOTHING_COUNTS = "a term that counts nothing in the whole batch"
UNTOLD_TERM = "a new term, of which these rows don't tell how it adds up"


class UnlikeDivisors(str):
    """Why a term follows no law: its divisor is neither the sum of the micro-batches' nor equal to them.

    Example: a mean over pairs of rows is divided by 25 for five rows, and by 4 and 9 for two and three of
    them.
    """


class CurvedLoss(str):
    """Why a loss is no sum over its rows: the nonlinear function applied to values reduced over them."""


class JointTerm(CurvedLoss):
    """The term that rows have only together: the whole's loss has it, and that of none of its micro-batches."""


def learned(
    whole: LossTerms,
    parts: Sequence[LossTerms],
    dtype: torch.dtype = torch.float32,
    *,
    known: LossRules | None = None,
    looks: bool = True,
    parameters: Mapping[Key, str] = MappingProxyType({}),
) -> LossRules | str:
    """Learn how a loss's terms add up from a batch run whole and in micro-batches, or say why it can't be.

    Args:
        whole: the terms of the whole batch's loss.
        parts: the terms of each micro-batch's loss.
        dtype: the dtype in which the loss was computed, for the rounding of divisors.
        known: rules learned from other rows; a term of `Law.OWN` stays so.
        looks: whether divisors that follow no law can be looked up in each batch.
        parameters: the names of the module's parameters by their `id`, which tell terms of one graph apart.
    """
    excesses = {(r.name, r.index): r.excess for r in (known.rules if known else ()) if r.law is Law.MEAN}
    own_laws = {(r.name, r.index) for r in (known.rules if known else ()) if r.law is Law.OWN}
    for seen in (whole, *parts):
        if not seen.terms and (seen.opaque or seen is whole):
            return seen.opaque or "a loss without terms"
    if whole.curved:
        return CurvedLoss(whole.curved)
    renamed = _renamed((whole, *parts), known)
    given = (known.sources, known.apart) if known else ({}, "")
    sources = sources_of((whole, *parts), renamed, *given, parameters)
    named = [by_name(seen.terms, renamed, sources) for seen in (whole, *parts)]
    optional = _optional(named, known)
    if isinstance(optional, str):
        return optional
    rules = list(optional)
    for name in named[0]:
        if any(name not in names for names in named):
            continue
        aligned = _aligned(name, [names[name] for names in named])
        if isinstance(aligned, str):
            return aligned
        branch, rows = aligned
        hidden = _bent_or_hidden([names[name] for names in named])
        if hidden:
            return hidden
        fixed = _fixed_factors([names[name] for names in named], dtype) if branch is None else []
        if isinstance(fixed, str):
            return fixed
        for index, divisors in enumerate(rows):
            own = [
                names[name][index] if branch is None else collapsed(names[name], branch) for names in named
            ]
            rule = _rule(name, index, branch, [float(divisor) for divisor in divisors], dtype)
            if isinstance(rule, TermRule) and _is_guard(rule, [float(one) for one in divisors[1:]]):
                rule = replace(rule, excess=excesses.get((name, index), rule.excess))
            if (
                looks
                and _is_own(own, dtype)
                and (isinstance(rule, UnlikeDivisors) or (name, index) in own_laws)
            ):
                rule = TermRule(name=name, index=index, branch=branch, law=Law.OWN)
            if isinstance(rule, str):
                return rule
            numbers = (float(t.divisor if t.is_multiplied and not t.quotient else t.quotient) for t in own)
            ones = all(-ALIKE <= number - 1 <= _EPSILON for number in numbers)
            # `any`, not `all`: a division by 0 gives a quotient of 0, which reads as none.
            numbered = ones or any(term.is_numbered for term in own)
            origin = origin_of(own[0], further=True)
            has_many = branch is None and not all(origin.is_of(term) for term in own[1:])
            rules.append(
                replace(
                    rule,
                    fixed=fixed[index] if fixed else (),
                    divided=ones,
                    numbered=numbered,
                    has_many_sources=has_many,
                )
            )
    # What none of these rows has may come again with others.
    here = {name for names in named for name in names}
    told = [rule for rule in (known.rules if known else ()) if rule.law is Law.MEAN and rule.branch is None]
    rules += [rule for rule in told if rule.name not in here and not rule.fixed]
    aliases = {rule.name: frozenset(a for a, name in renamed.items() if name == rule.name) for rule in rules}
    of_heads = {name: source for (_, source), name in sources.items()}
    return LossRules(
        rules=tuple(replace(r, aliases=aliases[r.name], source=of_heads.get(r.name, 0)) for r in rules)
    )


def _renamed(seen: Sequence[LossTerms], known: LossRules | None) -> dict[str, str]:
    """The one name of terms that have several in these rows: the known rules', or that in the whole batch."""
    renamed = known.renamed if known else {}
    names = {rule.name for rule in known.rules} if known else set()
    for one in seen:
        own = {term.name for term in one.terms} - renamed.keys()
        for name in own - names:
            same = [other for other in names - own if is_same_sum(other, name)]
            if len(same) == 1:
                renamed[name] = same[0]
        names |= own - renamed.keys()
    return renamed


def _optional(named: Sequence[dict[str, list[LossTerm]]], known: LossRules | None) -> list[TermRule] | str:
    """The rules of means that a step adds only if rows count in them, and that some of these runs lack.

    A reason instead if they may be no means; or `UNTOLD_TERM`, if other rows have to show what they are.
    """
    lacked = sorted({name for names in named for name in names if any(name not in other for other in named)})
    # Those that the whole lacks come first: one of its terms may have another name in micro-batches.
    lacked.sort(key=lambda name: bool(named[0].get(name)))
    found: list[TermRule] = []
    for name in lacked:
        own = [rule for rule in (known.rules if known else ()) if rule.name == name]
        if own:
            if any(rule.law is not Law.MEAN or rule.fixed for rule in own):
                return difference_of((), [name])
            if any(len(names.get(name, own)) != len(own) for names in named):
                return UNTOLD_TERM
            found += own
            continue
        whole, *parts = (names.get(name, []) for names in named)
        if not whole:
            return difference_of((), [name])
        if not any(parts):
            return JointTerm(name.lstrip("/"))
        if any(len(group) > 1 or any(map(hidden_of, group)) for group in (whole, *parts)):
            return UNTOLD_TERM
        divisor = float(whole[0].divisor)
        counted = sum(float(term.divisor) for group in parts for term in group)
        is_told = whole[0].is_numbered or divisor > 1
        if not is_told or not divisor or abs(counted - divisor) > ALIKE * divisor or whole[0].factors:
            return UNTOLD_TERM
        found.append(TermRule(name=name, index=0, law=Law.MEAN, numbered=whole[0].is_numbered))
    return found


def _fixed_factors(groups: list[list[LossTerm]], dtype: torch.dtype) -> list[tuple[int, ...]] | str:
    """Per term, the indices of factors of one shape everywhere: they belong to no rows and must be equal.

    Returns a reason instead if they differ.
    """
    found = []
    for terms in zip(*groups, strict=True):
        fixed = []
        for place, (whole, *parts) in enumerate(zip(*(term.factors for term in terms), strict=False)):
            if any(part.shape != whole.shape for part in parts):
                continue
            if not all(same_factors((whole,), (part,), dtype) for part in parts):
                return VARYING_FACTOR
            fixed.append(place)
        found.append(tuple(fixed))
    return found


def _bent_or_hidden(groups: list[list[LossTerm]]) -> str:
    """Why curved or opaque terms are refused; empty if there are none, or if each row has its own."""
    hidden = next((term for terms in groups for term in terms if hidden_of(term)), None)
    whole, *parts = map(len, groups)
    if hidden is None or (whole == sum(parts) and whole > max(parts)):
        return ""
    return CurvedLoss(hidden.curved) if hidden.curved else hidden.opaque


def _aligned(name: str, groups: list[list[LossTerm]]) -> "tuple[str | None, list[list[Divisor]]] | str":
    """The branch and the divisors of terms of one name, the whole batch's first; or why they don't match.

    If the number of terms is the same everywhere, each is aligned by itself (branch None). Otherwise they are
    rows that the step adds up, and are merged into one term.
    """
    if len({len(group) for group in groups}) == 1:
        return None, [[term.divisor for term in terms] for terms in zip(*groups, strict=True)]
    branches = {term.branch for group in groups for term in group if len(group) > 1}
    if len(branches) != 1:
        return f"terms {name} of different number"
    branch = branches.pop()
    return branch, [[collapsed(group, branch).divisor for group in groups]]


def _rule(
    name: str, index: int, branch: str | None, divisors: list[float], dtype: torch.dtype
) -> TermRule | str:
    whole, *parts = divisors
    if whole == 0:
        return NOTHING_COUNTS
    allowed = rounding_of(dtype) * abs(whole)
    if all(abs(part - whole) <= allowed for part in parts):
        return TermRule(name=name, index=index, branch=branch, law=Law.SUM)
    excess = (sum(parts) - whole) / max(len(parts) - 1, 1)
    if abs(excess) <= allowed:
        exact = excess if dtype is torch.float64 and 0 < excess < SMALL else 0.0
        return TermRule(name=name, index=index, branch=branch, law=Law.MEAN, excess=exact)
    least = min(parts)
    if 0 < excess <= _EPSILON * least:
        return TermRule(name=name, index=index, branch=branch, law=Law.MEAN, excess=excess)
    # An added epsilon makes every divisor fractional; a clamped count is a whole number in the whole batch.
    is_added = excess > 0 and not whole.is_integer()
    if is_added and excess <= least + allowed and least < SMALL * abs(whole):
        return TermRule(name=name, index=index, branch=branch, law=Law.MEAN, excess=excess)
    empty = [part for part in parts if abs(part - least) <= allowed]
    if least > 0 and abs(sum(parts) - sum(empty) - whole) <= allowed:
        return TermRule(name=name, index=index, branch=branch, law=Law.MEAN)
    theirs = ", ".join(f"{part:g}" for part in parts)
    return UnlikeDivisors(f"a term divided by {whole:g}, and by {theirs} in micro-batches of the same rows")


def _is_guard(rule: TermRule, parts: Sequence[float]) -> bool:
    """Whether an epsilon is a whole divisor: nothing counts there, and a clamped divisor would look the same."""
    return bool(rule.excess) and abs(min(parts) - rule.excess) <= _EPSILON * rule.excess


def _is_own(terms: Sequence[LossTerm], dtype: torch.dtype) -> bool:
    """Whether a term's divisors follow no law because of a number of the step's own, not of a reduction."""
    quotients = [float(term.quotient) for term in terms]
    if terms and all(quotients):
        others = [float(term.divisor) / quotient for term, quotient in zip(terms, quotients, strict=True)]
        return not isinstance(_rule("", 0, None, others, dtype), str)
    # A multiplied term's divisor combines its factor and its mean: with a mean, either may follow no law.
    return bool(terms) and all(term.is_multiplied and "/Mean" not in term.name for term in terms)
