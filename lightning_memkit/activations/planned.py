"""Runs blocks from tapes, which save named operators or those chosen from the first step's measurements."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from lightning_memkit.activations.blocks import has_router
from lightning_memkit.activations.choosing import OperatorChoice, choices, choose
from lightning_memkit.activations.policies import SavedBytesLimit, SavedOperators
from lightning_memkit.activations.profiling import BlockProfile, Profiler
from lightning_memkit.activations.recorded import Operator, is_plain
from lightning_memkit.activations.second_run import SecondRun
from lightning_memkit.activations.tape import Tape
from lightning_memkit.activations.whole_blocks import BlockSwitch, cache_in, run_checkpointed
from lightning_memkit.memory.meter import storages_of
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.utilities.errors import NoEffectWarning

Plain = Callable[..., Any]

_SCALES = 16  # steps for each doubling of the inputs: at most 4.4 % of a budget in bytes stays unused


def run_recorded(plain: Plain, args: tuple, kwargs: dict[str, Any], keep: Callable[[Operator], bool]) -> Any:
    """Run a block's forward; `keep` decides which operators' outputs stay in memory."""
    tape = Tape(keep)
    out = tape.record(lambda: plain(*args, **kwargs), _tensors((args, kwargs)))
    tape.finish(_tensors(out))
    return out


def run_selective(
    plain: Plain, args: tuple, kwargs: dict[str, Any], policy: SavedOperators, ran: set[str]
) -> Any:
    """Run a block's forward and save the operators of a policy; adds the names of all operators to `ran`."""
    chosen = policy.chooser()

    def keep(operator: Operator) -> bool:
        ran.add(operator.kind.name)
        return chosen(operator.kind.name)

    return run_recorded(plain, args, kwargs, keep)


class BudgetPlan:
    """Measures every block in the first forward, then saves what the budget allows with the least recomputation.

    The first forward keeps only the blocks' inputs, plus all tensors of the one block that is being measured;
    it takes several times as long. A block's choice goes by the positions of operators in its forward: if a
    later forward runs other operators, the rest of the block is recomputed from what was kept. On an
    accelerator that its host slows down, a block whose Python gave the same result twice is recomputed whole,
    as with `full`.

    Args:
        policy: the budget.
        module: the whole model.
        blocks: the number of blocks.
        switch: shared by the blocks.
    """

    def __init__(self, policy: SavedBytesLimit, module: nn.Module, blocks: int, switch: BlockSwitch) -> None:
        self._policy = policy
        self._module = module
        self._resident_bytes = 0
        self._profiles: dict[int, list[BlockProfile]] = {}
        self._chosen: dict[float, dict[int, OperatorChoice]] = {}
        self._fronts: dict[int, list[OperatorChoice]] = {}
        self._profiler = Profiler()
        self._once: set[int] = set()  # blocks whose Python code must not run a second time
        self._blocks = blocks
        self._switch = switch
        self._outside_bytes = 0
        self._forward = 0  # root forwards begun so far; calls of blocks outside any count as one
        self._measured_in: int | None = None
        self._counted: dict[int, StorageWeakRef] = {}
        self._warned = False

    @property
    def makes_again(self) -> bool:
        """Whether any choice so far recomputes anything."""
        return any(choice.keep is not None for chosen in self._chosen.values() for choice in chosen.values())

    @property
    def profiles(self) -> list[BlockProfile]:
        """What the first forward measured, a profile for each call of a block."""
        return [call for calls in self._profiles.values() for call in calls]

    @property
    def fixed_bytes(self) -> int:
        """What stays in memory under any choice: the blocks' inputs, and what is saved outside of them."""
        return self._outside_bytes + sum(call.input_bytes for call in self.profiles)

    @property
    def chosen(self) -> list[OperatorChoice]:
        """How blocks run by the latest choice, in their order; empty before there is one."""
        return list(next(reversed(self._chosen.values()), {}).values())

    def resize(self, by_bytes: int) -> None:
        """Enlarge or shrink the budget; measurements stay, the choice is repeated."""
        size = self._policy.size_bytes
        if size is None:
            raise ValueError("A budget that is a fraction has no bytes to be changed; give it in bytes.")
        self._policy = replace(self._policy, size_bytes=max(1, size + by_bytes))
        self._chosen.clear()
        self._warned = False

    # --- the whole model -------------------------------------------------------------------------------------

    def run_root(self, plain: Plain, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the forward of the whole model; the first one also counts the bytes saved outside of the blocks."""
        self._forward += 1
        if self._measured_in is not None or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if self._policy.whole_step:
            # Only now, because a model may be sharded after it was patched.
            self._resident_bytes = resident_bytes(self._module)
        given = (*_tensors((args, kwargs)), *_plain_tensors(self._module))
        inputs = {tensor.untyped_storage()._cdata for tensor in given}
        saved: dict[int, tuple[StorageWeakRef, int]] = {}

        def pack(tensor: Tensor) -> Tensor:
            if is_plain(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs:
                    saved[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            # The tensor itself would be a cycle where its own node saves it, which only a backward frees.
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = plain(*args, **kwargs)
        weights = {reference.cdata for reference in self._counted.values()}
        self._outside_bytes = sum(
            size for key, (alive, size) in saved.items() if not alive.expired() and key not in weights
        )
        return out

    # --- a block ---------------------------------------------------------------------------------------------

    def run_block(
        self, index: int, block: nn.Module, plain: Plain, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward of one block."""
        if self._measured_in is None or (self._measured_in == self._forward and self._forward):
            return self._measured(index, block, plain, args, kwargs)
        if not self._forward and len(self._profiles) < self._blocks and index not in self._profiles:
            return self._measured(index, block, plain, args, kwargs)
        choice = self._plan(_scale(self._profiles.get(index), args, kwargs)).get(index)
        if choice is None:
            return run_recorded(plain, args, kwargs, lambda operator: False)
        if choice.keep is None:
            return plain(*args, **kwargs)
        # A cache must be filled once only, which a tape ensures.
        if choice.whole and cache_in(args, kwargs) is None:
            return run_checkpointed(block, plain, args, kwargs, self._switch)
        return run_recorded(plain, args, kwargs, _Follow(choice, self._profiles[index][0]))

    def _measured(
        self, index: int, block: nn.Module, plain: Plain, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        self._measured_in = self._forward
        tape = Tape(lambda operator: True)
        inputs = _tensors((args, kwargs))
        second = None
        if self._profiler.on_accelerator(inputs) and self._may_run_twice(index, block, args, kwargs):
            second = SecondRun(block, args, kwargs)
        out = tape.record(lambda: plain(*args, **kwargs), inputs)
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        profile = self._profiler.profile(tape, _tensors(out), self._new_bytes(inputs), shapes)
        self._profiles.setdefault(index, []).append(profile)
        tape.release(lambda operator: False)
        tape.finish(_tensors(out))
        # Last, when nothing of the first run is in memory any more.
        pinned = any(operator.pinned for operator in profile.operators)
        if second is None or pinned or not second.gives(out, plain):
            self._once.add(index)
        return out

    def _may_run_twice(self, index: int, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
        return index not in self._once and not has_router(block) and cache_in(args, kwargs) is None

    def _new_bytes(self, inputs: list[Tensor]) -> int:
        total = 0
        for tensor in inputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._counted and not isinstance(tensor, nn.Parameter):
                self._counted[storage._cdata] = StorageWeakRef(storage)
                total += storage.nbytes()
        return total

    # --- the choice ------------------------------------------------------------------------------------------

    def _plan(self, scale: float) -> dict[int, OperatorChoice]:
        scale = scale if self._policy.size_bytes is not None else 1.0
        if scale not in self._chosen:
            if not self._fronts:
                self._counted.clear()
                known: dict[Any, list[OperatorChoice]] = {}
                for index, calls in self._profiles.items():
                    operators, whole = key = calls[0].operators, index not in self._once
                    self._fronts[index] = known[key] = known.get(key) or choices(operators, whole=whole)
            self._chosen[scale] = self._choose(scale)
        return self._chosen[scale]

    def _choose(self, scale: float) -> dict[int, OperatorChoice]:
        fixed = self.fixed_bytes
        saved = sum(call.saved_bytes for call in self.profiles)
        budget = self._policy.bytes_of(fixed + saved) - self._resident_bytes
        if self._policy.whole_step:
            largest = max((call.saved_bytes for call in self.profiles), default=0)
            budget -= int(scale * (self._outside_bytes + largest))
        budget = int(budget / scale)  # the equivalent for the measured sizes
        # A block that is called several times in a forward has one choice, counted once for every call.
        indices = [index for index, calls in self._profiles.items() for _ in calls]
        chosen = choose([self._fronts[index] for index in indices], budget - fixed)
        least = fixed + sum(self._fronts[index][0].size_bytes for index in indices)
        if least > budget and not self._warned:
            self._warned = True
            warnings.warn(
                f"The budget of {format_bytes(budget)} for saved activations can't be met: with every block "
                f"recomputed, {format_bytes(least)} of {format_bytes(fixed + saved)} stay (the blocks' inputs, and "
                f"{format_bytes(self._outside_bytes)} outside of the blocks). Everything is recomputed; a smaller "
                "micro-batch, or a loss without logits, saves more.",
                UserWarning,
                stacklevel=2,
            )
        if saved == 0 and not self._warned:
            self._warned = True
            warnings.warn(
                "No block saves an activation; the budget changes nothing.", NoEffectWarning, stacklevel=2
            )
        smallest: dict[int, OperatorChoice] = {}
        for index, choice in zip(indices, chosen, strict=True):
            if index not in smallest or choice.size_bytes < smallest[index].size_bytes:
                smallest[index] = choice
        return smallest


def _plain_tensors(module: nn.Module) -> list[Tensor]:
    own = (*module.parameters(), *module.buffers())
    return [tensor for tensor in own if is_plain(tensor)]


def resident_bytes(module: nn.Module) -> int:
    """This rank's bytes of weights, gradients of the same size, and AdamW's two states for each trained weight."""

    def held(tensor: Tensor) -> int:
        return sum(storage.nbytes() for storage in storages_of(tensor))

    weights = sum(map(held, (*module.parameters(), *module.buffers())))
    return weights + 3 * sum(held(parameter) for parameter in module.parameters() if parameter.requires_grad)


class _Follow:
    """Keeps the operators of a choice as long as the forward runs the operators that it was made for."""

    def __init__(self, choice: OperatorChoice, profile: BlockProfile) -> None:
        self._keep = choice.keep or frozenset()
        self._operators = profile.operators
        self._follows = True

    def __call__(self, operator: Operator) -> bool:
        index = operator.index
        if self._follows:
            self._follows = index < len(self._operators) and self._operators[index].func is operator.func
        return self._follows and index in self._keep


def _scale(profiles: list[BlockProfile] | None, args: tuple, kwargs: dict[str, Any]) -> float:
    """The size of the inputs relative to the measured ones, rounded up to one of a few steps."""
    if not profiles:
        return 1.0
    before = sum(_count(shape) for shape in profiles[0].shapes)
    now = sum(tensor.numel() for tensor in _tensors((args, kwargs)))
    return 2 ** (math.ceil(_SCALES * math.log2(now / before)) / _SCALES) if before and now else 1.0


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and is_plain(leaf)]
