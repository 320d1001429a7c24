"""Learn from some rows how a loss's terms add up, and compare by that: term by term, or column by column."""

from collections.abc import Sequence

from lightning_memkit.micro_batching.graph.agreed_rules import agreed
from lightning_memkit.micro_batching.graph.columns import learned_columns
from lightning_memkit.micro_batching.graph.learned_rules import (
    NOTHING_COUNTS,
    UNTOLD_TERM,
    CurvedLoss,
    UnlikeDivisors,
    learned,
)
from lightning_memkit.micro_batching.graph.loss_rules import VARYING_FACTOR, LossRules
from lightning_memkit.micro_batching.graph.origins import ParameterNames
from lightning_memkit.micro_batching.graph.term_rules import Law, share_of
from lightning_memkit.micro_batching.proof.by_terms import TermComparison, counts_of
from lightning_memkit.micro_batching.proof.row_runs import (
    ComparisonOutcome,
    NothingCountsError,
    TrialStep,
    UntoldTermError,
)
from lightning_memkit.micro_batching.ranks.agreement import any_rank, largest_of_ranks, values_of_ranks
from lightning_memkit.micro_batching.run import Run
from lightning_memkit.micro_batching.shares.foreseen import UnforeseenLossError

Compared = tuple[LossRules | str | None, ComparisonOutcome | None]


class RowRules:
    """Learns how the terms of a loss add up in some rows, and compares by it.

    Args:
        run: the loop.
        terms: compares the trials below.
        whole: the trial of all rows.
        parts: the trials of their micro-batches.
        known: rules that held in other rows.

    Attributes:
        is_less: these rows tell less than is known, and were compared by the known rules.
    """

    def __init__(
        self,
        run: Run,
        terms: TermComparison,
        whole: TrialStep,
        parts: Sequence[TrialStep | None],
        known: LossRules | None,
    ) -> None:
        self._run, self._terms, self._whole, self._known = run, terms, whole, known
        self._parts = [part for part in parts if part is not None]
        self.is_less = False

    def compare(self) -> Compared:
        """Compare by the terms, and by columns if the loss has some and they are known, may be counts, or terms fail.

        Returns:
            The rules, or the reason why there are none; and the outcome, None if terms don't add up as the rules say.
            If these rows tell less than is known (`is_less`), the outcome is a failure by the known rules.

        Raises:
            NothingCountsError: on a rank, no row counts in a term; or these rows only tell less than is known.
            UntoldTermError: other rows have to tell what a term is.
        """
        has_columns = any_rank(self._run, self._whole.terms.by_column is not None)
        known_by_column = self._known is not None and self._known.by_column
        found: Compared = (None, None)
        if not (has_columns and known_by_column):
            found = self._compared(by_column=False)
            if not has_columns or self.is_less or (_holds(found) and not self._may_count_by_column()):
                return found
        by_column = self._compared(by_column=True)
        # A refusal that has nothing to do with columns says more without them.
        return by_column if known_by_column or _holds(by_column) or found[0] == VARYING_FACTOR else found

    def _may_count_by_column(self) -> bool:
        """Whether the columns may be divided by counts, which are the same in these rows' micro-batches by chance."""
        rules = self._learned(by_column=True)
        may = isinstance(rules, LossRules) and all(rule.branch is None for rule in rules.rules)
        counted = isinstance(rules, LossRules) and any(r.law is Law.MEAN or r.divided for r in rules.rules)
        return any_rank(self._run, may and counted)

    def _compared(self, *, by_column: bool) -> Compared:
        rules = self._learned(by_column=by_column)
        for why, error in ((UNTOLD_TERM, UntoldTermError), (NOTHING_COUNTS, NothingCountsError)):
            if any_rank(self._run, rules == why):
                raise error
        is_less = isinstance(rules, LossRules) and self._known is not None and rules.tells_less(self._known)
        if any_rank(self._run, is_less):
            self.is_less = True
            return rules, self._against_known()
        rules, outcome = self._of_all_ranks(rules), None
        if isinstance(rules, LossRules):
            outcome = self._terms.compare(rules)
            kept = self._kept(rules, outcome)
            if kept and self._run.world_size == 1:
                outcome = self._terms.compare(rules.looking_up(kept)) or outcome
            elif kept:
                outcome = self._by_whole(rules, kept) or outcome
        return rules, outcome

    def _learned(self, *, by_column: bool) -> LossRules | str | None:
        if not self._parts:
            return None
        learn = learned_columns if by_column else learned
        return learn(
            self._whole.terms,
            [part.terms for part in self._parts],
            self._whole.loss.dtype,
            known=self._known,
            looks=self._run.world_size == 1,
            parameters=ParameterNames(self._run.module),
        )

    def _of_all_ranks(self, rules: LossRules | str | None) -> LossRules | str | None:
        """The rules on which all ranks agree, or the reason why a rank has none."""
        if self._run.world_size == 1:
            return rules
        told: list[LossRules | str | None] = values_of_ranks(self._run, rules)
        for one in told:
            if one == VARYING_FACTOR or isinstance(one, CurvedLoss | UnlikeDivisors):
                return one
        return agreed(rules, told)

    def _kept(self, rules: LossRules, outcome: ComparisonOutcome | None) -> list[int]:
        """If a comparison failed, the means whose divisors don't add up, because some may be clamped."""
        if outcome is not None and outcome.miss.excess <= 1:
            return []
        totals = [
            sum(values) for values in zip(*(counts_of(rules, part) for part in self._parts), strict=True)
        ]
        own = counts_of(rules, self._whole)
        unlike = [float(share_of(total, whole) != 1) for total, whole in zip(totals, own, strict=True)]
        unlike = largest_of_ranks(self._run, unlike)
        return [index for index in rules.means if unlike[index]]

    def _against_known(self) -> ComparisonOutcome:
        """Compare by rules from other rows, and return a failure: these rows may act on each other.

        Raises:
            NothingCountsError: the comparison does not fail: these rows only show less than is known.
        """
        outcome = None
        if self._known is not None and not any_rank(self._run, not self._can_read(self._known)):
            outcome = self._terms.compare(self._known, of_whole=True)
        if outcome is None or outcome.miss.excess <= 1:
            raise NothingCountsError
        return outcome

    def _can_read(self, rules: LossRules) -> bool:
        """Whether all of this rank's trials have the terms of these rules."""
        try:
            for trial in (self._whole, *self._parts):
                rules.read(trial.terms)
        except UnforeseenLossError:
            return False
        return True

    def _by_whole(self, rules: LossRules, kept: Sequence[int]) -> ComparisonOutcome | None:
        """Compare by the whole's divisors, if micro-batches have clamped ones; None if that fails, too.

        For several ranks, on which the counts of these terms are looked up in every batch (`LoneCounts`).
        """
        outcome = self._terms.compare(rules, of_whole=True)
        if outcome is None or outcome.miss.excess > 1:
            return None
        outcome.kept = frozenset(kept)
        return outcome


def _holds(found: Compared) -> bool:
    return found[1] is not None and found[1].miss.excess <= 1
