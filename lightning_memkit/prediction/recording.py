"""Count the operators that a tape records and recomputes, because Python's overhead for each takes time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_memkit.activations.recorded import Operator
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

    def run(self: Operator) -> None:
        work.note_python(MADE_AGAIN)
        plain_run(self)

    with replaced(Tape, _after=after), replaced(Operator, run=run):
        yield
