"""The truths of the sweep of exactness, by numbers: what weighs micro-batches, for two models at once."""

import copy
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks._exactness_generator import drawn_cases
from benchmarks._exactness_later import CASES
from benchmarks._exactness_models import (
    COLUMNS,
    LATE,
    LATE_COLUMNS,
    PARTS,
    ROWS,
    ROWS_ACT,
    STATE,
    TERMS,
    Case,
)
from benchmarks._exactness_runs import flattened, state_of

DRAWN = drawn_cases(7, 60)
SPLITS = ((4, 4), (3, 3, 2), (1, 7), (2, 5, 1))


def batch_of(case: Case, seed: int) -> dict[str, Any]:
    batch = {}
    for name, column in case.columns.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {column}".encode()))
        _, late = LATE_COLUMNS.get(column, (column, column))
        value = COLUMNS[late](ROWS, generator)
        batch[name] = value.double() if value.is_floating_point() else value
    return batch


def parts_of(case: Case, batch: dict[str, Any], sizes: Sequence[int]) -> list[Any]:
    pieces = {name: value.clone().split(list(sizes)) for name, value in batch.items()}
    return [case.container({name: pieces[name][i] for name in pieces}) for i in range(len(sizes))]


def gradient(module: Any, batch: Any) -> Tensor | None:
    """The step's gradient in train mode; None where it returns nothing, or NaN (a mean over nothing)."""
    module.zero_grad()
    returned = module.step(batch, 0)
    if returned is None:
        return None
    (returned["loss"] if isinstance(returned, dict) else returned).backward()
    flat = torch.cat(
        [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in module.parameters()]
    )
    return None if flat.isnan().any() else flat


def modules_of(case: Case, seed: int) -> list[Any]:
    """Two models of other weights: what weighs micro-batches must not depend on them."""
    found = []
    for own in (seed, seed + 1000):
        torch.manual_seed(own)
        module: Any = case.module()
        kind = type(module)
        module.__class__ = type(kind.__name__, (kind,), {"global_step": LATE})
        module.log = module.log_dict = lambda *a, **k: None
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
            module.step(case.container(batch_of(case, seed) | {"x": batch_of(case, seed)["x"].float()}), 0)
        found.append(module.double().train())
    return found


def residual(case: Case, seed: int, sizes: Sequence[int]) -> float:
    """How much of the whole gradient no combination of the micro-batches' gives, for both models at once."""
    batch, wholes, columns = batch_of(case, seed), [], []
    for module in modules_of(case, seed):
        whole = gradient(copy.deepcopy(module), parts_of(case, batch, [ROWS])[0])
        if whole is None:
            return 0.0
        wholes.append(whole)
        columns.append([gradient(copy.deepcopy(module), part) for part in parts_of(case, batch, sizes)])
    kept = [i for i in range(len(sizes)) if all(own[i] is not None for own in columns)]
    if not kept:
        return 1.0  # each micro-batch has a term over nothing
    matrix = torch.cat([torch.stack([own[i] for i in kept], 1) for own in columns])
    wanted = torch.cat(wholes).unsqueeze(1)
    weights = torch.linalg.lstsq(matrix, wanted, driver="gelsd").solution
    missed, norm = (matrix @ weights - wanted).norm(), wanted.norm()
    return float(missed / norm if norm > 0 else missed)  # a whole batch without a kept row has no gradient


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# The truths


def assert_truth(case: Case) -> None:
    seeds = (1, 2, 3, 4)
    # Batch statistics of one row are refused by torch.
    splits = SPLITS[:2] if "norm" in case.name else SPLITS
    found = [residual(case, seed, splits[(seed + place) % len(splits)]) for place, seed in enumerate(seeds)]
    if case.truth == PARTS:
        assert max(found) < (1e-6 if case.float32_loss else 1e-9), found
    elif case.truth in (ROWS_ACT, TERMS):
        assert max(found) > 1e-8, found


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_truth_of_a_step_is_what_gradients_of_random_splits_say(case: Case) -> None:
    assert_truth(case)


@pytest.mark.parametrize("case", DRAWN[::5], ids=lambda case: case.name)
def test_truth_of_a_drawn_step_follows_from_its_choices(case: Case) -> None:
    assert_truth(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *drawn_cases(8, 200)], ids=lambda case: case.name)
def test_truth_of_every_step(case: Case) -> None:
    assert_truth(case)


@pytest.mark.parametrize(
    "case",
    [case for case in [*CASES, *DRAWN] if case.truth == STATE and case.named],
    ids=lambda case: case.name,
)
def test_steps_with_state_leave_another_one_in_micro_batches(case: Case) -> None:
    batch, module = batch_of(case, 1), modules_of(case, 1)[0]
    with torch.no_grad():  # a teacher starts as its student, and would not move
        for parameter in module.trainable():
            parameter.add_(0.1)
    states = []
    for sizes in ([ROWS], [4, 4]):
        own = copy.deepcopy(module)
        for part in parts_of(case, batch, sizes):
            own.step(part, 0)
        states.append({**state_of(own), **flattened(dict(own.named_parameters()))})
    assert any(
        name not in states[1] or not torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][name]))
        for name, value in states[0].items()
        if isinstance(value, (int, float, Tensor))
    )


def test_a_third_of_the_hand_written_steps_does_not_decompose() -> None:
    assert len(CASES) >= 30
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(case.truth == ROWS_ACT for case in CASES) >= 8
    assert sum(case.truth == STATE for case in CASES) >= 8


def test_a_seed_draws_the_same_steps_again_and_another_one_others() -> None:
    first, again, other = ([case.module.args[0] for case in drawn_cases(seed, 40)] for seed in (5, 5, 6))  # pyright: ignore[reportFunctionMemberAccess]
    assert first == again
    assert first != other
    for choice in ("base", "reduction", "divisor", "truth", "optimizer", "state", "names"):
        assert len({getattr(drawn, choice) for drawn in first}) > 2, choice
