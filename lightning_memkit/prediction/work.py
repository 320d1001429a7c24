"""What a step's operators compute and move, from which its time on a device follows."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.memory.flops import flops_of
from lightning_memkit.utilities.tensors import tensors_of

_aten = torch.ops.aten
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_MOVE_NOTHING = {
    _aten.set_, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
    _aten.resize_, _aten.detach_, _aten.lift_fresh,
}  # fmt: skip
COMMUNICATION = ("c10d", "_c10d_functional")  # namespaces
RECORDED, MADE_AGAIN = (
    "memkit.recorded",
    "memkit.made_again",
)  # by a tape: Python's overhead for an operator


@dataclass(frozen=True)
class TensorShape:
    """The properties of a tensor on which a kernel's time depends."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OperatorWork:
    """One operator on operands of given shapes.

    Attributes:
        name: with namespace and overload, `aten.mm.default`.
        args: its arguments, with tensors as `TensorShape`.
        kwargs: its keyword arguments as pairs.
        flops: FLOPs of its matrix products (a multiply-add is two); 0 for others.
        moved_bytes: bytes of operands read and results written.
        is_16_bit: whether its first operand has 16 bits.
    """

    name: str
    args: tuple[Any, ...] = field(repr=False)
    kwargs: tuple[Any, ...] = field(repr=False)
    flops: int
    moved_bytes: int
    is_16_bit: bool

    @property
    def is_python(self) -> bool:
        """Whether it represents Python's overhead, for which a GPU does not wait."""
        return self.name in (RECORDED, MADE_AGAIN)

    @property
    def communicates(self) -> bool:
        """Whether it moves its bytes between ranks."""
        return self.name.partition(".")[0] in COMMUNICATION


@dataclass(frozen=True, kw_only=True)
class Work:
    """The operators of a step: those of each micro-batch (forward and backward), and of the optimizer's step.

    Attributes:
        part: how often each runs for a micro-batch.
        step: how often each runs in the optimizer's step.
    """

    part: dict[OperatorWork, float] = field(default_factory=dict)
    step: dict[OperatorWork, float] = field(default_factory=dict)

    @property
    def part_flops(self) -> float:
        """FLOPs of the matrix products of a micro-batch's forward and backward, including recomputation."""
        return sum(operator.flops * count for operator, count in self.part.items())


@dataclass(slots=True)
class _TimesRun:
    """How often an operator has run for micro-batches, and in the optimizer's step; None makes no work."""

    operator: OperatorWork | None
    part: float = 0
    step: float = 0


class WorkLog:
    """Records the operators that run; costs some microseconds an operator.

    Attributes:
        weight: how many operators the next one represents.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        # By what looks alike: hashing the work itself would take longer.
        self._known: dict[Any, _TimesRun] = {}

    def note(
        self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, *, key: Any, of_optimizer: bool
    ) -> None:
        """Record an operator that has run on fake tensors; `key` is the same for all that look alike, or None."""
        try:
            times = None if key is None else self._known.get(key)
            if times is None:
                shapes = _shapes(args), _shapes(kwargs)
                key = (func, *shapes) if key is None else key
                times = self._known.get(key)
                if times is None:
                    times = self._known[key] = _TimesRun(_operator(func, args, kwargs, out, shapes))
        except TypeError:  # an argument is not hashable
            return
        if of_optimizer:
            times.step += self.weight
        else:
            times.part += self.weight

    def note_kernel(self, name: str, moved_bytes: int) -> None:
        """Record that one of memkit's own kernels would have run in the optimizer's step."""
        operator = OperatorWork(name, (), (), 0, moved_bytes, is_16_bit=True)
        self._known.setdefault(operator, _TimesRun(operator)).step += 1

    def note_python(self, name: str) -> None:
        """Record Python's overhead for an operator of a micro-batch: `RECORDED` or `MADE_AGAIN`."""
        times = self._known.get(name)
        if times is None:
            operator = OperatorWork(name, (), (), 0, 0, is_16_bit=False)
            times = self._known[name] = _TimesRun(operator)
        times.part += 1

    def forget(self) -> None:
        """Start anew."""
        for times in self._known.values():
            times.part = times.step = 0

    def work(self, parts: int) -> Work:
        """The average work of each of `parts` micro-batches, and that of the step."""
        part, step = Counter[OperatorWork](), Counter[OperatorWork]()
        for times in self._known.values():
            if times.operator is not None:
                part[times.operator] += times.part  # pyright: ignore[reportArgumentType]
                step[times.operator] += times.step  # pyright: ignore[reportArgumentType]
        return Work(
            part={operator: count / max(1, parts) for operator, count in part.items() if count},
            step={operator: count for operator, count in step.items() if count},
        )


def _operator(
    func: Any, args: Any, kwargs: dict[str, Any], out: Any, shapes: tuple[Any, Any]
) -> OperatorWork | None:
    """The work of an operator; None if it only makes a view or allocates."""
    if func.overloadpacket in _MOVE_NOTHING:
        return None
    operands, results = list(tensors_of(args)), list(tensors_of(out))
    operands += tensors_of(kwargs)
    is_written = func._schema.is_mutable or func.namespace in COMMUNICATION
    if not (operands or results) or (not is_written and results and _is_view(operands, results)):
        return None
    moved = sum(_spanned_bytes(tensor) for tensor in (*operands, *results))
    return OperatorWork(
        str(func), shapes[0], shapes[1], flops_of(func, args, kwargs, out), moved,
        is_16_bit=bool(operands) and operands[0].dtype.itemsize == 2,
    )  # fmt: skip


def _is_view(operands: Iterable[Tensor], results: Iterable[Tensor]) -> bool:
    stored = {tensor.untyped_storage()._cdata for tensor in operands}
    return all(tensor.untyped_storage()._cdata in stored for tensor in results)


def _spanned_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's distinct elements: expanded dimensions are read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * tensor.dtype.itemsize


def _shapes(item: Any) -> Any:
    if isinstance(item, Tensor):
        return TensorShape(tuple(item.shape), tuple(item.stride()), item.dtype)
    if isinstance(item, (list, tuple)):
        return tuple(_shapes(value) for value in item)
    if isinstance(item, dict):
        return tuple((name, _shapes(value)) for name, value in item.items())
    return item if isinstance(item, _PLAIN) else None
