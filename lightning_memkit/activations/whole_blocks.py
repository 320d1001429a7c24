"""Runs a block that keeps only its inputs and is recomputed as a whole in the backward pass."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_memkit.activations.buffers import Snapshot, StatefulBuffers, buffers_replaced
from lightning_memkit.activations.randomness import OperatorRandomState
from lightning_memkit.utilities.errors import NoEffectWarning


@dataclass(slots=True)
class BlockSwitch:
    """State shared by the blocks of one call: whether checkpointing is on, and which warnings were given."""

    on: bool = True
    said: set[str] = field(default_factory=set)
    written: WeakKeyDictionary[nn.Module, StatefulBuffers] = field(default_factory=WeakKeyDictionary)

    def buffers(self, block: nn.Module) -> StatefulBuffers:
        """The record of the buffers that a block writes."""
        if block not in self.written:
            self.written[block] = StatefulBuffers(block)
        return self.written[block]

    def say_once(self, message: str, category: type[Warning] = UserWarning) -> None:
        """Warn, unless the same warning was given already."""
        if message not in self.said:
            self.said.add(message)
            warnings.warn(message, category, stacklevel=4)


def run_checkpointed(
    block: nn.Module, plain: Callable[..., Any], args: tuple, kwargs: dict[str, Any], switch: BlockSwitch
) -> Any:
    """Run a forward that keeps only its inputs and is recomputed as a whole."""
    cache = cache_in(args, kwargs)
    if cache is not None and cache.get_seq_length() > 0:
        switch.say_once(
            f"{type(block).__name__} gets a filled KV cache and runs without activation checkpointing: a "
            "second forward would append to the cache again. Train without a cache.",
            NoEffectWarning,
        )
        return plain(*args, **kwargs)
    args, kwargs = without_empty_cache(block, args, kwargs, switch)
    return _rerun(block, plain, switch.buffers(block), args, kwargs)


def without_empty_cache(
    block: nn.Module, args: tuple, kwargs: dict[str, Any], switch: BlockSwitch
) -> tuple[tuple, dict[str, Any]]:
    """A block's arguments without an empty KV cache: in training nothing reads it."""
    cache = cache_in(args, kwargs)
    if cache is not None and cache.get_seq_length() == 0:
        switch.say_once(
            f"The KV cache stays empty in checkpointed blocks ({type(block).__name__}) while training; "
            "set `use_cache=False` in the model's config to say so."
        )
        args = tuple(None if value is cache else value for value in args)
        kwargs = {name: None if value is cache else value for name, value in kwargs.items()}
    return args, kwargs


def _rerun(
    block: nn.Module, plain: Callable[..., Any], buffers: StatefulBuffers, args: tuple, kwargs: dict[str, Any]
) -> Any:
    # All arguments by position: torch searches only these for the devices whose random state it must save.
    names, count = tuple(kwargs), len(args)

    def run(*values: Any) -> Any:
        return plain(*values[:count], **dict(zip(names, values[count:], strict=True)))

    values = (*args, *kwargs.values())
    # The compiler traces writes to buffers itself and refuses foreign contexts.
    if torch.compiler.is_compiling():
        return checkpoint(run, *values, use_reentrant=False)
    snapshot = buffers.snapshot(block)
    generators = [one for one in attributes(block, values) if isinstance(one, torch.Generator)]
    recompute = _AsInForward(block, snapshot, OperatorRandomState(set(), generators) if generators else None)

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), recompute

    # torch stops recomputing at the last saved tensor, but rrelu fills its noise after that is saved.
    fills_late = any(isinstance(part, nn.RReLU) for part in block.modules())
    with set_checkpoint_early_stop(False) if fills_late else nullcontext():
        out = checkpoint(run, *values, use_reentrant=False, context_fn=contexts)
    buffers.learn(block, snapshot)
    return out


class _AsInForward(AbstractContextManager):
    """Restores what recomputation must find as in the forward, beyond what torch restores; entered once a backward."""

    def __init__(self, block: nn.Module, snapshot: Snapshot, own_random: OperatorRandomState | None) -> None:
        self._block = block
        self._snapshot = snapshot
        self._own_random = own_random
        self._dtype = torch.get_default_dtype()
        self._stack: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        # Lightning's bf16-true sets the default dtype only around the forward.
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)
        stack.enter_context(buffers_replaced(self._block, self._snapshot))
        if self._own_random is not None:
            stack.enter_context(self._own_random.restored())
        self._stack.append(stack)

    def __exit__(self, *exception: Any) -> None:
        self._stack.pop().__exit__(*exception)


def attributes(block: nn.Module, values: tuple) -> Iterator[Any]:
    """The values that a block is given, and the attributes of its modules."""
    yield from values
    for part in block.modules():
        yield from vars(part).values()


def cache_in(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The KV cache among the arguments, if any; recognized by the methods that transformers' caches share."""
    for value in (*args, *kwargs.values()):
        if hasattr(value, "get_seq_length") and hasattr(value, "update"):
            return value
    return None
