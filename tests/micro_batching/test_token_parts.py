"""Parts of padded batches by tokens."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_memkit.micro_batching.parts.token_parts import (
    Extent,
    cuts_padding_alone,
    extent_of,
    parts_by_tokens,
    take_part,
    wide_tensors,
    widened,
)


def padded(lengths: list[int], columns: int, left: bool = False) -> dict[str, Tensor]:
    mask = torch.zeros(len(lengths), columns, dtype=torch.int64)
    for row, length in enumerate(lengths):
        if length:
            mask[row, -length if left else 0 : None if left else length] = 1
    return {"input_ids": torch.arange(mask.numel()).view_as(mask), "attention_mask": mask}


def extent(lengths: list[int], columns: int, left: bool = False) -> Extent:
    found = extent_of(padded(lengths, columns, left))
    assert found is not None
    return found


@pytest.mark.parametrize("left", [False, True])
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=24), most=st.integers(1, 400))
def test_every_row_is_in_one_part_and_keeps_all_of_its_tokens(
    left: bool, lengths: list[int], most: int
) -> None:
    where = extent(lengths, 40, left)
    parts = parts_by_tokens(where, most)
    assert sorted(row for part in parts for row in part.rows) == list(range(len(lengths)))
    for part in parts:
        assert len(part.rows) == 1 or part.tokens <= most
        for row in part.rows:
            assert part.start <= where.first[row] < where.stop[row] <= part.stop <= 40


def test_short_rows_share_a_part_that_is_as_wide_as_they_are() -> None:
    parts = parts_by_tokens(extent([8, 40, 8, 33, 8, 16], 40), 80)
    assert [(part.rows, part.stop - part.start) for part in parts] == [((1, 3), 40), ((5, 0, 2, 4), 16)]
    parts = parts_by_tokens(extent([8, 40, 8], 40, left=True), 40)
    assert [(part.rows, part.start, part.stop) for part in parts] == [((1,), 0, 40), ((0, 2), 32, 40)]


@dataclass
class Batch:
    input_ids: Tensor
    attention_mask: Tensor
    names: list[str]
    weight: Tensor


def test_a_part_takes_its_rows_and_columns_of_everything() -> None:
    batch = padded([3, 16, 10], 16)
    whole = Batch(batch["input_ids"], batch["attention_mask"], ["a", "b", "c"], torch.tensor(2.0))
    (first, second) = parts_by_tokens(extent([3, 16, 10], 16), 32)[:2]
    assert first.rows == (1, 2)
    taken = take_part(whole, second, wide_tensors(whole))
    assert torch.equal(taken.input_ids, batch["input_ids"][:1, :8])
    assert taken.names == ["a"]
    assert taken.weight == 2
    nested: Any = {"pair": (batch["input_ids"], torch.arange(3)), "attention_mask": batch["attention_mask"]}
    assert torch.equal(take_part(nested, first, wide_tensors(nested))["pair"][1], torch.tensor([1, 2]))


def test_outputs_are_as_wide_as_the_batch() -> None:
    part = parts_by_tokens(extent([40, 8, 8], 40, left=True), 40)[1]
    logits = torch.ones(2, 8, 5)
    wide = widened({"logits": logits, "scores": torch.ones(2), "loss": torch.tensor(1.0)}, part, 40)
    assert wide["logits"].shape == (2, 40, 5)
    assert torch.equal(wide["logits"][:, 32:], logits)
    assert wide["logits"][:, :32].abs().sum() == 0
    assert wide["scores"].shape == (2,)


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.ones(2, 3)},
        {"attention_mask": torch.ones(2, 3, 3, dtype=torch.bool)},
        {"attention_mask": torch.ones(2, 3)},
        (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64)),
    ],
)
def test_without_a_mask_of_two_dimensions_nothing_is_known(batch: Any) -> None:
    assert extent_of(batch) is None


def test_only_constants_and_positions_count_as_padding() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    extent = extent_of({"attention_mask": mask})
    assert extent is not None
    places = parts_by_tokens(extent, 6)
    places = [replace(place, stop=2) if place.rows == (1,) else place for place in places]
    ids = torch.arange(1, 13).view(2, 6)
    wide = frozenset({"['ids']"})
    for columns, is_padding in (
        (torch.full((4,), 7), True),
        (torch.arange(2, 6), True),
        (torch.tensor([7, 7, 7, 8]), False),
        (torch.tensor([2, 3, 4, 6]), False),
    ):
        ids[1, 2:] = columns
        for made in (ids, ids.int()):
            assert cuts_padding_alone({"attention_mask": mask, "ids": made}, places, wide) is is_padding
    features = torch.randn(2, 6, 3)
    features[1, 2:] = 0
    assert cuts_padding_alone({"attention_mask": mask, "ids": features}, places, wide)
    features[1, 5, 2] = 1
    assert not cuts_padding_alone({"attention_mask": mask, "ids": features}, places, wide)
