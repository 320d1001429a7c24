"""What a training step changes besides gradients, as a list with names: what k micro-batches would change k times."""

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

ChangeKind = Literal[
    "parameter",
    "buffer",
    "batch_statistics",
    "attribute",
    "container",
    "metric",
    "object",
    "generator",
    "batch",
]


@dataclass(frozen=True, kw_only=True)
class StepChange:
    """One thing that a step leaves changed, and would change again in every further step.

    Attributes:
        kind: `"parameter"` (a teacher's moving average, weights clamped in the step), `"buffer"`, `"batch_statistics"`
            (running averages of torch's batch and instance normalization), `"attribute"` (set anew), `"container"` (a
            list, dict, set or deque), `"metric"` (states of a torchmetrics object), `"object"` (a plain object of the
            user's own class), `"generator"` (random numbers of its own), `"batch"` (the batch itself).
        name: where it is, from the module: `teacher.weight`, `losses`, `queue[0]`; from the batch: `batch['x']`.
        composes: micro-batches one after the other were seen to leave what the whole batch leaves.
    """

    kind: ChangeKind
    name: str
    composes: bool = False

    def __str__(self) -> str:
        """The name, with the kind where it does not say so itself."""
        return self.name if self.kind == "batch" else f"{self.name} ({self.kind.replace('_', ' ')})"


def label(path: str, name: str) -> str:
    """What a place is called: from the module, whose own path is empty, or from the batch."""
    joint = "" if not path or not name or name.startswith(("[", ".")) else "."
    return f"{path}{joint}{name}".lstrip(".")


ABSENT = object()


def kind_of(before: Any, after: Any) -> ChangeKind:
    """What kind of thing an attribute is: a parameter, a container, or just an attribute."""
    value = after if before is ABSENT else before
    if isinstance(value, nn.Parameter):
        return "parameter"
    return "container" if isinstance(value, CONTAINERS) else "attribute"


CONTAINERS = (list, dict, set, deque)
