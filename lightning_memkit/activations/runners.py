"""Runs a block's forward under each policy."""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_memkit.activations.blocks import has_router
from lightning_memkit.activations.compiled import CompiledForward
from lightning_memkit.activations.operators import kind_of
from lightning_memkit.activations.planned import BudgetPlan, run_recorded, run_selective
from lightning_memkit.activations.policies import CompiledBlocks, Policy, SavedOperators, matches
from lightning_memkit.activations.whole_blocks import BlockSwitch, run_checkpointed, without_empty_cache
from lightning_memkit.utilities.errors import NoEffectWarning
from lightning_memkit.utilities.tensors import is_wrapper

_BUDGET_COMPILED = (
    'policy="budget:x" measures operators and can\'t be compiled around; write "compile:x" in place of compiling the '
    'model yourself, or "selective".'
)
_COMPILED_TWICE = (
    'policy="compile:x" compiles each block by itself; compiled around, all would become one graph without the bound. '
    'Leave the model uncompiled, or write "full" or "selective".'
)

Runner = Callable[[nn.Module, Callable[..., Any], tuple, dict[str, Any], BlockSwitch], Any]


def runners_of(policy: Policy | BudgetPlan, blocks: list[nn.Module]) -> tuple[list[Runner], Runner | None]:
    """What runs the forward of each block, and that of the whole module if the policy needs to see it."""
    if isinstance(policy, CompiledBlocks):
        compiled = CompiledForward(policy.budget, blocks)
        return [_compiled(compiled)] * len(blocks), None
    if isinstance(policy, BudgetPlan):
        refuse = _refuse_compiler(_BUDGET_COMPILED)
        return [_planned(policy, index, refuse) for index in range(len(blocks))], _root(policy, refuse)
    if isinstance(policy, SavedOperators):
        return [_selective(policy, len(blocks))] * len(blocks), None
    return [_whole(block) for block in blocks], None


def _compiled(compiled: CompiledForward) -> Runner:
    refuse = _refuse_compiler(_COMPILED_TWICE)

    def run(
        block: nn.Module, plain: Callable, args: tuple, kwargs: dict[str, Any], switch: BlockSwitch
    ) -> Any:
        refuse()
        # A cache is indexed by the layer's number: with one, every block would be compiled separately.
        return compiled(plain, *without_empty_cache(block, args, kwargs, switch))

    return run


def _root(plan: BudgetPlan, refuse: Callable[[], None]) -> Runner:
    def run(
        module: nn.Module, plain: Callable, args: tuple, kwargs: dict[str, Any], switch: BlockSwitch
    ) -> Any:
        refuse()
        return plan.run_root(plain, args, kwargs)

    return run


def _planned(plan: BudgetPlan, index: int, refuse: Callable[[], None]) -> Runner:
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
            note()  # raising here would only break the graph, and everything would run uncompiled
        if traced:
            traced.clear()
            raise RuntimeError(message)

    return refuse


def _selective(policy: SavedOperators, blocks: int) -> Runner:
    contexts = partial(_for_compiler, policy)  # made here, because the compiler takes it as a constant
    ran: set[str] = set()
    seen: WeakSet[nn.Module] = WeakSet()

    def run(
        block: nn.Module, plain: Callable, args: tuple, kwargs: dict[str, Any], switch: BlockSwitch
    ) -> Any:
        if torch.compiler.is_compiling():  # the compiler has its own way to save by operator
            return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if _has_wrappers(block, args, kwargs):
            return _run_opaque(block, plain, args, kwargs, switch)
        if len(seen) == blocks and policy != SavedOperators():  # only a policy that the user wrote must match
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


def _whole(block: nn.Module) -> Runner:
    if has_router(block):
        # Experts are chosen once: a router that runs again could choose others, and recomputation would fail.
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
    """Whether there are wrapper tensors (DTensor): a tape can't see the tensors inside."""
    return any(
        is_wrapper(tensor)
        for tensor in (*block.parameters(), *tree_leaves((args, kwargs)))
        if isinstance(tensor, Tensor)
    )


def _run_opaque(
    block: nn.Module, plain: Callable[..., Any], args: tuple, kwargs: dict[str, Any], switch: BlockSwitch
) -> Any:
    switch.say_once(
        f"{type(block).__name__} computes with tensors that stand for several (DTensor, quantized weights), of which "
        'no single operator can be saved: it is recomputed as a whole. Write policy="full" to say so, or shard whole '
        "blocks in place of what lies within them."
    )
    return run_checkpointed(block, plain, args, kwargs, switch)
