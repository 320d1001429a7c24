"""Activation checkpointing in place: blocks keep only their inputs and are recomputed in the backward pass."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_memkit.activations.blocks import BlockPattern, describe_blocks, find_blocks
from lightning_memkit.activations.planned import BudgetPlan
from lightning_memkit.activations.policies import EveryKthBlock, SavedBytesLimit, parse_policy
from lightning_memkit.activations.runners import Runner, runners_of
from lightning_memkit.activations.whole_blocks import BlockSwitch
from lightning_memkit.utilities.errors import NoEffectWarning
from lightning_memkit.utilities.patching import replace_method

_MARK = "_memkit_checkpointed"


@dataclass(frozen=True)
class Checkpointed:
    """The result of `checkpoint_modules`; calling it undoes the checkpointing.

    Attributes:
        undo: restores the forwards.
        plan: the plan that chooses by bytes, under a policy that does so.
        blocks: the blocks whose forwards were replaced.
    """

    undo: Callable[[], None]
    plan: BudgetPlan | None = None
    blocks: tuple[nn.Module, ...] = ()

    def __call__(self) -> None:
        """Restore the forwards."""
        self.undo()


def checkpoint_modules(
    module: nn.Module, policy: str = "full", *, blocks: Sequence[BlockPattern] | None = None
) -> Checkpointed:
    """Save less of a module's forward and recompute it in backward; costs up to one more forward of its blocks.

    Loss and gradients stay bitwise the same, on CUDA under deterministic algorithms: recomputation uses the
    first forward's random numbers, autocast and default dtype, and buffers that a forward writes (BatchNorm
    statistics) are written once. Under `compile:x` loss and gradients are those of the compiled blocks. Of
    generators other than torch's own, `full` and `every:k` restore those that a block holds or is given.
    Forwards are replaced in place: parameter names, state dict and classes don't change, and keyword
    arguments pass through. In `eval()` and under `no_grad()` nothing changes. Blocks that route tokens to
    experts do so once. With `full`, `every:k` and `compile:x` an empty KV cache is not filled in training;
    with the first two a block that gets a filled one runs without checkpointing.

    Args:
        module: the model; its blocks are found by `find_blocks`.
        policy: `"full"` (every block); `"every:k"` (blocks 0, k, 2k, ...); `"selective"` (each block saves
            attention and every second matmul, and recomputes the rest) or
            `"selective:attention,matmul/2,silu"` (the operators to save; `/k` is every k-th of them);
            `"budget:x"` (the least recomputation that keeps the saved activations within a fraction of those
            without checkpointing, or within `"2GiB"`, measured in the first forward); `"auto:22GiB"` (the
            same, with a budget for the peak of a whole step); `"compile:x"` (each block compiled with torch's
            own bound on saved bytes; the first forward measures the peak with and without it, at one to four
            more compilations of a block, and warns and uses another bound or none if it does not lower the
            peak).
        blocks: classes, or globs over module and class names, instead of the blocks that `find_blocks` finds.

    Returns:
        The undo: calling it restores the forwards.

    Raises:
        ValueError: the policy is unknown; a transformers model declares that it does not support
            checkpointing and `blocks` is None; `blocks` is one string or class instead of a list; or a block
            is checkpointed already, by this function or by the model's own gradient checkpointing.

    Source: Chen et al. 2016, arXiv:1604.06174; torch.utils.checkpoint, `use_reentrant=False`.
    """
    parsed = parse_policy(policy)
    if blocks is None:
        _refuse_unsupported(module)
    found = find_blocks(module, blocks)
    chosen = parsed.select(found) if isinstance(parsed, EveryKthBlock) else found
    if not chosen:
        _report_nothing(module, blocks)
        return Checkpointed(lambda: None)
    _refuse_second_checkpointing(module)
    switch = BlockSwitch()
    plan = BudgetPlan(parsed, module, len(chosen), switch) if isinstance(parsed, SavedBytesLimit) else None
    runners, root = runners_of(plan or parsed, [block for _, block in chosen])
    undos = [_patch(block, "forward", run, switch) for (_, block), run in zip(chosen, runners, strict=True)]
    if root is not None:
        # Lightning calls a LightningModule's `training_step`, not its forward.
        name = "training_step" if hasattr(module, "training_step") else "forward"
        undos.append(_patch(module, name, root, switch))

    def undo() -> None:
        switch.on = False  # if another patch lies over ours, ours only passes calls through from now on
        for put_back in undos:
            put_back()

    return Checkpointed(undo, plan, tuple(block for _, block in chosen))


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


def _refuse_unsupported(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if getattr(inner, "supports_gradient_checkpointing", True) is False and hasattr(inner, "config"):
            found = [block for block, _ in find_blocks(inner)]
            raise ValueError(
                f"{type(inner).__name__} says that it does not support activation checkpointing "
                f"(supports_gradient_checkpointing=False){f', in {name}' if name else ''}; to checkpoint it all the "
                f"same, name its blocks, such as blocks={found[:1] or ['MyBlock']}."
            )


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


def _patch(module: nn.Module, name: str, run: Runner, switch: BlockSwitch) -> Callable[[], None]:
    def call(self: nn.Module, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not (switch.on and self.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        return run(self, plain, args, kwargs, switch)

    return replace_method(module, name, call, mark=_MARK if name == "forward" else None)
