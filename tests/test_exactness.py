"""The sweep of exactness: its judge where it has to fail, and a sample of its cells."""

import copy
import json
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from benchmarks import __main__ as command
from benchmarks import exactness
from benchmarks._exactness_by_hand import train_by_hand
from benchmarks._exactness_classes import class_weight_runs
from benchmarks._exactness_generator import SUM, Drawn, cases_of, drawn_cases
from benchmarks._exactness_judge import (
    CHUNKED,
    DIFFERENT,
    EQUAL,
    REFUSED,
    WARNED,
    WHOLE,
    Noise,
    Verdict,
    judge,
)
from benchmarks._exactness_later import CASES
from benchmarks._exactness_models import DTYPES, Case
from benchmarks._exactness_runs import jittered, train, unsplit
from benchmarks.exactness import cells_of
from lightning_memkit import MemoryBudget

DRAWN = drawn_cases(7, 60)
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> Iterator[None]:
    with exactness.short_collections():
        yield


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# The judge


def verdict_of(case: Case, seed: int, dtype: str, *callbacks: Callback) -> Verdict:
    plain, others = unsplit(case, seed, dtype)
    return judge(case, dtype, train(case, seed, dtype, *callbacks), plain, others)


def true_count(drawn: Drawn) -> Any:
    """What the step's loss is divided by, as `weigh_by` takes it: with it a split is right."""
    x, y, mask = drawn.names

    def count(part: Any) -> float:
        if drawn.divisor in ("mask", "kept rows"):
            return float(part[mask].sum() if drawn.divisor == "mask" else (part[mask] > 0).sum())
        if drawn.divisor != "labels":
            return float(len(part[x]))
        labels = part[y].flatten()
        weights = torch.tensor([1.0, 7.0, 0.25, 3.0] if drawn.class_weights else [1.0] * 4)
        return float(weights[labels[labels != -100]].sum())

    return "sum" if drawn.divisor == SUM else count


def logs_a_mean_the_loss_does_not_tell(drawn: Drawn) -> bool:
    """Whether the step logs a mean over labels, some of which are ignored, beside a loss that divides by others."""
    return drawn.metric == "labels" and drawn.has_ignored and drawn.divisor != "labels"


def drawn_of(case: Case) -> Drawn:
    return case.module.args[0]  # pyright: ignore[reportFunctionMemberAccess]


# A mean over kept rows passes over micro-batches without one, whose predictions are then in no output.
SOUND = [
    case for case in DRAWN
    if case.decomposable and (drawn_of(case).divisor not in ("mask", "kept rows", "labels")
                              or drawn_of(case).returns in ("tensor", "dict"))
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_split_by_the_true_divisors_is_equal(dtype: str) -> None:
    place = DTYPES.index(dtype)
    for index, case in enumerate(SOUND[place::5][:4]):
        budget = MemoryBudget("1GiB", micro_batch_size=(1, 3)[index % 2], weigh_by=true_count(drawn_of(case)))
        verdict = verdict_of(case, index, dtype, budget)
        if logs_a_mean_the_loss_does_not_tell(drawn_of(case)):
            assert (verdict.outcome, verdict.where) == (WARNED, "logged sure"), case.name
        else:
            assert verdict.outcome == EQUAL, case.name


def doubled(batch: dict[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """Micro-batches of which the second is the first."""
    parts = [
        dict(zip(batch, own, strict=True))
        for own in zip(*(v.split(list(sizes)) for v in batch.values()), strict=True)
    ]
    return [parts[0], parts[0], *parts[2:]] if len(sizes) > 2 and sizes[0] == sizes[1] else parts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "wrong",
    [{"split": doubled}, {"weigh_by": lambda part: 1.0 + float(part["y"][0] == 0)}],
    ids=["rows", "weights"],
)
def test_a_wrong_split_is_different_in_every_dtype(dtype: str, wrong: dict[str, Any]) -> None:
    budget = MemoryBudget("1GiB", micro_batch_size=3, **wrong)
    verdict = verdict_of(BY_NAME["cross_entropy"], 1, dtype, budget)
    assert verdict.outcome == DIFFERENT
    assert verdict.split
    assert verdict.at_step <= 2
    assert verdict.where


def test_rounding_by_parts_is_told_from_wrong_weights() -> None:
    case, seed, dtype = BY_NAME["causal_float32"], 203, "bf16-mixed"  # a sum that cancels: .11 of the move
    plain, others = unsplit(case, seed, dtype)
    by_hand = train_by_hand(case, seed, dtype, 3)
    assert by_hand is not None
    more = [*others, *jittered(case, seed, dtype)]
    by_rows: dict[str, Any] = {"weigh_by": lambda part: float(len(part["x"]))}
    for options, expected in (({}, EQUAL), (by_rows, DIFFERENT)):
        run = train(case, seed, dtype, MemoryBudget("1GiB", micro_batch_size=3, **options))
        assert judge(case, dtype, run, plain, others).outcome == DIFFERENT
        assert judge(case, dtype, run, plain, more, [by_hand]).outcome == expected


def test_rounding_by_parts_is_asked_for_in_the_sizes_that_auto_has_taken() -> None:
    """Parts of 4 rows turn the sign of an L1 loss; parts of one row, of 2 and of 3 don't."""
    (case,) = [case for case in cases_of(1) if case.name == "drawn_1008"]
    (cell,) = cells_of(case, 102, "bf16-mixed", ["auto"])
    assert cell.verdict.outcome == EQUAL, cell.verdict


def test_parts_by_hand_follow_sizes_that_change_on_the_way() -> None:
    """An earlier rounding in other parts turns a sign later."""
    case, seed = BY_NAME["causal_float32"], 203
    ends = []
    for size in (3, lambda number: 3, lambda number: 3 if number < 2 else 2, 2):
        trace = train_by_hand(case, seed, "bf16-mixed", size)
        assert trace is not None
        ends.append(torch.cat([value.flatten() for value in trace.weights[-1].values()]))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[2], ends[0])
    assert not torch.equal(ends[2], ends[3])


def test_rounding_on_the_scale_of_the_first_part_is_told_from_wrong_weights() -> None:
    """An element of AdamW's first step, .07 of what the adapter moves: right weights on that scale give the same."""
    case, seed, dtype = BY_NAME["rare_positives"], 309, "lora"
    (cell,) = cells_of(case, seed, dtype, [3])
    assert cell.verdict.outcome == EQUAL, cell.verdict
    plain, others = unsplit(case, seed, dtype)
    by_hand = [train_by_hand(case, seed, dtype, 3, relative=relative) for relative in (False, True)]
    run = train(
        case, seed, dtype, MemoryBudget("1GiB", micro_batch_size=3, weigh_by=lambda part: len(part["x"]))
    )
    assert judge(case, dtype, run, plain, others, [one for one in by_hand if one]).outcome == DIFFERENT


class Disturbed(Callback):
    """Gradients off by a thousandth."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(trainer.global_step)
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.grad)
                parameter.grad.add_(noise / noise.norm() * parameter.grad.norm(), alpha=1e-3)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gradients_off_by_a_thousandth_are_different(dtype: str) -> None:
    assert verdict_of(BY_NAME["mse"], 3, dtype, Disturbed()).outcome == DIFFERENT


@pytest.mark.parametrize("dtype", ["float64", "float32", "pure-bf16"])
@pytest.mark.parametrize("kind", ["weights", "gradients", "outputs"])
def test_a_run_diverges_where_the_unsplit_one_does_and_nowhere_else(dtype: str, kind: str) -> None:
    case = BY_NAME["mse"]
    finite, others = unsplit(case, 3, dtype)
    diverged = copy.deepcopy(finite)
    last = getattr(diverged, kind)[-1]
    name = next(
        name for name, value in last.items() if isinstance(value, Tensor) and value.is_floating_point()
    )
    last[name] = torch.full_like(last[name], float("nan"))
    for run, plain, expected in (
        (diverged, diverged, WHOLE),
        (finite, diverged, DIFFERENT),
        (diverged, finite, DIFFERENT),
    ):
        assert judge(case, dtype, run, plain, others).outcome == expected


class Counting(Callback):
    """Changes one plain attribute of the module."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.calls += 1


def test_a_counter_that_is_off_by_one_is_different() -> None:
    verdict = verdict_of(BY_NAME["annealed_by_a_counter"], 3, "float64", Counting())
    assert (verdict.outcome, verdict.where) == (DIFFERENT, "state .calls")


class Failing(Callback):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise self.error


def test_an_error_that_is_not_ours_is_different_and_ours_a_refusal() -> None:
    case = BY_NAME["cross_entropy"]
    verdict = verdict_of(case, 1, "float64", Failing(IndexError("too short")))
    assert (verdict.outcome, verdict.where) == (DIFFERENT, "crashed")
    ours = type("OurError", (ValueError,), {"__module__": "lightning_memkit.utilities.errors"})
    assert verdict_of(case, 1, "float64", Failing(ours("it can't be split"))).outcome == REFUSED
    unnamed = verdict_of(BY_NAME["moving_teacher"], 1, "float64", Failing(ours("it can't be split")))
    assert (unnamed.outcome, unnamed.where) == (DIFFERENT, "refused without naming teacher")


def test_a_case_that_fails_by_itself_is_no_case() -> None:
    case = BY_NAME["cross_entropy"]
    failed = train(case, 1, "float64", Failing(IndexError("too short")))
    with pytest.raises(ValueError, match="fails without memkit"):
        judge(case, "float64", failed, failed)


def test_unsplit_runs_are_whole_and_repeat_themselves() -> None:
    assert verdict_of(BY_NAME["class_weights"], 1, "float64").outcome == WHOLE
    assert (
        verdict_of(BY_NAME["contrastive"], 1, "bf16-mixed", MemoryBudget("1GiB", micro_batch_size=8)).outcome
        == WHOLE
    )


# The sweep


def sample_of_cells(steps: int, seed: int) -> list[tuple[Case, str]]:
    """Steps drawn from a seed, half of them written by hand, each in another dtype."""
    rng = random.Random(seed)
    chosen = rng.sample(CASES, steps // 2) + rng.sample(drawn_cases(seed, 40), steps // 2)
    return [(case, case.dtypes[index % len(case.dtypes)]) for index, case in enumerate(chosen)]


@pytest.mark.parametrize(
    ("steps", "seed"), [(6, 2026), pytest.param(60, 2027, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_no_cell_of_a_sample_is_different(steps: int, seed: int) -> None:
    found = [
        cell
        for index, (case, dtype) in enumerate(sample_of_cells(steps, seed))
        for cell in exactness.cells_of(case, 40 + index, dtype, exactness.SIZES[index % 2 :])
    ]
    assert len(found) >= 2 * steps
    assert not [exactness.told(cell, seed) for cell in found if cell.verdict.outcome == DIFFERENT]


# Each was once different: by a cause, not by a step, and so each stands for what else has that cause.
FOUND = [
    ("rare_mask", 203, "pure-bf16", 3),  # a mean that is kept from zero looks like a sum where one row counts
    ("two_masks", 300, "float64", 3),  # terms of unlike shares, of which some are means over nothing
    ("router", 203, "pure-bf16", 1),  # counted in the batch, and hidden by rounding
    ("returns_lists", 200, "float64", 3),  # a number of which all parts return the same
    ("clamped_by_hooks", 200, "float64", 3),  # what measured noise and was none
    ("running_center", 200, "float64", 3),  # refused by another name
    ("multi_label", 200, "float64", "auto"),  # a total of nothing that was foretold
    ("logs_of_all_kinds", 201, "float32", 1),  # a logged sum of nothing in all that was compared
    ("mask_of_any_name", 200, "float64", 3),  # 0 over 0 among the rows compared
    ("batch_in_place", 207, "bf16-mixed", 3),  # rounding part by part
    ("later_positives", 103, "pure-bf16", 3),  # a new term between rows, of which no micro-batch has one
]
FOUND_DRAWN = [
    (2, "drawn_2035", 201, "float32", 3),  # probed rows of which none counts
    (2, "drawn_2026", 200, "float64", 3),  # more terms than are compared one by one
    (3, "drawn_3040", 300, "float64", 1),  # a micro-batch of nothing in a loss whose terms are not noted
    (3, "drawn_3013", 300, "float64", 3),  # a divisor near zero beside another term
    (3, "drawn_3045", 303, "pure-bf16", 3),  # a value that the last part leaves where no other counts
    (3, "drawn_3045", 306, "float32", 1),  # rows of which one of two terms counts none
    (3, "drawn_3045", 300, "float64", 3),  # a parameter that a loss adds, beside a mean over nothing
    (1, "drawn_1007", 107, "bf16-mixed", 4),  # an error whose sign a rounding turns
    (2, "drawn_2014", 204, "lora", 3),  # an unsplit run that diverges
    (1, "drawn_1003", 102, "bf16-mixed", 3),  # a logged loss that a rounding takes for a mean over samples
    (1, "drawn_1061", 103, "pure-bf16", 3),  # a parameter that comes back to where it began
    (1, "drawn_1042", 108, "float64", 3),  # a count kept from zero by 1e-6: that is none
    (1, "drawn_1031", 100, "float64", 1),
    (1, "drawn_1032", 100, "float64", 3),  # new terms beside rows that count nothing, and a counter
    (3, "drawn_3031", 303, "pure-bf16", 1),  # a loss of few rows, whose weights were rounded part by part
]


def test_a_mean_over_pairs_does_not_hide_in_few_bits() -> None:
    case = next(case for case in drawn_cases(1, 65) if case.name == "drawn_1064")
    (cell,) = exactness.cells_of(case, 102, "bf16-mixed", [3])
    assert cell.verdict.outcome == CHUNKED, exactness.told(cell, 1)


def test_a_term_that_looks_at_rows_is_not_taken_for_one_that_looks_at_none() -> None:
    """The square of a mean over rows, small in bfloat16: its gradient is nearly that of its parts' fractions."""
    case = next(case for case in drawn_cases(4, 70) if case.name == "drawn_4016")
    (cell,) = exactness.cells_of(case, 403, "pure-bf16", ["auto"])
    assert cell.verdict.outcome in (WHOLE, REFUSED, CHUNKED), exactness.told(cell, 4)


@pytest.mark.parametrize(
    ("seed", "dtype", "outcome"),
    [(200, "float64", EQUAL), (200, "float32", EQUAL), (205, "float64", CHUNKED)],
)
def test_batches_whose_rows_do_nothing_to_each_other_may_be_split(
    seed: int, dtype: str, outcome: str
) -> None:
    """A balancing term beside a sum: in all batches of seed 200 the router chooses one expert for every row."""
    case = next(case for case in drawn_cases(2, 95) if case.name == "drawn_2086")
    (cell,) = exactness.cells_of(case, seed, dtype, [1])
    assert cell.verdict.outcome == outcome, exactness.told(cell, 2)
    assert cell.verdict.split == (outcome == EQUAL)


def test_adapters_of_a_router_are_asked_what_they_choose() -> None:
    """In the first batch they choose one expert for every row, and the net without them does not."""
    (cell,) = exactness.cells_of(BY_NAME["router"], 104, "lora", [1])
    assert (cell.verdict.outcome, cell.verdict.split) == (EQUAL, True), exactness.told(cell, 1)


# Each was once refused or wrong, by one example of its family.
SERVED = [
    ("own_autocast", 202, "float32", 3),
    ("causal_float32", 200, "float64", 3),  # a loss in float32 within a float64 model
    ("growing_batches", 200, "float64", 3),  # two rows in the first batch
    ("neighbours_beside_mask", 200, "float64", 1),
]


@pytest.mark.parametrize(("name", "seed", "dtype", "size"), SERVED)
def test_what_adds_up_is_split_and_equal(name: str, seed: int, dtype: str, size: int) -> None:
    (cell,) = exactness.cells_of(BY_NAME[name], seed, dtype, [size])
    assert cell.verdict.outcome == EQUAL, exactness.told(cell, seed // 100)


@pytest.mark.parametrize("name", ["auxiliary_in_train_mode", "own_batch_norm"])
@pytest.mark.parametrize("size", [1, 3])
def test_rows_that_act_on_each_other_in_train_mode_alone_are_not_split(name: str, size: int) -> None:
    (cell,) = exactness.cells_of(BY_NAME[name], 200, "float64", [size])
    assert cell.verdict.outcome in (REFUSED, CHUNKED), exactness.told(cell, 2)


def test_a_parameter_whose_gradient_is_rounding_tells_nothing() -> None:
    """The bias before a batch norm: AdamW makes a step of its rounding, in another direction in each run."""
    (cell,) = exactness.cells_of(BY_NAME["own_batch_norm"], 12, "float64", ["auto"])
    assert cell.verdict.outcome == WHOLE, exactness.told(cell, 0)
    case = BY_NAME["own_batch_norm"]
    plain, others = unsplit(case, 12, "float64")
    assert Noise("float64", case, plain, others).rounded == {"net.2.bias"}
    assert verdict_of(case, 12, "float64", Disturbed()).outcome == DIFFERENT


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "seed", "dtype", "size"), FOUND)
def test_what_was_found_is_not_different(name: str, seed: int, dtype: str, size: int | str) -> None:
    (cell,) = exactness.cells_of(BY_NAME[name], seed, dtype, [size])
    assert cell.verdict.outcome != DIFFERENT, exactness.told(cell, seed // 100)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("drawn", "name", "seed", "dtype", "size"), FOUND_DRAWN)
def test_what_was_drawn_and_found_is_equal(drawn: int, name: str, seed: int, dtype: str, size: int) -> None:
    case = next(case for case in drawn_cases(drawn, 70) if case.name == name)
    (cell,) = exactness.cells_of(case, seed, dtype, [size])
    assert cell.verdict.outcome == EQUAL, exactness.told(cell, drawn)


def test_class_weights_with_few_positives_are_equal() -> None:
    runs = class_weight_runs(0, 6)
    assert [one for one in runs if not one.equal] == []
    assert any(one.split for one in runs)


def test_figures_count_refusals_of_what_decomposes() -> None:
    parts, rows = BY_NAME["mse"], BY_NAME["contrastive"]
    outcomes = [(parts, EQUAL, True), (parts, REFUSED, False), (rows, REFUSED, False), (rows, WHOLE, False)]
    cells = [
        exactness.Cell(case, 1, "float64", 3, Verdict(outcome, split=split))
        for case, outcome, split in outcomes
    ]
    figures = exactness.figures_of(cells)
    assert (figures["cells"], figures["different"], figures["whole_fraction"]) == (4, 0, 0.25)
    assert (figures["wrongly_refused_fraction"], figures["split_fraction"]) == (0.5, 0.5)


def test_a_different_cell_fails_the_command_and_names_the_one_that_repeats_it(
    monkeypatch, tmp_path, capsys
) -> None:
    wrong = Verdict(DIFFERENT, "net.0.weight", "by 1.0e-02", 3, True)
    monkeypatch.setattr(exactness, "judge", lambda *_: wrong)
    monkeypatch.setattr(exactness, "DTYPES_OF_SEEDS", ("float64",))
    monkeypatch.setattr(exactness, "judged_on_ranks", lambda *_: [])  # test_exactness_ranks.py has these
    arguments = ["exactness", "--seed", "2", "--only", "mse", "--size", "3", "--results", str(tmp_path)]
    assert command.main(arguments) == 1
    printed = capsys.readouterr().out
    assert (
        "DIFFERENT mse (parts), seed 200, float64, micro-batches of 3: net.0.weight by 1.0e-02 from batch 3"
        in printed
    )
    assert "python -m benchmarks.exactness --seed 2 --only mse --size 3" in printed
    assert json.loads(printed.splitlines()[-1].removeprefix("RESULT "))["different"] == 1
    assert not list(tmp_path.iterdir())


def test_an_unknown_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no such step"):
        list(exactness.judged(exactness.Options(only="nonsense")))
