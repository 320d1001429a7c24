"""Give micro-batches the random numbers that the batch drew for the same rows, to compare both in train mode.

A step that draws random numbers (dropout, noise of a diffusion model) draws others for a micro-batch than for
the same rows within the batch. Here the batch's draws are recorded, and its micro-batches get those of their
rows.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_memkit.utilities.generators import same_states, torch_states

LEVELS = (0, 1, 2)

# They normalize with the batch's statistics, which has a warning of its own: here they are in eval mode.
_BATCHED = (nn.modules.batchnorm._BatchNorm,)
_aten = torch.ops.aten


class SharedDraws(TorchDispatchMode):
    """While active, random operators return a batch's recorded numbers in its micro-batches.

    A tensor with one entry (or several consecutive ones) for each row of the batch is handed out by rows; one
    that has the same shape in both is handed out whole. Attention kernels run without dropout. Draws of other
    shapes, and those of Python and NumPy, are not handed out.

    Attributes:
        complete: whether all draws could be handed out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.complete = True
        self._recorded: list[list[Any]] = []
        self._place: int | None = None  # the index of the next draw; None while the batch is recorded
        self._first, self._rows, self._total = 0, 0, 0

    def has_draws_without_rows(self, rows: int) -> bool:
        """Whether the recorded batch of so many rows drew numbers for all rows together: a mixup's weight, say.

        Told by the number of elements, since rows need not come first in a tensor.
        """
        drawn = [one for draws in self._recorded for one in draws if isinstance(one, Tensor)]
        return any(one.numel() % rows for one in drawn)

    def record(self) -> None:
        """Call before the whole batch runs; its draws are recorded."""
        self._recorded, self._place = [], None

    def hand_out(self, first: int, rows: int, total: int) -> None:
        """Call before a run of `rows` of the batch's `total` rows, from `first` on; these may be all rows."""
        self._place, self._first, self._rows, self._total = 0, first, rows, total

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        args, kwargs = _without_dropout(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        before = torch_states()
        out = func(*args, **kwargs)
        own = any(isinstance(given, torch.Generator) for given in (*args, *kwargs.values()))
        if not own and same_states(before, torch_states()):
            return out  # attention kernels have the tag, and without dropout draw nothing
        drawn, spec = tree_flatten(out)
        if self._place is None:
            self._recorded.append([d.detach().clone() if isinstance(d, Tensor) else d for d in drawn])
            return out
        if self._place >= len(self._recorded):
            self.complete = False
            return out
        recorded = self._recorded[self._place]
        self._place += 1
        if func is _aten.native_dropout.default:
            return self._dropped(args, recorded, out)
        for index, value in enumerate(drawn):
            share = self._share(recorded[index], value) if index < len(recorded) else None
            if share is None:
                self.complete = self.complete and not isinstance(value, Tensor)
            else:
                value.copy_(share)
        return tree_unflatten(drawn, spec)

    def _dropped(self, args: Any, recorded: list[Any], out: Any) -> Any:
        """Apply the batch's dropout mask to this micro-batch's input, instead of copying the output."""
        mask = self._share(recorded[1], out[1])
        if mask is None:
            self.complete = False
            return out
        return args[0] * mask / max(1 - args[1], 1e-12), mask

    def _share(self, recorded: Any, value: Any) -> Tensor | None:
        """This micro-batch's rows of a recorded tensor; None if the shapes don't fit."""
        if not isinstance(value, Tensor) or not isinstance(recorded, Tensor):
            return None
        if recorded.shape == value.shape:
            return recorded
        if not value.ndim or recorded.shape[1:] != value.shape[1:] or recorded.shape[0] % self._total:
            return None
        each = recorded.shape[0] // self._total
        if value.shape[0] != each * self._rows:
            return None
        return recorded.narrow(0, each * self._first, each * self._rows)


def _without_dropout(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of an operator, with the dropout of an attention kernel set to 0."""
    schema = getattr(func, "_schema", None)
    if schema is None or "scaled_dot_product" not in schema.name:
        return args, kwargs
    names = [argument.name for argument in schema.arguments]
    if "dropout_p" in kwargs:
        kwargs["dropout_p"] = 0.0
    elif "dropout_p" in names and len(args) > names.index("dropout_p"):
        place = names.index("dropout_p")
        args = (*args[:place], 0.0, *args[place + 1 :])
    return args, kwargs


@contextmanager
def quiet(module: nn.Module, level: int) -> Iterator[SharedDraws | None]:
    """A context for steps with less noise.

    Level 0 puts batch normalization into eval mode; level 1 also yields the draws to hand out; level 2 puts
    the whole module into eval mode.

    Args:
        module: the module whose submodules are switched to eval mode meanwhile.
        level: how much noise is removed, one of `LEVELS`.
    """
    switched = [
        child for child in module.modules() if child.training and (level == 2 or isinstance(child, _BATCHED))
    ]
    for child in switched:
        child.training = False
    try:
        if level == 1:
            with SharedDraws() as draws:
                yield draws
        else:
            yield None
    finally:
        for child in switched:
            child.training = True
