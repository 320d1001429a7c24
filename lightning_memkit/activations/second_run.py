"""Tests whether a block's Python may run a second time: state outside of buffers would be written twice."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memkit.activations.buffers import buffers_replaced
from lightning_memkit.activations.randomness import OperatorRandomState
from lightning_memkit.activations.tape import Tape
from lightning_memkit.activations.whole_blocks import attributes


class SecondRun:
    """Captures what a block's forward starts from, to test whether a second one gives the same; copies its buffers.

    A forward that writes to its inputs, to weights, or to tensors and numbers in the block's attributes, or
    draws from Python's or NumPy's global random generators is not run a second time, because that would
    change them once more. Other Python state is not seen: a counter in a closure or inside an object of
    another kind counts the trial, too.

    Args:
        block: the block whose forward comes next.
        args: that forward's positional arguments.
        kwargs: that forward's keyword arguments.
    """

    def __init__(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._block, self._args, self._kwargs = block, args, kwargs
        self._buffers = {
            name: buffer.detach().clone() for name, buffer in block.named_buffers(remove_duplicate=False)
        }
        values = tree_leaves((args, kwargs))
        devices = {value.device for value in values if isinstance(value, Tensor)}
        generators = [one for one in attributes(block, tuple(values)) if isinstance(one, torch.Generator)]
        self._random = OperatorRandomState(
            {one for one in devices if one.type not in ("cpu", "meta")}, generators
        )
        self._found = self._state()

    def gives(self, out: Any, plain: Callable[..., Any]) -> bool:
        """Run the forward once more, keeping nothing; True if it may run again and gives `out` bit for bit."""
        if not _same(self._found, self._state()):
            return False
        tape = Tape(lambda operator: False)
        with buffers_replaced(self._block, self._buffers), self._random.restored():
            try:
                again = tape.record(lambda: plain(*self._args, **self._kwargs))
            except torch.OutOfMemoryError:
                raise
            except Exception:  # whatever a block's Python raises in a second run
                return False
        before, now = tree_leaves(out), tree_leaves(again)
        return len(before) == len(now) and all(map(_equal, before, now))

    def _state(self) -> list[tuple[Any, int]]:
        """What a forward reads and may have written, with the version of each tensor."""
        values = tree_leaves((self._args, self._kwargs, *_held(self._block)))
        numbers = random.getstate(), *_numpy_state()
        return [(value, _version(value)) for value in (*values, *numbers)]


def _held(block: nn.Module) -> Iterator[Any]:
    """The attributes of a block's modules, without buffers, which are restored separately."""
    for part in block.modules():
        yield from ([name, value] for name, value in vars(part).items() if name != "_buffers")


def _numpy_state() -> tuple[Any, ...]:
    _, words, *rest = np.random.get_state()
    return bytes(np.asarray(words)), *rest


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _same(before: list[tuple[Any, int]], now: list[tuple[Any, int]]) -> bool:
    return len(before) == len(now) and all(
        version == later and (value is found or (_is_constant(value) and value == found))
        for (value, version), (found, later) in zip(before, now, strict=True)
    )


def _is_constant(value: Any) -> bool:
    return isinstance(value, (int, float, complex, str, bytes, tuple))


def _equal(before: Any, now: Any) -> bool:
    if not (isinstance(before, Tensor) and isinstance(now, Tensor)):
        return type(before) is type(now)
    return before.dtype == now.dtype and before.shape == now.shape and torch.equal(before, now)
