"""Names for what a training step changes besides gradients, and k micro-batches would change k times."""

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
    "optimizer_state",
    "generator",
    "batch",
    "gradient",
]


@dataclass(frozen=True, kw_only=True)
class StepChange:
    """One value that a step leaves changed, and would change again in every further step.

    Attributes:
        kind: `"parameter"` (a teacher's moving average, weights clamped in the step), `"buffer"`,
            `"batch_statistics"` (running averages of torch's batch and instance normalization), `"attribute"`
            (assigned in the step), `"container"` (a list, dict, set or deque), `"metric"` (states of a
            torchmetrics object), `"object"` (a plain object of the user's own class), `"optimizer_state"`
            (a moment, say, which the optimizer's own step changes besides), `"generator"` (a random
            generator of the module's own), `"batch"` (the batch itself),
            `"gradient"` (of the step before, which is not changed but read).
        name: its path from the module (`teacher.weight`, `losses`, `queue[0]`) or from the batch
            (`batch['x']`).
        composes: a comparison has shown that micro-batches, run in sequence, leave what the whole batch
            leaves.
    """

    kind: ChangeKind
    name: str
    composes: bool = False

    def __str__(self) -> str:
        """The name, followed by the kind unless it is the batch."""
        return self.name if self.kind == "batch" else f"{self.name} ({self.kind.replace('_', ' ')})"


def label(path: str, name: str) -> str:
    """The name of a place, from its module's path (empty for the root module) and the name below it."""
    joint = "" if not path or not name or name.startswith(("[", ".")) else "."
    return f"{path}{joint}{name}".lstrip(".")


ABSENT = object()


def kind_of(before: Any, after: Any) -> ChangeKind:
    """The kind of an attribute: a parameter, a container, or a plain attribute."""
    value = after if before is ABSENT else before
    if isinstance(value, nn.Parameter):
        return "parameter"
    return "container" if isinstance(value, CONTAINERS) else "attribute"


CONTAINERS = (list, dict, set, deque)
