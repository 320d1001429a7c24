"""Activation checkpointing in place: blocks keep their inputs only and run again in the backward pass."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_memkit.activations.blocks import BlockPattern, describe_blocks, find_blocks, has_router
from lightning_memkit.activations.compiled import CompiledForward
from lightning_memkit.activations.operators import kind_of
from lightning_memkit.activations.planned import BudgetPlan, run_recorded, run_selective
from lightning_memkit.activations.policies import (
    CompiledBlocks,
    EveryKthBlock,
    Policy,
    SavedBytesLimit,
    SavedOperators,
    matches,
    parse_policy,
)
from lightning_memkit.activations.whole_blocks import BlockSwitch, run_checkpointed, without_empty_cache
from lightning_memkit.utilities.errors import NoEffectWarning
from lightning_memkit.utilities.patching import replace_method

_MARK = "_memkit_checkpointed"
_BUDGET_COMPILED = (
    'policy="budget:x" measures operators and can\'t be compiled around; write "compile:x" in place of compiling the '
    'model yourself, or "selective".'
)
_COMPILED_TWICE = (
    'policy="compile:x" compiles each block by itself; compiled around, all would become one graph without the bound. '
    'Leave the model uncompiled, or write "full" or "selective".'
)


_Runner = Callable[[nn.Module, Callable[..., Any], tuple, dict[str, Any], BlockSwitch], Any]


@dataclass(frozen=True)
class Checkpointed:
    """What `checkpoint_modules` has done; called, it is undone.

    Attributes:
        plan: what chooses by bytes, under a policy that does.
        blocks: those whose forwards were replaced.
    """

    undo: Callable[[], None]
    plan: BudgetPlan | None = None
    blocks: tuple[nn.Module, ...] = ()

    def __call__(self) -> None:
        """Put the forwards back."""
        self.undo()


def checkpoint_modules(
    module: nn.Module, policy: str = "full", *, blocks: Sequence[BlockPattern] | None = None
) -> Checkpointed:
    """Keep less of a module's forward and make it again in backward; costs up to one more forward of its blocks.

    Loss and gradients stay bitwise the same: random numbers, autocast and default dtype are those of the first
    forward, and buffers that a forward writes (BatchNorm statistics) are written once. Under `compile:x` they are
    those of the compiled blocks. Of generators other than torch's own, `full` and `every:k` repeat those that a block
    holds or is given. Forwards are replaced in place: parameter names, state dict and classes don't
    change, and keyword arguments pass through. In `eval()` and under `no_grad()` nothing changes. Blocks that choose
    among experts choose once. With `full`, `every:k` and `compile:x` an empty KV cache is not filled while training;
    with the first two a block that gets a filled one runs without checkpointing.

    Args:
        module: the model; its blocks are found by `find_blocks`.
        policy: `"full"` (every block); `"every:k"` (blocks 0, k, 2k, ...); `"selective"` (of every block attention and
            every second matmul are saved, the rest is made again) or `"selective:attention,matmul/2,silu"` (the
            operators to save; `/k` is every k-th of them); `"budget:x"` (the least recomputation that keeps the saved
            activations within a fraction of what they are without, or within `"2GiB"`, measured in the first
            forward); `"auto:22GiB"` (the same where the bytes are those of a whole step); `"compile:x"`
            (each block compiled with torch's own bound on saved bytes; the first forward measures the peak with it
            and without, for one to four more compilations of a block, and uses another bound or none, with a warning,
            where it lowers nothing).
        blocks: classes, or globs over module and class names, in place of the blocks found by themselves.

    Returns:
        The undo: called, it puts the forwards back.

    Raises:
        ValueError: the policy is unknown; a transformers model says that it does not support checkpointing and
            `blocks` names none; `blocks` is one string or class and no list; or a block is
            checkpointed already, by this function or by the model's own gradient checkpointing.

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
    runners, root = _runners(plan or parsed, [block for _, block in chosen])
    undos = [_patch(block, "forward", run, switch) for (_, block), run in zip(chosen, runners, strict=True)]
    if root is not None:
        # Lightning calls a LightningModule's training_step and not its forward.
        name = "training_step" if hasattr(module, "training_step") else "forward"
        undos.append(_patch(module, name, root, switch))

    def undo() -> None:
        switch.on = False  # where a foreign patch lies on top of ours, ours only passes through from now on
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


def _runners(policy: Policy | BudgetPlan, blocks: list[nn.Module]) -> tuple[list[_Runner], _Runner | None]:
    """What runs the forward of each block, and that of the whole module where the policy needs to see it."""
    if isinstance(policy, CompiledBlocks):
        compiled = CompiledForward(policy.budget, blocks)
        return [_compiled(compiled)] * len(blocks), None
    if isinstance(policy, BudgetPlan):
        refuse = _refuse_compiler(_BUDGET_COMPILED)
        return [_planned(policy, index, refuse) for index in range(len(blocks))], _root(policy, refuse)
    if isinstance(policy, SavedOperators):
        return [_selective(policy, len(blocks))] * len(blocks), None
    return [_whole(block) for block in blocks], None


def _compiled(compiled: CompiledForward) -> _Runner:
    refuse = _refuse_compiler(_COMPILED_TWICE)

    def run(
        block: nn.Module, plain: Callable, args: tuple, kwargs: dict[str, Any], switch: BlockSwitch
    ) -> Any:
        refuse()
        # A cache is asked by the number of the layer: with one, every block would be compiled for itself.
        return compiled(plain, *without_empty_cache(block, args, kwargs, switch))

    return run


def _root(plan: BudgetPlan, refuse: Callable[[], None]) -> _Runner:
    def run(
        module: nn.Module, plain: Callable, args: tuple, kwargs: dict[str, Any], switch: BlockSwitch
    ) -> Any:
        refuse()
        return plan.run_root(plain, args, kwargs)

    return run


def _planned(plan: BudgetPlan, index: int, refuse: Callable[[], None]) -> _Runner:
    def run(
        block: nn.Module, plain: Callable, args: tuple, kwargs: dict[str, Any], switch: BlockSwitch
    ) -> Any:
        refuse()
        if _has_wrappers(block, args, kwargs):
            return _run_opaque(block, plain, args, kwargs, switch)
        return plan.run_block(index, block, plain, args, kwargs)

    return run


def _refuse_compiler(message: str) -> Callable[[], None]:
    traced: list[bool] = []

    @torch.compiler.assume_constant_result
    def note() -> bool:
        traced.append(True)
        return True

    def refuse() -> None:
        if torch.compiler.is_compiling():
            note()  # an error here would only end the graph, and all would run uncompiled
        if traced:
            traced.clear()
            raise RuntimeError(message)

    return refuse


def _selective(policy: SavedOperators, blocks: int) -> _Runner:
    contexts = partial(_for_compiler, policy)  # made here: the compiler takes it as a constant
    ran: set[str] = set()
    seen: WeakSet[nn.Module] = WeakSet()

    def run(
        block: nn.Module, plain: Callable, args: tuple, kwargs: dict[str, Any], switch: BlockSwitch
    ) -> Any:
        if torch.compiler.is_compiling():  # the compiler has its own way to save by operator
            return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if _has_wrappers(block, args, kwargs):
            return _run_opaque(block, plain, args, kwargs, switch)
        if len(seen) == blocks and policy != SavedOperators():  # what is named should be there
            _report_unmatched(policy, ran, switch)
        seen.add(block)
        return run_selective(plain, args, kwargs, policy, ran)

    return run


def _report_unmatched(policy: SavedOperators, ran: set[str], switch: BlockSwitch) -> None:
    for pattern, _ in policy.save:
        if not any(matches(name, pattern) for name in ran):
            switch.say_once(
                f'No operator of the blocks matches {pattern!r} of policy="selective:...", so nothing is saved for '
                f"it; operators that ran: {', '.join(sorted(ran))}.",
                NoEffectWarning,
            )


def _whole(block: nn.Module) -> _Runner:
    if has_router(block):
        # Experts are chosen once: a router that runs again could choose others, and the recomputation would fail.
        def run(
            block: nn.Module, plain: Callable, args: tuple, kwargs: dict[str, Any], switch: BlockSwitch
        ) -> Any:
            if torch.compiler.is_compiling() or _has_wrappers(block, args, kwargs):
                return run_checkpointed(block, plain, args, kwargs, switch)
            return run_recorded(plain, args, kwargs, lambda operator: False)

        return run
    return run_checkpointed


def _for_compiler(policy: SavedOperators) -> Any:
    """Called once for each block while a graph is made of it, so that operators are counted block by block."""
    chosen = policy.chooser()

    def decide(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = kind_of(func).name
        return CheckpointPolicy.MUST_SAVE if chosen(name) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def _has_wrappers(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether tensors are there that stand for several (DTensor): a tape can't see what those hold."""
    return any(
        is_traceable_wrapper_subclass(tensor)
        for tensor in (*block.parameters(), *tree_leaves((args, kwargs)))
        if isinstance(tensor, Tensor)
    )


def _run_opaque(
    block: nn.Module, plain: Callable[..., Any], args: tuple, kwargs: dict[str, Any], switch: BlockSwitch
) -> Any:
    switch.say_once(
        f"{type(block).__name__} computes with tensors that stand for several (DTensor, quantized weights), of which "
        'no single operator can be saved: it is made again as a whole. Write policy="full" to say so, or shard whole '
        "blocks in place of what lies within them."
    )
    return run_checkpointed(block, plain, args, kwargs, switch)


def _patch(module: nn.Module, name: str, run: _Runner, switch: BlockSwitch) -> Callable[[], None]:
    def call(self: nn.Module, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not (switch.on and self.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        return run(self, plain, args, kwargs, switch)

    return replace_method(module, name, call, mark=_MARK if name == "forward" else None)
