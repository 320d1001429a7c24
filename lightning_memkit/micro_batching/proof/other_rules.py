"""Compare rows by other rules than those that they show themselves: by what earlier rows showed, or by the whole's."""

from collections.abc import Sequence
from contextlib import suppress

from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.proof.by_terms import TermComparison
from lightning_memkit.micro_batching.proof.row_runs import ComparisonOutcome, NothingCountsError
from lightning_memkit.micro_batching.shares.foreseen import UnforeseenLossError


def against(terms: TermComparison, known: LossRules | None) -> ComparisonOutcome:
    """Compare by rules from other rows, and return a failure: these rows may act on each other.

    Raises:
        NothingCountsError: the comparison does not fail: these rows only show less than is known.
    """
    outcome = None
    with suppress(UnforeseenLossError):
        if known is not None:
            outcome = terms.compare(known, of_whole=True)
    if outcome is None or outcome.miss.excess <= 1:
        raise NothingCountsError
    return outcome


def by_whole(terms: TermComparison, rules: LossRules, kept: Sequence[int]) -> ComparisonOutcome | None:
    """Compare by the whole's divisors, if micro-batches have clamped ones; None if that fails, too.

    For several ranks, on which the counts of these terms are looked up in every batch (`LoneCounts`).
    """
    outcome = terms.compare(rules, of_whole=True)
    if outcome is None or outcome.miss.excess > 1:
        return None
    outcome.kept = frozenset(kept)
    return outcome
