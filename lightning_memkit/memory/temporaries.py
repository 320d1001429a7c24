"""Find the waste of one metered step: upcast logits, foreach copies, dense masks, zeroed gradients."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.memory.anatomy import AnatomyMeter
from lightning_memkit.memory.findings import Finding
from lightning_memkit.memory.meter import Allocation, storages_of, tensors_in
from lightning_memkit.memory.origins import Place, describe, place

_LOW = (torch.bfloat16, torch.float16)
_HANDS_ON = {"aten::clone", "aten::div", "aten::mul", "aten::tanh", "aten::copy_", "aten::_unsafe_view"}
_NORMALIZERS = {"aten::_log_softmax", "aten::logsumexp"}
_MASK_TAKERS = {"aten::add", "aten::masked_fill", "aten::where"}


class TemporariesMeter(AnatomyMeter):
    """An `AnatomyMeter` that also finds waste; costs some more microseconds for each large allocation.

    Args:
        least_bytes: smaller waste is not reported.
        outer: lines of the stack above the step; see `origins.place`.
    """

    def __init__(self, *, least_bytes: int = 1 << 20, outer: Collection[Place] = ()) -> None:
        super().__init__()
        self._least_bytes = least_bytes
        self._outer = outer
        self._places: dict[int, Place | None] = {}  # of large allocations, by the id of the record
        self._upcasts: dict[int, tuple[Allocation, int]] = {}  # by id: the record, bytes of the cast itself
        self._logits: list[tuple[int, Place | None, int]] = []
        self._foreach: list[Allocation] = []
        self._masks: dict[int, tuple[int, Place | None, tuple[int, ...]]] = {}
        self._zeroed: dict[int, int] = {}
        self._zeroed_at: Place | None = None

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = super()._count(func, args, kwargs)
        name = func._schema.name
        if self.phase == "forward":
            self._see_forward(name, args, kwargs, out)
        elif self.phase == "optimizer" and name.startswith("aten::_foreach_"):
            self._foreach += self._records(out)
        if name in ("aten::zero_", "aten::_foreach_zero_"):
            self._see_zeroed(args[0])
        return out

    def place_of_peak(self) -> str:
        """The user's line behind the peak's allocation if it was a large one of the forward; else empty."""
        born = [record for record in self.records if record.born <= self.peak_tick]
        last = max(born, key=lambda record: record.born, default=None)
        return describe(self._places.get(id(last)), "")

    def findings(self) -> list[Finding]:
        """The findings of the step, largest first; call it after `dissect`."""
        found = [*self._of_logits(), *self._of_foreach(), *self._of_masks(), *self._of_zeroed()]
        large = [finding for finding in found if finding.size_bytes >= self._least_bytes]
        return sorted(large, key=lambda finding: -finding.size_bytes)

    def _see_forward(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        for record in self._records(out):
            if record.size_bytes >= self._least_bytes and id(record) not in self._places:
                self._places[id(record)] = place(self._outer)
        if name == "aten::_to_copy" and args[0].dtype in _LOW and out.dtype == torch.float32:
            for record in self._records(out):
                self._upcasts[id(record)] = (record, record.size_bytes)
        elif self._upcasts and name in _HANDS_ON:
            cast = self._upcast_in(args)
            if cast:
                for record in self._records(out):
                    self._upcasts.setdefault(id(record), (record, cast + record.size_bytes))
        elif name in _NORMALIZERS:
            cast = self._upcast_in(args)
            if cast:
                made = sum(record.size_bytes for record in self._records(out))
                self._logits.append((cast + made, place(self._outer), args[0].shape[-1]))
        if name.startswith("aten::_scaled_dot_product") and "backward" not in name:
            lengths = (args[0].shape[-2], args[1].shape[-2])
            for mask in tensors_in([*args[3:], *kwargs.values()]):
                if mask.dim() >= 2 and tuple(mask.shape[-2:]) == lengths:
                    self._note_mask(mask)
        elif name in _MASK_TAKERS:
            self._see_broadcast_mask(list(tensors_in([*args, *kwargs.values()])))

    def _see_broadcast_mask(self, operands: list[Tensor]) -> None:
        scores = [tensor for tensor in operands if tensor.dim() == 4 and tensor.shape[1] > 1]
        for mask in operands:
            over_heads = mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[-2] > 1
            if over_heads and any(mask.shape[-2:] == tensor.shape[-2:] for tensor in scores):
                self._note_mask(mask)

    def _note_mask(self, mask: Tensor) -> None:
        if 0 in mask.stride()[-2:]:  # expanded: one value for each key (as for padding) or query
            return
        for storage in storages_of(mask):
            size = storage.nbytes()
            if size >= self._least_bytes:
                record = self._record_of(storage)
                made_at = None if record is None else self._places.get(id(record))
                self._masks[storage._cdata] = (size, made_at or place(self._outer), tuple(mask.shape))

    def _see_zeroed(self, tensors: Any) -> None:
        for record in self._records(tensors):
            if record.category == "gradients":
                self._zeroed[id(record)] = record.size_bytes
                self._zeroed_at = self._zeroed_at or place(self._outer)

    def _records(self, value: Any) -> list[Allocation]:
        found = (self._record_of(storage) for tensor in tensors_in(value) for storage in storages_of(tensor))
        return [record for record in found if record is not None]

    def _record_of(self, storage: torch.UntypedStorage) -> Allocation | None:
        known = self._alive.get(storage._cdata)
        return None if known is None else known[1]

    def _upcast_in(self, args: Any) -> int:
        return max(
            (self._upcasts[id(r)][1] for r in self._records(list(args)) if id(r) in self._upcasts), default=0
        )

    def _of_logits(self) -> Iterator[Finding]:
        if self._logits:
            size, where, width = max(self._logits, key=lambda entry: entry[0])
            yield Finding(
                kind="logits_upcast",
                what=f"Logits over {width:,} classes in float32 for the loss",
                size_bytes=size,
                where=describe(where, "the forward"),
                remedy="linear_cross_entropy takes hidden states and weight, and never makes the logits whole",
            )

    def _of_foreach(self) -> Iterator[Finding]:
        size = _most_alive(self._foreach)
        if size:
            yield Finding(
                kind="foreach_copies",
                what="Copies that the optimizer makes of all parameters at once (foreach)",
                size_bytes=size,
                where="the optimizer's step",
                remedy="give the optimizer fused=True, or foreach=False where it has none",
            )

    def _of_masks(self) -> Iterator[Finding]:
        by_place: dict[Place | None, tuple[int, tuple[int, ...]]] = {}
        for size, where, shape in self._masks.values():
            by_place[where] = max(by_place.get(where, (0, ())), (size, shape))
        for where, (size, shape) in by_place.items():
            yield Finding(
                kind="dense_mask",
                what=f"A dense attention mask of shape {list(shape)}",
                size_bytes=size,
                where=describe(where, "the forward"),
                remedy="is_causal=True needs none, nor does packed_attention for several documents in a row",
            )

    def _of_zeroed(self) -> Iterator[Finding]:
        if self._zeroed:
            yield Finding(
                kind="zeroed_gradients",
                what="Gradients that are zeroed rather than freed, and alive throughout the next forward",
                size_bytes=sum(self._zeroed.values()),
                where=describe(self._zeroed_at, "zero_grad"),
                remedy="call zero_grad() without set_to_none=False",
            )


def _most_alive(records: Iterable[Allocation]) -> int:
    """The most bytes of these allocations that were alive at once."""
    changes: list[tuple[int, int]] = []
    for record in {id(record): record for record in records}.values():
        changes.append((record.born, record.size_bytes))
        if record.died is not None:
            changes.append((record.died, -record.size_bytes))
    live = most = 0
    for _, change in sorted(changes):
        live += change
        most = max(most, live)
    return most
