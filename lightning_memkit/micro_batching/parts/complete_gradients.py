"""The user's hooks on complete gradients: where a batch runs in micro-batches, once a batch and not once in each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

TABLE = "_post_accumulate_grad_hooks"
OWN = ("lightning.", "lightning_memkit.", "pytorch_lightning.", "torch.", "torchmetrics.")

_Hooks = dict[int, Callable[[Tensor], None]]


class CompleteGradients:
    """Keeps hooks of `register_post_accumulate_grad_hook` from gradients that are not complete yet.

    Such a hook may clip, scale or use up a gradient: as it would those of the unsplit batch, it gets each gradient
    once, with all micro-batches in it.

    Args:
        module: whose parameters have the hooks.
        world_size: the number of ranks.
    """

    def __init__(self, module: nn.Module, world_size: int) -> None:
        self._module, self._world_size = module, world_size

    @property
    def incomplete(self) -> bool:
        """Whether hooks would see gradients that are not complete, and can't be kept from them.

        Ranks reduce gradients after their hooks, and an optimizer that steps in the backward has used up its
        gradients when the user's hooks run.
        """
        return self._is_incomplete(self._tables())

    def _is_incomplete(self, tables: dict[Tensor, _Hooks]) -> bool:
        beside_others = any(any(map(is_known, hooks.values())) for hooks in tables.values())
        return bool(tables) and (self._world_size > 1 or beside_others)

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """A context in which hooks don't run; yields a function that runs those of the gradients that came."""
        tables = self._tables()
        tables = {} if self._is_incomplete(tables) else tables
        kept = {parameter: dict(hooks) for parameter, hooks in tables.items()}
        came: dict[Tensor, None] = {}

        def note(parameter: Tensor) -> None:
            came.pop(parameter, None)  # the order is that of the last micro-batch
            came[parameter] = None

        def run() -> None:
            for parameter in list(came):
                for hook in kept[parameter].values():
                    hook(parameter)

        for hooks in tables.values():
            key = next(iter(hooks))
            hooks.clear()  # autograd reads this very table
            hooks[key] = note
        try:
            yield run
        finally:
            for parameter, hooks in tables.items():
                hooks.clear()
                hooks.update(kept[parameter])

    def _tables(self) -> dict[Tensor, _Hooks]:
        """The tables of hooks, by parameter, in which the user has some."""
        found = ((one, getattr(one, TABLE, None)) for one in self._module.parameters())
        return {one: hooks for one, hooks in found if hooks and not all(map(is_known, hooks.values()))}


def is_known(hook: Any) -> bool:
    """Whether a hook was defined by Lightning, torch or us."""
    while isinstance(hook, partial):
        hook = hook.func
    written_in = getattr(hook, "__module__", None) or type(hook).__module__
    return f"{written_in}.".startswith(OWN)
