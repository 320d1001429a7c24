"""A sample of `benchmarks.fault_sweep`: a step that runs out of memory ends bitwise as a fault-free one."""

import logging
from dataclasses import replace

import pytest
import torch

from benchmarks import _fault_runs, fault_sweep
from benchmarks._fault_cases import BATCH, CHANGING, IN_CHUNKS, MODELS, OPTIMIZERS, changing_optimizer
from benchmarks._fault_ranks import Job, run_ranks
from benchmarks._fault_runs import Case, End, References, chosen_points, reasons, run_case
from benchmarks._fault_state import differences
from lightning_memkit.testing import Fault, Outcome
from tests.testing.needs import NEEDS_COMPILER

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*normalize with statistics of the batch:UserWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous:UserWarning"),
]


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.long
def test_a_fault_at_a_sample_of_the_points_leaves_no_trace(model: str, optimizer: str) -> None:
    step = (MODELS.index(model) + OPTIMIZERS.index(optimizer)) % 2
    tally = run_case(Case(model=model, optimizer=optimizer, step=step), 3)
    assert not tally.failures
    assert tally.equal == tally.points == 3
    assert tally.total_points > 100


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", CHANGING)
@pytest.mark.long
def test_a_fault_leaves_no_trace_in_what_the_step_changes_besides_gradients(model: str) -> None:
    """A teacher, counters, lists, a plain object, a hook's variable, a callback's counter, the batch."""
    tally = run_case(Case(model=model, optimizer=changing_optimizer(model), step=1), 8)
    assert not tally.failures
    assert tally.equal == tally.points == 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("model", IN_CHUNKS)
@pytest.mark.long
def test_a_fault_leaves_no_trace_where_modules_run_in_chunks(model: str, step: int) -> None:
    """Of rows, with the batch whole; of tokens, with micro-batches of one row."""
    case = Case(model=model, optimizer="for_loop", step=step)
    tally = run_case(case, 4)
    assert not tally.failures
    assert tally.equal == 4
    logging.disable(logging.WARNING)
    ((_, size, rows, tokens),) = _fault_runs.train(case, None).partition
    assert (size, rows, tokens) == ((BATCH, 2, None) if model == "contrastive" else (1, None, 3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.long
def test_a_fault_at_any_point_of_a_step_that_changes_everything_leaves_no_trace(step: int) -> None:
    """With an optimizer whose buffers and counters are its own; each allocation of the step once."""
    tally = run_case(Case(model="everything", optimizer="own_buffers", step=step), None)
    assert not tally.failures
    assert tally.equal == tally.points == tally.total_points
    assert tally.points >= 100


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("model", "optimizer", "step"), [("transformer", "for_loop", 0), ("cnn", "kahan", 1)]
)
@pytest.mark.long
def test_a_fault_of_the_devices_allocator_leaves_no_trace(model: str, optimizer: str, step: int) -> None:
    tally = run_case(Case(model=model, optimizer=optimizer, step=step, kind="allocator"), 5)
    assert not tally.failures
    assert tally.equal == 5


@pytest.mark.parametrize(("model", "what"), [("transformer", "rng"), ("cnn", "buffers")])
def test_the_naive_retry_leaves_traces_which_the_sweep_sees(model: str, what: str) -> None:
    tally = run_case(Case(model=model, optimizer="foreach", step=1, naive=True), 4)
    assert tally.points == 4
    assert tally.equal < 2
    assert what in tally.failures[0]


def test_smaller_parts_change_no_more_than_rounding() -> None:
    """In float64 without dropout, after one step, against the partition before the fault."""
    case = Case(model="exact", optimizer="for_loop", step=1, dtype=torch.float64, steps_after=0)
    tally = run_case(case, 4)
    assert tally.equal == 4
    assert 0 < tally.largest_difference <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in fault_sweep.all_cases() if not case.naive], ids=lambda case: "-".join(
        (case.model, case.optimizer, str(case.step), case.kind))
)  # fmt: skip
def test_a_fault_at_any_point_leaves_no_trace(case: Case) -> None:
    tally = run_case(case, None)
    assert not tally.failures
    assert tally.equal == tally.points == tally.total_points


@pytest.mark.long
@pytest.mark.parametrize("strategy", fault_sweep.RANKS)
def test_a_fault_on_one_of_two_ranks_leaves_no_trace_and_hangs_none(strategy: str) -> None:
    cases = [case for case in fault_sweep.rank_cases(1) if case[0] == strategy]
    shared = run_ranks(Job(cases=cases, points=10, seed=0, most_starts=1))
    assert sum(shared.hangs) == 0
    assert [failure for tally in shared.tallies for failure in tally.failures] == []


# What the sweep holds against an outcome


@pytest.fixture(scope="module")
def ends() -> tuple[Case, End, End]:
    """A run, and one whose second step takes smaller parts."""
    case = Case(model="transformer", optimizer="for_loop", step=1)
    logging.disable(logging.WARNING)
    return case, _fault_runs.train(case, None), _fault_runs.train(case, None, partition=((1, 1, None, None),))


def outcome_of(result: End | None, expected: End, **values) -> Outcome:
    known = {"point": 0, "points": 1, "fault": Fault(point=0, operator=""), "error": None, "leaked_bytes": 0}
    return Outcome(result=result, expected=expected, **{**known, **values})


@pytest.mark.long
def test_an_outcome_is_held_against_the_run_of_its_own_partition(ends: tuple[Case, End, End]) -> None:
    case, plain, smaller = ends
    assert plain.partition == ((0, 2, None, None),)
    assert smaller.partition == ((0, 2, None, None), (1, 1, None, None))
    assert "weights" in differences(plain.state, smaller.state)
    references = References(case, None)
    for end in (plain, smaller):
        end = replace(end, live_bytes=references[end.partition].live_bytes)
        assert reasons(outcome_of(end, plain), references) == ""
    mistaken = replace(smaller, partition=plain.partition)
    assert "weights" in reasons(outcome_of(mistaken, plain), references)


def test_every_kind_of_trace_counts(ends: tuple[Case, End, End]) -> None:
    case, plain, _ = ends
    references = References(case, None)
    good = replace(plain, live_bytes=references[plain.partition].live_bytes)
    for name in good.state:
        spoiled = replace(good, state={**good.state, name: "else"})
        assert reasons(outcome_of(spoiled, plain), references) == name
    assert (
        reasons(outcome_of(replace(good, live_bytes=good.live_bytes + 4), plain), references)
        == "live bytes +4"
    )
    assert reasons(outcome_of(good, plain, leaked_bytes=8), references) == "leaked bytes +8"
    assert "not reached" in reasons(outcome_of(good, plain, fault=None), references)
    assert reasons(outcome_of(None, plain, error=KeyError("exp_avg")), references) == "KeyError: 'exp_avg'"
    flipped = dict(good.state["weights"])
    name = next(iter(flipped))
    flipped[name] = flipped[name].clone()
    flipped[name].view(torch.int32)[..., 0] ^= 1  # the last bit
    spoiled = replace(good, state={**good.state, "weights": flipped})
    assert reasons(outcome_of(spoiled, plain), references) == "weights"


def test_a_sample_spreads_over_all_points() -> None:
    assert chosen_points(10, None, 0) == chosen_points(10, 12, 0) == range(10)
    for seed in range(20):
        points = chosen_points(100, 5, seed)
        assert [point // 20 for point in points] == list(range(5))
