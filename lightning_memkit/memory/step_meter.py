"""Meter one whole training step: bytes by category, module and operator, waste, and FLOPs."""

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_memkit.memory import recomputation
from lightning_memkit.memory.anatomy import CATEGORIES, Anatomy, anatomy_at
from lightning_memkit.memory.flops import FlopCount
from lightning_memkit.memory.kinds import SavedBytes, by_kind, by_module
from lightning_memkit.memory.meter import Allocation
from lightning_memkit.memory.origins import Place
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.memory.owners import Owners
from lightning_memkit.memory.temporaries import TemporariesMeter
from lightning_memkit.memory.timeline import Timeline, most_of, timeline_of


@dataclass(frozen=True, kw_only=True)
class MeteredStep:
    """The bytes of one metered step.

    Args:
        anatomy: the anatomy of the peak; for a step that failed, of the moment when it did.
        timeline: what was alive at each moment.
        kinds: saved and allocated bytes by kind of operator (keys of `KINDS`).
        modules: the same by module, in descending order of saved bytes; the empty name is for all outside of
            modules.
    """

    anatomy: Anatomy
    timeline: Timeline = field(default_factory=Timeline)
    kinds: dict[str, SavedBytes] = field(default_factory=dict)
    modules: dict[str, SavedBytes] = field(default_factory=dict)


class StepMeter(TemporariesMeter):
    """A `TemporariesMeter` with modules, FLOPs and a timeline; costs some more microseconds an operator.

    Args:
        module: the module whose submodules are named.
        least_bytes: smaller waste is not reported.
        outer: lines of the stack above the step; see `origins.place`.
    """

    def __init__(
        self, module: nn.Module, *, least_bytes: int = 1 << 20, outer: Collection[Place] = ()
    ) -> None:
        super().__init__(least_bytes=least_bytes, outer=outer)
        self.flops = FlopCount()
        self._owners = Owners(module)
        self._failure: tuple[int, str, str] | None = None  # tick, operator, module
        self._is_new_attempt = False
        self._entered_with = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._owners)
            super().__enter__()
            self._entered_with = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._entered_with.close()

    # Instead of overriding `__torch_dispatch__` once more: torch wraps each override, which costs
    # microseconds.
    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._is_new_attempt:
            self._forget_attempt()
        self.origin = self._owners.current()
        try:
            out = super()._call(func, args, kwargs)
        except (RuntimeError, MemoryError) as error:
            if self._failure is None and is_out_of_memory(error):
                self._failure = self.clock, str(func), self.origin
            raise
        if self.phase in ("forward", "backward"):
            self.flops.note(func, args, kwargs, out, is_again=self._is_made_again)
        return out

    def step(
        self, *, gradients: Iterable[Tensor], optimizer_states: Iterable[Tensor], fixed_bytes: int = 0
    ) -> MeteredStep:
        """The metered step, after it has ended; arguments as for `dissect`."""
        self._say_what_followed()
        anatomy = self.dissect(
            gradients=gradients, optimizer_states=optimizer_states, fixed_bytes=fixed_bytes
        )
        anatomy = replace(anatomy, peak_place=self.place_of_peak())
        return _metered(anatomy, self.records, self.sums, self.peak_tick)

    def failed_step(
        self, *, gradients: Iterable[Tensor], optimizer_states: Iterable[Tensor], fixed_bytes: int = 0
    ) -> MeteredStep:
        """The step up to the operator that ran out of memory, and what was alive; a retry is counted anew.

        Call it while the error is handled: its traceback keeps the step's tensors alive. Arguments as for
        `dissect`.
        """
        self.track(optimizer_states, "optimizer_states")
        self.track(gradients, "gradients")
        births = [record for record in self.records if record.maker is not None]
        last = max(births, key=lambda record: record.born, default=None)
        if self._failure is not None:
            tick, operator, origin = self._failure
        elif last is not None:  # a budget refused it after it was counted here
            tick, operator, origin = last.born, str(last.maker), last.origin
        else:
            tick, operator, origin = self.clock, "", ""
        records = [_up_to(tick, record) for record in self.records if record.born <= tick]
        for record in records:
            if record.category is None:
                is_kept = record.phase == "forward" and record.died is None
                own = "saved_activations" if is_kept else "temporaries"
                record.category = "other" if record.phase == "outside" else own
        anatomy = anatomy_at(records, tick, fixed_bytes=fixed_bytes, operators=self.operators)
        anatomy = replace(anatomy, peak_phase=self.phase, peak_operator=operator, peak_module=origin)
        self._is_new_attempt, self._failure = True, None
        found = _metered(anatomy, records, self.sums, tick)
        timeline = replace(found.timeline, failed_at=len(found.timeline.ticks) - 1)
        return replace(found, timeline=timeline)

    def _say_what_followed(self) -> None:
        """What was taken for a further forward after the last backward belongs to the optimizer's step."""
        backward = [record.born for record in self.records if record.phase == "backward"]
        if not backward:
            return
        last = max(backward)
        for record in self.records:
            if record.phase == "forward" and record.born > last:
                record.phase = "optimizer"

    def _forget_attempt(self) -> None:
        """Start the records of a retry from what the failed attempt has left."""
        self._is_new_attempt = False
        self.records = [record for record in self.records if record.died is None]
        self.sums.clear()
        self.reset_peak()
        self.flops.forget()
        self.operators = 0

    def _is_made_again(self) -> bool:
        """Whether an operator is recomputed: by a tape, or in a backward with grad enabled, unlike autograd's own."""
        if self.phase != "backward":
            return False
        return recomputation.is_running() or (
            torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        )


def _metered(
    anatomy: Anatomy, records: list[Allocation], sums: list[tuple[int, int]], tick: int
) -> MeteredStep:
    most = most_of(records, "saved_activations")
    return MeteredStep(
        anatomy=anatomy,
        timeline=timeline_of(records, sums, CATEGORIES),
        kinds=by_kind(records, tick, most),
        modules=by_module(records, tick, most),
    )


def _up_to(tick: int, record: Allocation) -> Allocation:
    """A copy as of a tick, without a later death."""
    died = record.died if record.died is not None and record.died <= tick else None
    return replace(record, died=died)
