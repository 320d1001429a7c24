"""The plan of a loader's batches: a new one, or that of a checkpoint, divided among the present ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_memkit.data.batching.batch_plan import BatchPlan, PlanOptions, per_step
from lightning_memkit.data.batching.packed_rows import PackedRows
from lightning_memkit.data.batching.resharding import SharedEpoch, SharedPlan

_NAMES = {"rows_per_step": "batch_size", "tokens_per_step": "batch_tokens"}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Rows and the plan of how they become batches.

    Attributes:
        rows: Some may have been cut in two, so that all ranks of the first plan got equally many.
        first_plan: The plan for the ranks that training began on, which the state describes.
        plan: The same plan, or its steps divided among the present ranks.
    """

    rows: PackedRows
    first_plan: BatchPlan
    plan: BatchPlan | SharedPlan

    @property
    def ranks(self) -> int:
        """Number of ranks that the first plan was made for."""
        return self.first_plan.ranks

    @property
    def least_rows(self) -> int:
        """The least rows that the last steps must have; 0: as many as planned."""
        return self.plan.least_rows if isinstance(self.plan, SharedPlan) else 0

    def identity(self, options: PlanOptions) -> dict[str, Any]:
        """What is delivered, in which order: a resume with another identity is refused."""
        return {
            "seed": options.seed,
            **self.first_plan.identity(),
            "shuffle": options.shuffle,
            "padding": options.padding,
            "drop_last": options.drop_last,
            **self.rows.identity,
        }

    def refuse_no_step(self, options: PlanOptions) -> None:
        """Raise if the rows are too few for a step."""
        if self.plan.steps:
            return
        limit = (
            f"batch_size={options.batch_size}"
            if options.batch_size
            else f"batch_tokens={options.batch_tokens}"
        )
        raise ValueError(
            f"{len(self.rows)} rows are too few for {limit} on {self.plan.ranks} rank(s) "
            f"with drop_last={options.drop_last}; add documents, or lower the batch size or the context."
        )

    def refuse_begun_last_steps(self, state: Mapping[str, Any]) -> None:
        """Raise if the last steps must be regrouped, but some of them have already been trained on."""
        plan, done = self.plan, state["batches_done"]
        if not isinstance(plan, SharedPlan) or done >= plan.steps:
            return
        now = plan.epoch(state["epoch"]).redealt
        then = SharedEpoch(plan, self.first_plan.epoch(state["epoch"]), state.get("least_rows", 0)).redealt
        if now != then and done > min(now[0], then[0]):
            raise ValueError(
                f"The epoch's last {plan.steps - done} step(s) have too few rows for {plan.ranks} ranks, and the "
                f"steps before can't give any up, since they are done; end the epoch on {self.ranks} rank(s), and "
                "resume on more after it."
            )

    def note(self, options: PlanOptions, epoch: int, done: int) -> str | None:
        """A message if other ranks began the plan: how it continues, and whether it exceeds the present limits."""
        plan, limit = self.plan, options.batch_tokens
        if not isinstance(plan, SharedPlan):
            return None
        note = f"The steps are those of {self.ranks} rank(s), on which training began; the present ranks share them."
        if limit is None or self.first_plan.is_even:
            return note
        batches, above = plan.epoch(epoch), []
        for step in range(done, plan.steps):
            most = max(plan.padded_tokens(batch) for batch in batches.step(step))
            if most > limit:
                above.append(most)
        if above:
            note += (
                f" Of the {plan.steps - done} steps left in this epoch {len(above)} have more than "
                f"batch_tokens={limit} on a rank, at the most {max(above)}: rows of unlike lengths that stood in "
                "different batches now stand in one. Where that is too much, let MemoryBudget split them, or resume "
                f"on {self.ranks} rank(s)."
            )
        return note


def planned(rows: PackedRows, options: PlanOptions, ranks: int) -> Planned:
    """A plan for these ranks; some rows are cut in two if that gives all ranks equally many."""
    plan = BatchPlan(rows.packing, options, ranks=ranks, multiple_of=rows.multiple_of)
    packing = rows.packing
    if plan.dropped_rows and not options.drop_last and packing.rows + ranks <= packing.pieces:
        rows = replace(rows, packing=packing.divisible(ranks))
        plan = BatchPlan(rows.packing, options, ranks=ranks, multiple_of=rows.multiple_of)
    return Planned(rows=rows, first_plan=plan, plan=plan)


def planned_as_saved(rows: PackedRows, options: PlanOptions, ranks: int, state: Mapping[str, Any]) -> Planned:
    """The plan that a state's position belongs to, divided among these ranks.

    Raises:
        ValueError: some step has too few rows for them.
    """
    first_ranks, least_rows = state.get("ranks", ranks), state.get("least_rows", 0)
    limits = {option: state[name] // first_ranks or None for name, option in _NAMES.items() if name in state}
    first = planned(rows, replace(options, **limits), first_ranks)
    if first_ranks == ranks and not least_rows:
        return first
    shared = SharedPlan(
        first.first_plan,
        first.rows.packing,
        options,
        ranks=ranks,
        multiple_of=rows.multiple_of,
        least_rows=least_rows,
    )
    return replace(first, plan=shared)


def refuse_other_steps(state: Mapping[str, Any], options: PlanOptions, ranks: int) -> None:
    """Raise if a state's steps have other rows or tokens than the steps of these ranks may have.

    Raises:
        ValueError: it says which options would match.
    """
    for name, now in per_step(options, ranks).items():
        then = state.get(name, now)
        if then == now:
            continue
        option = _NAMES[name]
        first_ranks = state.get("ranks")
        on = f" (then {then // first_ranks} on each of {first_ranks} ranks)" if then and first_ranks else ""
        if not then:
            remedy = f"leave {option} out"
        elif then % ranks:
            fit = [str(number) for number in range(1, then + 1) if then % number == 0][:8]
            remedy = f"resume on a number of ranks that divides {then} ({', '.join(fit)} ...), with {option} to match"
        else:
            remedy = f"set {option}={then // ranks} on {ranks} rank(s)"
        raise ValueError(
            f"The loader's state is of other data ({name}: {then} then, {now} now), so its position means nothing "
            f"here{on}; {remedy}, or load the weights alone."
        )
