"""Which lookups are refused: those of ids as they are; what can't be read is left alone."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_memkit.data.sources.lookups import KnownIds, Lookups
from lightning_memkit.data.sources.store import TokenStore, offsets_of

IDS = torch.tensor([[5, 1, 2, 3], [4, 6, 7, 5]])
LABELS = torch.tensor([[-100, 1, 2, 3], [-100, 6, 7, 5]])


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 2))


def looked_up(index: Any, *, bound: int = 20, labels: int = 20, given: Any = None) -> Any:
    """What a table of 8 rows gives for an index that is made of ids."""
    module = Table()
    lookups = Lookups(module, KnownIds(ids=bound, labels=lambda: labels, tokenizer="own"))
    batch = {"input_ids": IDS, "labels": LABELS} if given is None else given
    with lookups.within((batch, 0)):
        return F.embedding(index(batch["input_ids"]), module.w)


@pytest.mark.parametrize(
    "index",
    [
        lambda ids: ids,
        lambda ids: ids[:, :-1],
        lambda ids: ids[..., 1:].contiguous().view(-1),
        lambda ids: ids.T.reshape(-1),
        lambda ids: torch.flatten(ids.to(torch.int32).clone()),
        lambda ids: F.pad(ids, (0, 1), value=0)[:, 1:],
        lambda ids: ids.clamp(min=0),
    ],
)  # fmt: skip
def test_ids_are_followed_through_views_copies_and_shifts(index: Any) -> None:
    with pytest.raises(ValueError, match=r"ids up to 19 \(tokenizer='own'\), and the table w has 8 rows"):
        looked_up(index)
    assert looked_up(index, bound=8) is not None


@pytest.mark.parametrize(
    "index",
    [
        lambda ids: ids.clamp(max=7),
        lambda ids: ids.clamp(0, 7),
        lambda ids: ids[ids < 8],
        lambda ids: ids.masked_fill(ids > 7, 0),
        lambda ids: ids[:, 0],
        lambda ids: ids[:, :1],
        lambda ids: ids.view(-1).remainder_(8),
        lambda ids: torch.clamp(ids, max=7, out=torch.empty_like(ids)),
        lambda ids: ids.to(torch.int16).long(),
    ],
)  # fmt: skip
def test_and_no_further_than_a_change_may_be(index: Any) -> None:
    assert looked_up(index, given={"input_ids": IDS.clone()}) is not None


def test_ids_after_a_change_in_place_are_unknown() -> None:
    def hashed(ids: Tensor) -> Tensor:
        same = ids.view(-1)
        same[0].fill_(0)
        return ids

    assert looked_up(hashed, given={"input_ids": IDS.clone()}) is not None


def test_changed_ids_beyond_the_table_are_named_if_the_batch_holds_them() -> None:
    big = {"input_ids": IDS + 5}
    with pytest.raises(ValueError, match="ids up to 29 .*the table w has 8 rows"):
        looked_up(lambda ids: ids[ids > 0], bound=30, given=big)
    with pytest.raises(IndexError):  # 15 is no id of the batch: torch's own error
        looked_up(lambda ids: ids + 3, given=big)


def test_what_has_no_values_is_left_alone() -> None:
    assert looked_up(lambda ids: ids % 8) is not None
    module = Table()
    lookups = Lookups(module, KnownIds(ids=20, labels=lambda: 20, tokenizer="own"))
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        lookups.within(({"input_ids": mode.from_tensor(IDS)},)),
    ):
        assert F.embedding(mode.from_tensor(IDS), module.w).shape == (2, 4, 2)
    with lookups.within(({"input_ids": IDS},)):
        rows: Any = torch.vmap(lambda index: module.w[index % 8])(IDS)
        assert torch.equal(rows, module.w[IDS % 8])


def test_labels_have_a_bound_of_their_own() -> None:
    head, losses = torch.randn(8, 8), []
    for labels in (8, 9):
        lookups = Lookups(Table(), KnownIds(ids=20, labels=lambda bound=labels: bound, tokenizer="own"))
        with lookups.within(({"input_ids": IDS, "labels": LABELS},)):
            if labels > 8:
                with pytest.raises(ValueError, match="the head before cross_entropy has 8 classes"):
                    F.cross_entropy(head, LABELS.flatten())
            else:
                losses.append(F.cross_entropy(head, LABELS.flatten()))
    assert torch.equal(losses[0], F.cross_entropy(head, LABELS.flatten()))


@pytest.mark.parametrize("at_once", [2, 5, 100])
@pytest.mark.parametrize("learned", [None, [1, 1, 1, 1, 0, 1, 1]])
def test_the_largest_label_is_of_tokens_that_are_predicted(
    at_once: int, learned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_memkit.data.sources.store._AT_ONCE", at_once)
    store = TokenStore(
        tokens=np.array([90, 1, 2, 80, 7, 3, 5], np.uint16),
        offsets=offsets_of(np.array([3, 4, 0])),
        learned=None if learned is None else np.array(learned, np.bool_),
    )
    assert store.labels == (8 if learned is None else 6)
    assert TokenStore(tokens=np.zeros(0, np.uint16), offsets=np.zeros(1, np.int64)).labels == 0
