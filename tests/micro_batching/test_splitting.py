from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lightning_memkit.micro_batching import (
    SplitError,
    batch_size,
    even_sizes,
    joined,
    micro_batches,
    split_batch,
    weigher,
)

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Record:
    x: Tensor
    name: str


@pytest.mark.parametrize("kind", [dict, tuple, list, Pair, UserDict, "nested"])
def test_parts_put_together_are_the_batch(kind: object) -> None:
    x, y = torch.randn(7, 3), torch.arange(7)
    batch: object
    if kind is dict:
        batch = {"x": x, "y": y, "scale": torch.tensor(2.0), "note": "all"}
    elif kind is UserDict:
        batch = UserDict(x=x, y=y)
    elif kind == "nested":
        batch = [{"x": x, "more": (y, None)}, [str(i) for i in range(7)]]
    elif kind is Pair:
        batch = Pair(x, y)
    else:
        batch = kind([x, y])  # pyright: ignore[reportCallIssue]
    parts = split_batch(batch, [3, 3, 1])
    assert all(type(part) is type(batch) for part in parts)
    assert [batch_size(part) for part in parts] == [3, 3, 1]

    def leaves(item: object) -> tuple[Tensor, Tensor]:
        if kind == "nested":
            return item[0]["x"], item[0]["more"][0]  # pyright: ignore[reportIndexIssue]
        return (item["x"], item["y"]) if kind in (dict, UserDict) else (item[0], item[1])  # pyright: ignore

    assert torch.equal(torch.cat([leaves(part)[0] for part in parts]), x)
    assert torch.equal(torch.cat([leaves(part)[1] for part in parts]), y)
    assert leaves(parts[0])[0].data_ptr() == x.data_ptr()  # views, no copies
    if kind is dict:
        assert parts[1]["note"] == "all"
        assert parts[1]["scale"] == 2
    if kind == "nested":
        assert [text for part in parts for text in part[1]] == [str(i) for i in range(7)]


def test_frozen_dataclasses_are_split_too() -> None:
    record = Record(torch.arange(4), "kept")
    parts = split_batch(record, [2, 2])
    assert [part.x.tolist() for part in parts] == [[0, 1], [2, 3]]
    assert record.x.shape == (4,)
    assert parts[1].name == "kept"


@given(st.integers(1, 500), st.integers(1, 600))
def test_even_sizes_are_few_and_even(total: int, largest: int) -> None:
    sizes = even_sizes(total, largest)
    assert sum(sizes) == total
    assert max(sizes) <= largest
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-total // largest)


@pytest.mark.parametrize(
    "batch", [{"x": torch.zeros(4, 2), "y": torch.zeros(5)}, "text", {"n": torch.tensor(1)}]
)
def test_ambiguous_or_missing_sizes_are_refused_with_the_remedy(batch: object) -> None:
    with pytest.raises(SplitError, match="one row a sample"):
        batch_size(batch)


@pytest.mark.parametrize("weigh_by", ["auto", "labels"])
def test_weighted_parts_have_the_full_batch_s_gradient(weigh_by: str) -> None:
    """The oracle is the unsplit batch in float64."""
    weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    batch = {"x": torch.randn(10, 4, 6, dtype=torch.float64), "labels": torch.randint(0, 5, (10, 4))}
    batch["labels"][0] = -100
    batch["labels"][3:5, 1:] = -100

    def loss_of(part: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy((part["x"] @ weight).flatten(0, 1), part["labels"].flatten())

    (whole,) = torch.autograd.grad(loss_of(batch), weight)
    for size in (1, 3, 10):
        total = torch.zeros_like(weight)
        for part, share in micro_batches(batch, size, weigh_by=weigh_by):  # pyright: ignore[reportArgumentType]
            total += torch.autograd.grad(share * loss_of(part), weight)[0]
        assert (total - whole).abs().max() < 1e-15


def test_causal_labels_leave_each_row_s_first_out() -> None:
    labels = torch.full((2, 4), -100)
    labels[0, 0] = labels[1, 2] = 1
    assert weigher("causal_labels", {"labels": labels})({"labels": labels}) == 1
    assert weigher("labels", {"labels": labels})({"labels": labels}) == 2


def test_bad_arguments_name_the_remedy() -> None:
    batch = {"x": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match="below 1"):
        next(micro_batches(batch, 0))
    with pytest.raises(ValueError, match='write "auto"'):
        next(micro_batches(batch, 1, weigh_by="tokens"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no integer tensor"):
        next(micro_batches(batch, 1, weigh_by="labels"))
    with pytest.raises(SplitError, match="one for each"):
        next(micro_batches(batch, 1, split=lambda batch, sizes: [batch]))


def test_outputs_are_joined_by_what_they_are() -> None:
    outputs = [{"loss": torch.tensor(1.0), "logits": torch.ones(2, 3), "tag": "a"},
               {"loss": torch.tensor(4.0), "logits": torch.zeros(1, 3), "tag": "b"}]  # fmt: skip
    result = joined(outputs, [0.75, 0.25], [2, 1])
    assert result["loss"] == 1.75
    assert result["logits"].shape == (3, 3)
    assert result["tag"] == "b"
