"""Count what no operator shows: Python's overhead for those that a tape records and recomputes, and random states."""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.activations.recorded import Operator, Value
from lightning_memkit.activations.tape import Tape
from lightning_memkit.prediction.replaced import replaced
from lightning_memkit.prediction.work import MADE_AGAIN, RECORDED, WorkLog


@contextmanager
def noted_recording(work: WorkLog) -> Iterator[None]:
    """Within the context, record each operator that a tape records or recomputes, besides its own work."""
    plain_after, plain_run = Tape._after, Operator.run

    def after(self: Tape, operator: Operator, out: Any, written: dict[int, Tensor]) -> None:
        work.note_python(RECORDED)
        plain_after(self, operator, out, written)

    def run(self: Operator, spent: Container[Value] = ()) -> None:
        work.note_python(MADE_AGAIN)
        plain_run(self, spent)

    with replaced(Tape, _after=after), replaced(Operator, run=run):
        yield


@contextmanager
def counted_random_states(track: Callable[[Iterable[Tensor]], None]) -> Iterator[None]:
    """Within the context, count the CPU generator's states that activation checkpointing saves: 5 KB each."""
    plain = torch.get_rng_state

    def counted() -> Tensor:
        state = plain()
        track([state])
        return state

    torch.get_rng_state = torch.random.get_rng_state = counted
    try:
        yield
    finally:
        torch.get_rng_state = torch.random.get_rng_state = plain
