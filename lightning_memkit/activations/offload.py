"""Activations in host memory between forward and backward: the device keeps those of about two blocks."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_memkit.activations.blocks import BlockPattern, describe_blocks, find_blocks
from lightning_memkit.activations.checkpointing import checkpoint_modules
from lightning_memkit.activations.offload_choice import (
    BlockChoice,
    Stopwatch,
    choose_blocks,
    measure_copy_rates,
)
from lightning_memkit.activations.offload_pool import HostPool
from lightning_memkit.activations.offload_visits import OffloadCounts, Traffic
from lightning_memkit.memory.limits import host_limits
from lightning_memkit.memory.units import format_bytes, parse_bytes
from lightning_memkit.utilities.errors import NoEffectWarning

Choose = Literal["offload", "auto"]

_CALL = "_compiled_call_impl"  # `Module.__call__` runs this instead of `_call_impl` if it is set
_COMPILED_CHILD = "._orig_mod"
_SHARE_OF_HOST = 0.5  # of the free memory: the loader's workers and the page cache need some, too


def offload_activations(
    module: nn.Module,
    *,
    min_bytes: int | str = "1MiB",
    host_bytes: int | str = "auto",
    blocks: Sequence[BlockPattern] | None = None,
    pin_memory: bool = True,
    choose: Choose = "offload",
) -> "ActivationsOffload":
    """Keep the activations of all but about two blocks in host memory; each is copied to the host and back once.

    The tensors that a block saves for backward are copied to pinned host memory on a separate stream while
    the next block runs, and copied back during the backward of the next block. Loss and gradients stay
    bitwise the same (on CUDA under deterministic algorithms). Parameters and buffers never move, nor do their
    views, transposes and casts; a storage moves once, whatever the number of its saved views. Tensors saved
    outside of blocks (embeddings, head, loss) stay on the device. Blocks that are checkpointed, before or
    after this call, keep their inputs in host memory.

    Args:
        module: the model; its blocks are found by `find_blocks`.
        min_bytes: tensors with a smaller storage stay on the device; a size ("1MiB") or a count of bytes.
        host_bytes: the most host memory to use, as a size or a count of bytes; by default half of what is
            free now, and when that is used up, half of what is free then in addition. Tensors that exceed it
            stay on the device, with one warning.
        blocks: classes, or globs over module and class names, instead of the blocks that `find_blocks` finds.
        pin_memory: use page-locked host memory, without which copies can't overlap with computation.
        choose: `"offload"` moves every block's activations. `"auto"` times copies and the blocks' forwards in the
            first three passes; from then on, blocks whose copies take longer than the next block's work are
            checkpointed instead.

    Returns:
        A handle that undoes it when called, or when exited as a context manager; it also has counts.

    Raises:
        ValueError: a size can't be parsed, `choose` is unknown, or `blocks` is one string or class, not a
            list.
    """
    check_options(min_bytes, host_bytes, choose)
    found = find_blocks(module, blocks)
    if not found:
        _report_nothing(module, blocks)
    if host_bytes == "auto":
        pool = HostPool(room_on_the_host(), pin_memory, room_on_the_host)
    else:
        pool = HostPool(parse_bytes(host_bytes), pin_memory)
    return ActivationsOffload(module, found, Traffic(module, pool, parse_bytes(min_bytes)), pool, choose)


def room_on_the_host() -> int:
    """What `host_bytes="auto"` may use now: half of the memory that is free."""
    return int(_SHARE_OF_HOST * max(0, min(limit.free_bytes for limit in host_limits())))


def check_options(min_bytes: int | str, host_bytes: int | str, choose: str) -> None:
    """Refuse options that can't be parsed.

    Raises:
        ValueError: with the value, the rule and the remedy.
    """
    parse_bytes(min_bytes)
    if host_bytes != "auto":
        parse_bytes(host_bytes)
    if choose not in get_args(Choose):
        raise ValueError(f'choose={choose!r} is unknown; write "offload" (every block) or "auto".')


def describe_choices(choices: Sequence[BlockChoice]) -> str:
    """One line: how many blocks are offloaded and checkpointed, and the slowest copy beside its block."""
    again = [choice.cost for choice in choices if choice.recompute]
    text = f"{len(choices) - len(again)} of {len(choices)} blocks are offloaded"
    if again:
        worst = max(again, key=lambda cost: cost.moved_bytes)
        text += (
            f", {len(again)} checkpointed: {format_bytes(worst.moved_bytes)} of {worst.name} don't hide behind a "
            f"block's forward of {1e3 * worst.forward_seconds:.2f} ms"
        )
    return text


class ActivationsOffload:
    """The handle of a model whose activations are offloaded: counts, choices, and the undo.

    Made by `offload_activations`.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        traffic: Traffic,
        pool: HostPool,
        choose: Choose,
    ) -> None:
        self.choices: tuple[BlockChoice, ...] = ()
        self._module = module
        self._traffic = traffic
        self._pool = pool
        self._on = True
        self._undo_checkpointing: Callable[[], None] = lambda: None
        callables = [(name, _called(module, name, block)) for name, block in blocks]
        self._stopwatch = Stopwatch({b: n for n, b in callables}) if choose == "auto" else None
        self._patched = [(block, *self._patch(block)) for _, block in callables]

    @property
    def counts(self) -> OffloadCounts:
        """The counts so far."""
        return self._traffic.counts

    @property
    def stood_aside(self) -> bool:
        """Whether a block ran inside other saved-tensor hooks, so that its tensors were not offloaded."""
        return self._traffic.stood_aside

    def __call__(self) -> None:
        """Undo: blocks run as before; idle host memory is freed now, the rest when the pending backwards are done."""
        self._on = False  # if another patch lies over ours, ours only passes calls through from now on
        for block, ours, before in self._patched:
            if vars(block).get(_CALL) is not ours:
                continue
            if before is None:
                del vars(block)[_CALL]
            else:
                vars(block)[_CALL] = before
        self._patched = []
        self._undo_checkpointing()
        self._undo_checkpointing = lambda: None
        self._pool.close()

    def __enter__(self) -> "ActivationsOffload":
        return self

    def __exit__(self, *exception: object) -> None:
        self()

    def _patch(self, block: nn.Module) -> tuple[Callable[..., Any], Any]:
        """Replace what the block's `__call__` runs, so that hooks, forward and checkpointing all happen inside."""
        before = vars(block).get(_CALL)

        def call(*args: Any, **kwargs: Any) -> Any:
            run = block._call_impl if before is None else before
            if not self._on or torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return run(*args, **kwargs)
            with self._traffic.visit(block):
                if self._stopwatch is None:
                    return run(*args, **kwargs)
                return self._run_in_auto(self._stopwatch, block, lambda: run(*args, **kwargs))

        vars(block)[_CALL] = call
        return call, before

    def _run_in_auto(self, stopwatch: Stopwatch, block: nn.Module, run: Callable[[], Any]) -> Any:
        passes = self._traffic.passes
        device = self._traffic.device
        if stopwatch.is_done(passes) and device is not None:
            self._stopwatch = None
            self._choose(stopwatch, device)
        if device is None or not stopwatch.wants(passes):
            return run()
        before = self._traffic.moved_bytes
        with stopwatch.timed(block, device, passes) as moved:
            out = run()
            moved.append(self._traffic.moved_bytes - before)
        return out

    def _choose(self, stopwatch: Stopwatch, device: torch.device) -> None:
        self.choices = tuple(
            choose_blocks(stopwatch.costs, measure_copy_rates(device, self._pool.pin_memory))
        )
        names = [choice.cost.name for choice in self.choices if choice.recompute]
        if names:
            self._undo_checkpointing = checkpoint_modules(self._module, blocks=names)


def _called(module: nn.Module, name: str, block: nn.Module) -> nn.Module:
    """The module that is called in place of a block: `torch.compile(block)` wraps it in another one."""
    if name.endswith(_COMPILED_CHILD):
        return module.get_submodule(name[: -len(_COMPILED_CHILD)])
    return block


def _report_nothing(module: nn.Module, blocks: Sequence[BlockPattern] | None) -> None:
    if blocks is None:
        text = (
            f"No repeated blocks were found in {type(module).__name__}, so no activation is offloaded; name them, "
            'such as blocks=["MyBlock"].'
        )
    else:
        text = (
            f"No module matches blocks={list(blocks)!r}, so no activation is offloaded; blocks found: "
            f"{describe_blocks(find_blocks(module))}."
        )
    warnings.warn(text, NoEffectWarning, stacklevel=3)
