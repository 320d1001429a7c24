"""Count the FLOPs of a step's matrix products as they run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_ATTENTION, _BACKWARD = "_scaled_dot_product_", "_backward"  # in the operator names of all backends


Formula = Callable[[Any, dict[str, Any], Any], int]
_FORMULAS: dict[int, tuple[Any, Formula | None]] = {}  # by id: operators live forever, and are slow to hash


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of a matrix product, convolution or attention by torch's own formulas; 0 for anything else."""
    known = _FORMULAS.get(id(func))
    if known is None:
        known = _FORMULAS[id(func)] = (func, _formula(func.overloadpacket))
    return 0 if known[1] is None else known[1](args, kwargs, out)


def _formula(packet: Any) -> Formula | None:
    name = packet._qualified_op_name
    if _ATTENTION in name:
        return _attention_backward if _BACKWARD in name else _attention
    count = flop_registry.get(packet)
    if count is None:
        return None
    by_shapes = getattr(count, "__wrapped__", None)
    if by_shapes is None:
        return lambda args, kwargs, out: int(count(*args, **kwargs, out_val=out))

    # Avoid torch's wrapper: it traverses all arguments as trees, which takes longer than a small product.
    def counted(args: Any, kwargs: dict[str, Any], out: Any) -> int:
        named = {name: _shape(value) for name, value in kwargs.items()}
        return int(by_shapes(*map(_shape, args), **named, out_shape=_shape(out)))

    return counted


def _attention(args: Any, kwargs: dict[str, Any], out: Any) -> int:
    return int(sdpa_flop_count(*_of_equal_heads(*args[:3])))


def _attention_backward(args: Any, kwargs: dict[str, Any], out: Any) -> int:
    return int(sdpa_backward_flop_count(args[0].shape, *_of_equal_heads(*args[1:4])))


def _of_equal_heads(query: torch.Tensor, *others: torch.Tensor) -> list[list[int]]:
    """Shapes with as many key heads as query heads, also for grouped queries, which torch 2.10 refuses."""
    batch, heads, *_ = query.shape
    return [list(query.shape), *([batch, heads, *other.shape[2:]] for other in others)]


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    return [_shape(one) for one in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of a batch's forward and backward (a multiply-add is two), without the optimizer's.

    Args:
        model: what the model needs.
        again: what was recomputed to save memory.
        share_16_bit: fraction of both that has 16-bit operands.
        samples: of the batch.
        tokens: of the batch, including padding; 0 if it has none.
    """

    model: int = 0
    again: int = 0
    share_16_bit: float = 0.0
    samples: int = 0
    tokens: int = 0

    @property
    def units(self) -> int:
        """Tokens, or samples if there are none."""
        return self.tokens or self.samples

    def seconds_at(self, flops_16: float, flops_32: float) -> float:
        """Seconds of the model's FLOPs at a device's peak rates."""
        return self.model * (self.share_16_bit / flops_16 + (1 - self.share_16_bit) / flops_32)


class FlopCount:
    """Accumulates FLOPs; costs a microsecond an operator."""

    def __init__(self) -> None:
        self._model = self._again = self._of_16_bit = 0

    def note(
        self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, *, is_again: Callable[[], bool]
    ) -> None:
        """Count an operator that has run; `is_again` tells whether it is a recomputation."""
        count = flops_of(func, args, kwargs, out)
        if not count:
            return
        if is_again():
            self._again += count
        else:
            self._model += count
        if _operand_bytes(args) == 2:
            self._of_16_bit += count

    def forget(self) -> None:
        """Start counting anew."""
        self._model = self._again = self._of_16_bit = 0

    def total(self, samples: int = 0, tokens: int = 0) -> StepFlops:
        """The FLOPs that were counted, for a batch of this size."""
        all_ = self._model + self._again
        share = self._of_16_bit / all_ if all_ else 0.0
        return StepFlops(
            model=self._model, again=self._again, share_16_bit=share, samples=samples, tokens=tokens
        )


def _operand_bytes(args: Any) -> int:
    """Bytes an element of the widest operand."""
    return max((one.dtype.itemsize for one in args if isinstance(one, torch.Tensor)), default=0)
