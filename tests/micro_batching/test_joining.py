from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_memkit.micro_batching.parts.joining import Joining
from lightning_memkit.micro_batching.parts.joining_rules import Counted, JoinError

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MORE = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = {5: [[4.0, 1.0, 2.0, 5.0, 3.0], "per row"], 7: [[1.0, 6.0, 2.0, 2.0, 8.0, 1.0, 3.0], "per row"]}


def counted(rows: Tensor) -> Tensor:
    """How many labels each row has."""
    return torch.tensor(LABELS[len(MORE) if len(rows) == 7 else 5][0], dtype=torch.float64)


def mean_of_labels(x: Tensor, labels: Tensor) -> Tensor:
    return (x[:, 0] * labels).sum() / labels.sum()


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Box:
    rows: Any
    name: str


class Cache:
    """An object of a library's, equal to itself alone."""

    def __init__(self, x: Tensor) -> None:
        self.layers, self.kind = [x, x + 1], torch.float64


def results(x: Tensor, labels: Tensor) -> dict[str, Any]:
    """Everything that a step may return: the oracle is the same function on the unsplit rows."""
    return {
        "rows": x * 2,
        "flat": x.repeat_interleave(2, 0),
        "time first": x.T.contiguous(),
        "mean": x.mean(),
        "mean of labels": mean_of_labels(x, labels),
        "perplexity": mean_of_labels(x, labels).exp(),
        "root mean square": x.square().mean().sqrt(),
        "sum": x.sum(),
        "largest": x.max(),
        "smallest": x.amin(0),
        "count": len(x),
        "rows above zero": (x > 0).sum(),
        "any": bool((x[:, 0] > 1.5).any()),
        "texts": [f"{value:.3f}" for value in x[:, 0]],
        "arrays": x.numpy() + 1,
        "constant": torch.tensor(7.0),
        "none": None,
        "cache": Cache(x),
        "nested": ({"again": [x[:, 0]]}, Pair(x, x.mean().item()), Box(x, "box")),
    }


def cut(x: Tensor, sizes: list[int]) -> tuple[Any, list[Any], dict[str, list[float]]]:
    labels = counted(x)
    parts = list(zip(x.split(sizes), labels.split(sizes), strict=True))
    counts = {
        "labels": [float(part.sum()) for _, part in parts],
        "samples": [float(len(part)) for part, _ in parts],
    }
    return results(x, labels), [results(*part) for part in parts], counts


def assert_alike(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_alike(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_alike(one, other)
    elif isinstance(a, Cache):
        assert_alike(a.layers, b.layers)
    elif isinstance(a, Box):
        assert_alike(vars(a), vars(b))
    elif isinstance(a, (Tensor, np.ndarray)):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-12, atol=1e-12)
    else:
        assert a == pytest.approx(b, rel=1e-12) if isinstance(a, float) else a == b


def test_what_a_few_samples_teach_gives_the_whole_of_others() -> None:
    joining = Joining(allowed=1e-9)
    joining.compare(*cut(X, [2, 3]))
    whole, parts, counts = cut(MORE, [3, 2, 2])
    assert_alike(joining.join(parts, counts), whole)
    assert joining.doubtful == []


def test_a_mean_of_samples_is_the_control_that_differs_from_one_of_labels() -> None:
    whole, parts, counts = cut(MORE, [3, 2, 2])
    naive = sum(part["mean of labels"] * n for part, n in zip(parts, counts["samples"], strict=True)) / 7
    assert abs(naive - whole["mean of labels"]) > 1e-2


def test_rules_that_agree_so_far_are_named_where_they_differ() -> None:
    joining = Joining(allowed=1e-9)
    same = torch.tensor(0.5, dtype=torch.float64)
    joining.compare({"v": same}, [{"v": same}, {"v": same}], {"labels": [3, 2], "samples": [1, 1]})
    part = [{"v": same}, {"v": 2 * same}]
    joining.join(part, {"labels": [3, 1], "samples": [1, 1]})
    assert joining.doubtful == ["v"]
    joining.compare({"v": 1.5 * same}, part, {"labels": [3, 1], "samples": [1, 1]})
    assert joining.join(part, {"labels": [3, 1], "samples": [1, 1]})["v"] == 0.75
    assert joining.doubtful == []


def test_a_mean_of_perplexities_is_not_the_batch_s_even_where_it_is_near() -> None:
    loss = torch.tensor([6.20, 6.21, 6.23, 6.24], dtype=torch.float64)
    joining, ways = Joining(allowed=2e-5), {"samples": [1, 2, 1]}
    parts = [loss[:1].mean().exp(), loss[1:3].mean().exp(), loss[3:].mean().exp()]
    joining.compare(loss.mean().exp(), parts, ways)
    far = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert joining.join(list(far.exp()), ways) == pytest.approx(
        float(torch.tensor(2.0).double().exp()), rel=1e-12
    )


def test_a_part_that_counts_nothing_does_not_count_its_nan() -> None:
    joining = Joining(allowed=1e-9)
    value, nan = torch.tensor(2.0), torch.tensor(float("nan"))
    ways = {"labels": [4, 0], "samples": [2, 3]}
    joining.compare(value, [value, nan], ways)
    assert joining.join([value, nan], ways) == 2.0


def test_a_user_s_own_count_weighs_its_value() -> None:
    joining, samples = Joining(allowed=1e-9), {"samples": [2, 3]}
    joining.compare(
        Counted(value=2.5, count=4), [Counted(value=1.0, count=1), Counted(value=3.0, count=3)], samples
    )
    again = joining.join([Counted(value=1.0, count=3), Counted(value=2.0, count=1)], samples)
    assert (again.value, again.count) == (1.25, 4)


@pytest.mark.parametrize(
    ("whole", "parts", "words"),
    [
        ({"loss": 1.0}, [{"loss": 3.0}, {"loss": 4.0}], r"^loss is 1 for a few samples at once, and 3, 4"),
        ({"a": 1.0}, [{"a": 1.0}, {"b": 1.0}], "^a is missing in some micro-batches"),
        (
            torch.zeros(5, 4),
            [torch.zeros(2, 3), torch.zeros(3, 4)],
            r"shape \(5, 4\) does not come .* \(2, 3\)",
        ),
        ("a", ["b", "b"], r"\(str\) is not the same in all micro-batches"),
    ],
)
def test_what_no_rule_gives_is_named(whole: Any, parts: list[Any], words: str) -> None:
    with pytest.raises(JoinError, match=words):
        Joining(allowed=1e-6).compare(whole, parts, {"samples": [2.0, 3.0]})


def test_parts_that_are_padded_to_unequal_lengths_are_refused() -> None:
    joining = Joining(allowed=1e-6)
    joining.compare(torch.ones(5, 4), [torch.ones(2, 4), torch.ones(3, 4)], {"samples": [2, 3]})
    with pytest.raises(JoinError, match=r"shapes \(2, 4\), \(3, 6\)"):
        joining.join([torch.ones(2, 4), torch.ones(3, 6)], {"samples": [2, 3]})


def test_numbers_that_follow_from_rounding_are_equal_and_others_are_not() -> None:
    whole, ways = torch.tensor(1.0), {"samples": [2, 3]}
    joining = Joining(allowed=1e-12)  # a float32 value rounds, whatever the module's dtype
    joining.compare(whole, [whole * (1 + 1e-6), whole * (1 - 1e-6)], ways)
    with pytest.raises(JoinError):
        Joining(allowed=1e-12).compare(whole, [whole * 1.01, whole * 1.02], ways)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_way_of_weighing_is_not_given_up_for_a_rounding(dtype: torch.dtype) -> None:
    """Parts that hardly differ fit either way; which of them fits better is a matter of the last bit."""
    generator, eps = torch.Generator().manual_seed(0), torch.finfo(dtype).eps
    for _ in range(200):
        values = 0.5 + torch.rand((), generator=generator).double()
        parts = values * (1 + eps * torch.rand(2, generator=generator).double())
        whole = (parts * torch.tensor([0.75, 0.25])).sum()
        ways = {"labels": [3.0, 1.0], "samples": [1.0, 1.0]}
        joining = Joining(allowed=1e-9)
        joining.compare(whole.to(dtype), list(parts.to(dtype)), ways)
        joined = joining.join([torch.tensor(0.5, dtype=dtype), torch.tensor(1.0, dtype=dtype)], ways)
        assert joined == 0.625


def test_a_batch_without_what_a_mean_is_over_is_refused() -> None:
    joining, parts = Joining(allowed=1e-9), [torch.tensor(1.0), torch.tensor(3.0)]
    joining.compare(torch.tensor(2.5), parts, {"labels": [1, 3], "samples": [1, 1]})
    with pytest.raises(JoinError, match="mean over labels"):
        joining.join(parts, {"samples": [1, 1]})


def test_what_was_in_no_comparison_is_joined_as_is_likeliest_and_named() -> None:
    joining, samples = Joining(allowed=1e-9), {"samples": [2, 1]}
    joining.compare({}, [{}, {}], samples)
    late = [{"rows": torch.ones(2, 3), "same": 1}, {"rows": torch.zeros(1, 3), "same": 1}]
    joined = joining.join(late, samples)
    assert joined["rows"].shape == (3, 3)
    assert joined["same"] == 1
    assert joining.doubtful == ["rows"]


@pytest.mark.parametrize(("rule", "joined"), [("sum", 5.0), ("max", 3.0), ("", 2.5)])
def test_what_the_user_asks_for_is_taken_where_nothing_told_rules_apart(rule: str, joined: float) -> None:
    joining, ways = Joining(allowed=1e-9), {"samples": [2, 2]}

    def logged(value: float) -> Counted:
        return Counted(value=torch.tensor(value), count=None, rule=rule)

    joining.compare(logged(0.0), [logged(0.0), logged(0.0)], ways)
    assert float(joining.join([logged(2.0), logged(3.0)], ways).value) == joined


def test_what_the_user_asks_for_is_not_taken_where_it_does_not_hold() -> None:
    joining, ways = Joining(allowed=1e-9), {"samples": [2, 2]}
    values = [Counted(value=torch.tensor(value), count=None, rule="sum") for value in (2.5, 2.0, 3.0)]
    joining.compare(values[0], values[1:], ways)
    assert float(joining.join(values[1:], ways).value) == 2.5


def test_means_over_nothing_and_over_samples_are_not_taken_for_one() -> None:
    """Where the loss counts nothing in any part, its mean is no mean over samples."""
    joining = Joining(allowed=1e-5)
    parts = [torch.tensor(0.0), torch.tensor(1.0)]
    joining.compare(torch.tensor(0.5), parts, {"loss": [1.0, 1.0], "samples": [1.0, 1.0]})
    nothing = {"loss": [0.0, 0.0], "samples": [1.0, 1.0]}
    joining.join(parts, nothing)
    assert joining.excess > 1
    assert joining.telling_pair(parts, nothing) == (0, 1)
    joining.compare(torch.tensor(0.5), parts, nothing)
    assert joining.join(parts, nothing) == 0.5
    assert joining.excess == 0
