"""Follows the tokens of a batch through a model: which positions change in which module's output or input."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memkit.utilities.tensors import is_wrapper, tensors_of

Key = tuple[str, int, int]  # the module's path, the number of the call, the index of the returned tensor

_FEATURES = (
    256  # features of each token's output that are read: a float copy of all logits would be too large
)
# Relative to the change in the changed documents. Rounding differs if experts get other numbers of tokens;
# otherwise kernels are bitwise reproducible.
_TOLERANCE, _COARSE_TOLERANCE = 1e-4, 2e-2


@dataclass(frozen=True, kw_only=True)
class Change:
    """A position in the flattened batch, the module whose output or input changed there, and by how much."""

    path: str
    place: int
    share: float
    is_input: bool = False


class TokenWatch:
    """While entered, records one number for every token of every module's output, in the order of execution.

    Modules whose outputs don't hold rows of tokens ([rows, length, ...] or [1, rows * length, ...]) are
    skipped: a flat sequence of tokens may be sorted by expert. The inputs of the innermost modules are
    recorded, too: behind a projection with zero weights no change would be visible. Takes at most 8 bytes a
    token and module.

    Args:
        model: The model to watch.
        rows: Rows of the batch.
        length: Tokens in a row.
    """

    def __init__(self, model: nn.Module, rows: int, length: int) -> None:
        self.seen: dict[Key, Tensor] = {}
        self.seen_inputs: dict[Key, Tensor] = {}
        self.coarse = False  # whether modules compute in 16 bits
        self._model, self._rows, self._length = model, rows, length
        self._calls: dict[str, int] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "TokenWatch":
        for path, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(path)))
            if next(module.children(), None) is None:
                hook = self._input_hook(path)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            call = self._calls[path] = self._calls.get(path, -1) + 1
            self._note(self.seen, (path, call), output)

        return note

    def _input_hook(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._note(self.seen_inputs, (path, self._calls.get(path, -1) + 1), [args, kwargs])

        return note

    def _note(self, into: dict[Key, Tensor], call: tuple[str, int], tensors: Any) -> None:
        in_rows = (self._rows, self._length), (1, self._rows * self._length)
        for index, tensor in enumerate(tensors_of(tensors)):
            is_plain = tensor.is_floating_point() and not is_wrapper(tensor)
            if is_plain and tuple(tensor.shape[:2]) in in_rows:
                into[(*call, index)] = _digest(tensor)
                self.coarse |= tensor.dtype in (torch.bfloat16, torch.float16)


def _digest(tensor: Tensor) -> Tensor:
    """One number for each token, [rows * length]."""
    flat = tensor.flatten(0, 1)
    flat = flat.flatten(1) if flat.dim() > 1 else flat[:, None]
    flat = flat[:, :: max(1, flat.size(1) // _FEATURES)]
    # Weighted, because a normalized output always has the same sum; not random, so as to draw no random
    # numbers.
    weights = torch.cos(torch.arange(1, flat.size(1) + 1, device=flat.device, dtype=torch.float32) * 2.4)
    return flat.detach().float() @ weights


def first_change(before: TokenWatch, after: TokenWatch, kept: Tensor, changed: Tensor) -> Change | None:
    """The first output, or else input, in which a kept token changed beyond rounding; None if there is none.

    Args:
        before: The record of a batch.
        after: The record of the same batch with other tokens.
        kept: bool [rows * length], the tokens that stayed and must not change.
        changed: bool [rows * length], the tokens that were changed.
    """
    tolerance = _COARSE_TOLERANCE if before.coarse else _TOLERANCE
    outputs = [(key, then, after.seen.get(key), False) for key, then in before.seen.items()]
    inputs = [(key, then, after.seen_inputs.get(key), True) for key, then in before.seen_inputs.items()]
    for key, then, now, is_input in outputs + inputs:
        if now is None or not bool(changed.any()):
            continue
        difference = (now - then).abs().nan_to_num(torch.inf)
        scale = float(difference[changed].square().mean().sqrt())
        moved = difference.masked_fill(~kept, 0)
        largest = float(moved.max())
        if largest > tolerance * scale:
            return Change(
                path=key[0],
                place=int(moved.argmax()),
                share=largest / scale if scale else torch.inf,
                is_input=is_input,
            )
    return None
