"""What a step returns for the parts of a batch, joined to what it would have returned for the whole."""

from typing import Any

import pytest
import torch

from lightning_memkit.micro_batching import joined

SIZES = [3, 3, 2]
X = torch.arange(8.0)


def parts_of(step: Any, x: torch.Tensor = X) -> list[Any]:
    return [step(part) for part in x.split(SIZES)]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: {"names": [f"row {int(v)}" for v in x]},
        lambda x: {"names": tuple(int(v) for v in x)},
        lambda x: {"deep": {"pairs": [(int(v), "a") for v in x]}},
        lambda x: {"kind": "train", "version": 3, "none": None, "shape": (1, 2)},
        lambda x: {"classes": torch.tensor([1, 2, 3, 4])},
        lambda x: {"preds": x.view(-1, 1).expand(-1, 4)},
        lambda x: {"list of tensors": list(x)},
    ],
)
@pytest.mark.parametrize("shuffled", [False, True])
def test_what_has_one_entry_a_row_or_is_alike_comes_out_as_the_whole_gives_it(
    step: Any, shuffled: bool
) -> None:
    rows = [5, 0, 7, 2, 1, 6, 3, 4] if shuffled else None
    x = X if rows is None else X[rows]
    doubtful: list[str] = []
    whole = joined(parts_of(step, x), [3 / 8, 3 / 8, 2 / 8], SIZES, rows, doubtful=doubtful)
    assert str(whole) == str(step(X))
    assert doubtful == []


def test_what_is_not_exact_is_named() -> None:
    def step(x: torch.Tensor) -> dict[str, Any]:
        return {
            "loss": x.mean(),
            "count": len(x),
            "n": {"correct": (x > 2).sum(), "found": [v for v in x.tolist() if v > 2]},
            "seen": object(),
            **({"late": 1} if x[0] > 4 else {}),
            "kind": "train",
        }

    doubtful: list[str] = []
    outputs = parts_of(step)
    whole = joined(outputs, [3 / 8, 3 / 8, 2 / 8], SIZES, doubtful=doubtful)
    assert sorted(doubtful) == ["count", "late", "n.correct", "n.found", "seen"]
    assert whole["loss"] == X.mean()
    assert whole["count"] == 2
    assert whole["seen"] is outputs[-1]["seen"]


def test_a_list_that_may_be_one_entry_a_row_or_always_the_same_is_named() -> None:
    doubtful: list[str] = []
    whole = joined([{"shape": (1, 2)}] * 2, [0.5, 0.5], [2, 2], doubtful=doubtful)
    assert (whole, doubtful) == ({"shape": (1, 2, 1, 2)}, ["shape"])


def test_one_part_is_the_whole() -> None:
    doubtful: list[str] = []
    given = {"count": 8, "seen": object()}
    assert joined([given], [1.0], [8], doubtful=doubtful) is given
    assert doubtful == []
