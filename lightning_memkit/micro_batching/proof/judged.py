"""The verdict on a failed comparison, and the candidate ways of weighing (values of `weigh_by`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_memkit.micro_batching import (
    WeighBy,
    Weigher,
    find_labels,
)
from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.graph.learned_rules import JointTerm, UnlikeDivisors
from lightning_memkit.micro_batching.parts.joining_rules import ways_of_weighing
from lightning_memkit.micro_batching.proof import verdicts
from lightning_memkit.micro_batching.proof.decomposability import Verdict
from lightning_memkit.micro_batching.proof.row_runs import ComparisonOutcome, Rows
from lightning_memkit.micro_batching.ranks.agreement import any_rank
from lightning_memkit.micro_batching.run import Step

UNREPEATED = 1e-3  # the relative difference of two runs of the same rows that no rounding explains


def counts_by_way(probed: Rows, outcome: ComparisonOutcome) -> dict[str, list[float]]:
    """The counts by which a micro-batch's logged or returned value may be weighed."""
    return ways_of_weighing(outcome.present_shares, [probed.sizes[index] for index in outcome.present])


def changes_verdict(step: Step, probed: Rows, outcome: ComparisonOutcome) -> Verdict | None:
    """The verdict on what a step changes besides gradients; None if nothing, or all of it can be composed."""
    state, kept = outcome.state, list(outcome.changes)
    if state is not None:
        parts = [part for part in outcome.parts if part is not None]
        failed = set(
            state.learn(
                outcome.whole.left,
                [part.left for part in parts],
                counts_by_way(probed, outcome),
                [part.loss for part in parts],
            )
        )
        noted = {name for name in failed if state.notes_integers(name, outcome.whole.left)}
        settled = (set(state.names) - failed) | noted
        kept = [change for change in kept if change.name not in settled]
        if noted:
            names = ", ".join(sorted(noted))
            step.run.info(f"MemoryBudget: training_step adds to {names} once in each micro-batch.")
    return verdicts.changes_in_parts(kept) if any_rank(step.run, bool(kept)) else None


def mismatch_verdict(step: Step, outcome: ComparisonOutcome) -> Verdict:
    """The verdict that names why the micro-batches don't add up."""
    error = outcome.miss.relative_error
    if isinstance(outcome.why, UnlikeDivisors):
        return verdicts.divided_unlike(outcome.why, error)
    if isinstance(outcome.why, JointTerm):
        return verdicts.joint(outcome.why)
    if outcome.why:
        return verdicts.curved(outcome.why, error)
    if outcome.bends:
        return verdicts.bent(step.run, error)
    if 0 < len(outcome.present) < len(outcome.parts):
        return verdicts.skips_parts()
    gradients = [part.gradient for part in outcome.parts if part is not None]
    return verdicts.missed(outcome.whole.gradient, gradients, outcome.present_shares, outcome.miss)


def draws_unequally(outcome: ComparisonOutcome) -> bool:
    """Whether the whole and its micro-batches leave unlike states of Python's and NumPy's generators."""
    runs = [part for part in outcome.parts if part is not None]
    return any(not alike(part.drawn, outcome.whole.drawn) for part in runs)


def may_be_unrepeatable(outcome: ComparisonOutcome, *, is_exact: bool) -> bool:
    """Whether the whole may draw from a generator that trials don't know.

    It differs from the run whose loss is scaled by more than rounding in float32. Weights in bfloat16 and an autocast
    of the step's own round that much, too: another run tells. Gradients that bend differ without being random.
    """
    return is_exact and not outcome.bends and outcome.comparison.level > UNREPEATED


def candidates(weigh_by: WeighBy | Weigher, batch: Any) -> list[WeighBy | Weigher]:
    """The ways of weighing to compare: the user's only, or all that fit the batch, the likeliest first."""
    if weigh_by != "auto" or hasattr(batch, "weight"):
        return [weigh_by]
    labels = find_labels(batch)
    if labels is None:
        return ["samples"]
    return ["labels", "samples"] if labels.ndim < 2 else ["labels", "causal_labels", "samples"]


@dataclass(frozen=True, kw_only=True)
class OpenWays:
    """The ways of weighing that gradients have not told apart: of batches with labels, and of those without.

    Args:
        given: the user's `weigh_by`.
        kind: the candidates of the batch at hand.
        left: of the candidates of batches that were compared, those that agreed with all of them.
    """

    given: WeighBy | Weigher
    kind: tuple[WeighBy | Weigher, ...] = ()
    left: Mapping[tuple[WeighBy | Weigher, ...], Sequence[WeighBy | Weigher]] = field(default_factory=dict)

    @property
    def open(self) -> list[WeighBy | Weigher]:
        """The ways for the batch at hand, the likeliest first."""
        return list(self.left.get(self.kind, self.kind))

    def chosen(self, weigh_by: WeighBy | Weigher) -> WeighBy | Weigher:
        """The way in use where it is open, else the likeliest."""
        return weigh_by if weigh_by in ("auto", *self.open) else self.open[0]

    @property
    def is_new(self) -> bool:
        """Whether no batch with these candidates was compared."""
        return self.kind not in self.left

    @property
    def without_labels(self) -> bool:
        """Whether only rows can be counted, so that ranks whose batches have labels can't count these."""
        return self.given == "auto" and self.kind == ("samples",)

    def at(self, batch: Any) -> "OpenWays":
        """For a batch."""
        return replace(self, kind=tuple(candidates(self.given, batch)))

    def by_rows(self) -> "OpenWays":
        """For a batch of which a rank's share has no labels."""
        return replace(self, kind=("samples",))

    def anew(self) -> "OpenWays":
        """With all candidates of the batch at hand open again."""
        return replace(self, left={})

    def agreeing(self, ways: Sequence[WeighBy | Weigher]) -> "OpenWays":
        """With these left of the batch's candidates."""
        return replace(self, left={**self.left, self.kind: list(ways)})
