"""Activation checkpointing in place: blocks keep their inputs only and run again in the backward pass."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memkit.activations.blocks import BlockPattern, describe_blocks, find_blocks
from lightning_memkit.activations.buffers import Snapshot, StatefulBuffers, buffers_replaced
from lightning_memkit.activations.policies import parse_policy
from lightning_memkit.errors import NoEffectWarning

_MARK = "_memkit_checkpointed"


@dataclass(slots=True)
class _Switch:
    """Shared by the blocks of one call: whether checkpointing is on, and what was already said."""

    on: bool = True
    said: set[str] = field(default_factory=set)

    def say_once(self, message: str, category: type[Warning] = UserWarning) -> None:
        if message not in self.said:
            self.said.add(message)
            warnings.warn(message, category, stacklevel=4)


def checkpoint_modules(
    module: nn.Module, policy: str = "full", *, blocks: Sequence[BlockPattern] | None = None
) -> Callable[[], None]:
    """Keep only the inputs of a module's blocks and recompute the rest in backward; costs one more forward.

    Loss and gradients stay bitwise the same: random numbers, autocast and default dtype are those of the
    first forward, and buffers that a forward writes (BatchNorm statistics) are written once. Forwards are
    replaced in place: parameter names, state dict and classes don't change, and keyword arguments pass
    through. In `eval()` and under `no_grad()` nothing changes. An empty KV cache is not filled while
    training; a block that gets a filled one runs without checkpointing.

    Args:
        module: the model; its blocks are found by `find_blocks`.
        policy: `"full"` (every block) or `"every:k"` (blocks 0, k, 2k, ...).
        blocks: classes, or globs over module and class names, in place of the blocks found by themselves.

    Returns:
        The undo: a function that puts the forwards back.

    Raises:
        ValueError: the policy is unknown; `blocks` is one string or class and no list; or a block is
            checkpointed already, by this function or by the model's own gradient checkpointing.

    Source: Chen et al. 2016, arXiv:1604.06174; torch.utils.checkpoint, `use_reentrant=False`.
    """
    chosen = parse_policy(policy).select(find_blocks(module, blocks))
    if not chosen:
        _report_nothing(module, blocks)
        return lambda: None
    _refuse_second_checkpointing(module)
    switch = _Switch()
    previous = [(block, _patch(block, switch)) for _, block in chosen]

    def undo() -> None:
        switch.on = False  # where another patch lies on top of ours, ours only passes through from now on
        for block, (ours, before) in previous:
            if block.__dict__.get("forward") is not ours:
                continue
            if before is None:
                del block.forward
            else:
                block.forward = before

    return undo


def _report_nothing(module: nn.Module, blocks: Sequence[BlockPattern] | None) -> None:
    if blocks is None:
        children = ", ".join(f"{name} ({type(child).__name__})" for name, child in module.named_children())
        text = (
            f"No repeated blocks were found in {type(module).__name__}, so no activation is checkpointed; "
            f'name them, such as blocks=["MyBlock"]. Modules there: {children or "none"}.'
        )
    else:
        text = (
            f"No module matches blocks={list(blocks)!r}, so no activation is checkpointed; blocks found: "
            f"{describe_blocks(find_blocks(module))}."
        )
    warnings.warn(text, NoEffectWarning, stacklevel=3)


def _refuse_second_checkpointing(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if hasattr(inner.__dict__.get("forward"), _MARK):
            raise ValueError(
                f"{name} is checkpointed already; call the undo of the first call before the second."
            )
        if getattr(inner, "gradient_checkpointing", False):
            raise ValueError(
                f"{name or type(inner).__name__} is checkpointed already by the model's own gradient "
                "checkpointing; use one of the two (in transformers: activation_checkpointing_disable())."
            )


def _patch(block: nn.Module, switch: _Switch) -> tuple[MethodType, Any]:
    """Replace the forward on the instance; returns the new one and what the instance had before."""
    before = block.__dict__.get("forward")
    buffers = StatefulBuffers(block)

    # A method named `forward`, so that copy.deepcopy binds it to the copy and pickle finds the class's own.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = type(self).forward.__get__(self) if before is None else before
        if not (switch.on and self.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        cache = _cache_in(args, kwargs)
        if cache is not None and cache.get_seq_length() > 0:
            switch.say_once(
                f"{type(self).__name__} gets a filled KV cache and runs without activation checkpointing: a "
                "second forward would append to the cache again. Train without a cache.",
                NoEffectWarning,
            )
            return plain(*args, **kwargs)
        if cache is not None:
            switch.say_once(
                f"The KV cache stays empty in checkpointed blocks ({type(self).__name__}) while training; "
                "set `use_cache=False` in the model's config to say so."
            )
            args = tuple(None if value is cache else value for value in args)
            kwargs = {name: None if value is cache else value for name, value in kwargs.items()}
        return _run_checkpointed(self, plain, buffers, args, kwargs)

    setattr(forward, _MARK, True)
    ours = MethodType(forward, block)
    block.forward = ours
    return ours, before


def _run_checkpointed(
    block: nn.Module, plain: Callable[..., Any], buffers: StatefulBuffers, args: tuple, kwargs: dict[str, Any]
) -> Any:
    # All by position: torch looks for the devices whose random state it must keep among those only.
    names, count = tuple(kwargs), len(args)

    def run(*values: Any) -> Any:
        return plain(*values[:count], **dict(zip(names, values[count:], strict=True)))

    values = (*args, *kwargs.values())
    if (
        torch.compiler.is_compiling()
    ):  # the compiler traces buffers' writes itself and refuses foreign contexts
        return checkpoint(run, *values, use_reentrant=False)
    snapshot = buffers.snapshot(block)
    recompute = _AsInForward(block, snapshot)

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), recompute

    out = checkpoint(run, *values, use_reentrant=False, context_fn=contexts)
    buffers.learn(block, snapshot)
    return out


class _AsInForward(AbstractContextManager):
    """What a recompute must find as the forward did, beyond what torch restores; entered once a backward."""

    def __init__(self, block: nn.Module, snapshot: Snapshot) -> None:
        self._block = block
        self._snapshot = snapshot
        self._dtype = torch.get_default_dtype()
        self._stack: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        # Lightning's bf16-true sets the default dtype around the forward only.
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)
        stack.enter_context(buffers_replaced(self._block, self._snapshot))
        self._stack.append(stack)

    def __exit__(self, *exception: Any) -> None:
        self._stack.pop().__exit__(*exception)


def _cache_in(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The KV cache among the arguments, if any; known by what transformers' caches have in common."""
    for value in (*args, *kwargs.values()):
        if hasattr(value, "get_seq_length") and hasattr(value, "update"):
            return value
    return None
