"""A batch of packed rows: a dictionary of tensors that knows where its documents end."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

IGNORED_LABEL = -100


class PackedBatch(dict[str, Any]):
    """Rows of packed documents, as the mapping that a model's ``forward(**batch)`` takes.

    Keys:
        input_ids: int64 [rows, length].
        labels: int64 [rows, length], at the position of ``input_ids`` (the model shifts them); -100 at the
            first token of every document, which nothing in the row may predict, and on padding.
        position_ids: int64 [rows, length], from 0 in every document, from 1 in the padding of a row: a
            segment is a document if and only if it begins at position 0.
        cu_seqlens: int32 [segments + 1], where the segments of the flattened rows * length tokens begin, and
            the total. A segment is a document or the padding at the end of a row, so each row's end is a
            bound.
        max_seqlen: int, the length of the longest segment.

    ``input_ids`` comes first, because Lightning reads the number of rows from the first tensor.
    """

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self["input_ids"].size(0)

    @property
    def length(self) -> int:
        """Tokens in a row, padding included."""
        return self["input_ids"].size(1)

    @property
    def documents(self) -> int:
        """Number of documents, or chunks of one; padding does not count."""
        return int(self.are_documents().sum())

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self["cu_seqlens"].diff()[self.are_documents()].sum())

    def are_documents(self) -> Tensor:
        """Which segments are documents and no padding, bool [segments]."""
        return self["position_ids"].flatten()[self["cu_seqlens"][:-1].long()] == 0

    @property
    def efficiency(self) -> float:
        """Fraction of the batch that is not padding, 0 to 1."""
        return self.real_tokens / self["input_ids"].numel()

    def weight(self) -> int:
        """Number of labels that count, over which the loss is averaged."""
        return int((self["labels"] != IGNORED_LABEL).sum())

    def split(self, sizes: Sequence[int]) -> list["PackedBatch"]:
        """Split the batch into micro-batches with these numbers of rows; tensors of rows are views, not copies.

        Raises:
            ValueError: the sizes are not positive or don't add up to the number of rows.
        """
        if any(size < 1 for size in sizes) or sum(sizes) != self.rows:
            raise ValueError(
                f"sizes={list(sizes)} don't divide {self.rows} rows; give positive numbers that add up to it."
            )
        starts = [0, *accumulate(sizes)]
        row_ends = torch.tensor(starts) * self.length
        cuts = torch.searchsorted(self["cu_seqlens"].cpu().long(), row_ends).tolist()
        rows = {
            key: value.split(list(sizes))
            for key, value in self.items()
            if isinstance(value, Tensor) and key != "cu_seqlens"
        }
        parts = []
        for part, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False)):
            cu_seqlens = self["cu_seqlens"][first : last + 1] - starts[part] * self.length
            values = {key: rows[key][part] if key in rows else value for key, value in self.items()}
            values["cu_seqlens"] = cu_seqlens
            values["max_seqlen"] = int(cu_seqlens.diff().max())
            parts.append(PackedBatch(values))
        return parts

    @staticmethod
    def joined(parts: Iterable["PackedBatch"], rows: int, *, pin_memory: bool = False) -> "PackedBatch":
        """Join the parts of a batch, which all have the same length; each part is freed once it is copied.

        Args:
            parts: What ``split`` would return.
            rows: The number of rows in all parts.
            pin_memory: Puts the batch into page-locked host memory; needs an accelerator.
        """
        whole: dict[str, Any] = {}
        ends, longest, begin = [torch.zeros(1, dtype=torch.int32)], 0, 0
        for part in parts:
            for key, value in part.items():
                if not isinstance(value, Tensor) or key == "cu_seqlens":
                    continue
                if key not in whole:
                    shape = (rows, *value.shape[1:])
                    whole[key] = torch.empty(shape, dtype=value.dtype, pin_memory=pin_memory)
                whole[key][begin : begin + part.rows] = value
            ends.append(part["cu_seqlens"][1:] + begin * part.length)
            longest = max(longest, part["max_seqlen"])
            begin += part.rows
        batch = PackedBatch({**whole, "cu_seqlens": torch.cat(ends), "max_seqlen": longest})
        if pin_memory:
            batch["cu_seqlens"] = batch["cu_seqlens"].pin_memory()
        return batch

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "PackedBatch":
        """The batch with its tensors on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedBatch":
        """The batch with its tensors in page-locked host memory; needs an accelerator."""
        return self._map(lambda tensor: tensor.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        # Every tensor that leaves a worker costs a millisecond on arrival: rows are sent as one tensor, the
        # rest by value.
        rows = {key: value for key, value in self.items() if isinstance(value, Tensor) and value.dim() > 1}
        stacked = _stacked(list(rows.values()))
        if stacked is None:
            return PackedBatch, (dict(self),)
        rest = {key: value for key, value in self.items() if key not in rows}
        small = {key: value.numpy() for key, value in rest.items() if isinstance(value, Tensor)}
        return _rebuilt, (tuple(self), tuple(rows), stacked, {**rest, **small})

    def _map(self, function: Any) -> "PackedBatch":
        return PackedBatch(
            {key: function(value) if isinstance(value, Tensor) else value for key, value in self.items()}
        )


def unstacked(whole: Tensor) -> list[Tensor]:
    """The entries of a tensor, in its memory; `.data`, so that a write to one does not bump the others' versions."""
    return [entry.data for entry in whole]


def _stacked(tensors: list[Tensor]) -> Tensor | None:
    """The tensor whose entries these tensors are, all of them and in this order; None if there is none."""
    if not tensors or tensors[0].device.type != "cpu":
        return None
    first, storage = tensors[0], tensors[0].untyped_storage()
    alike = all(
        tensor.untyped_storage()._cdata == storage._cdata
        and (tensor.shape, tensor.dtype, tensor.storage_offset())
        == (first.shape, first.dtype, place * first.numel())
        and tensor.is_contiguous()
        for place, tensor in enumerate(tensors)
    )
    if not alike or storage.nbytes() != len(tensors) * first.nbytes:
        return None
    whole: Any = torch.empty(0, dtype=first.dtype)
    return whole.set_(storage, 0, (len(tensors), *first.shape))


def _rebuilt(
    order: tuple[str, ...], names: tuple[str, ...], stacked: Tensor, rest: dict[str, Any]
) -> PackedBatch:
    values = {**rest, **dict(zip(names, unstacked(stacked), strict=True))}
    return PackedBatch(
        {
            key: torch.from_numpy(values[key]) if isinstance(values[key], np.ndarray) else values[key]
            for key in order
        }
    )
