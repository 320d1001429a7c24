"""The search on models whose bytes are known by a formula."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_memkit.memory.anatomy import Anatomy
from lightning_memkit.planning.choices import (
    ACTIVATIONS,
    ON_HOST,
    STATES,
    STATES_AND_ACTIVATIONS,
    Choice,
    Family,
    checkpointings,
    families,
    is_lighter,
    losses,
    offloads,
    precisions,
    releases,
    shardings,
)
from lightning_memkit.planning.problem import Problem, UnavailableError
from lightning_memkit.planning.search import search
from lightning_memkit.planning.times import HOST_BYTES_PER_SECOND
from lightning_memkit.prediction.devices import DEVICES
from lightning_memkit.prediction.result import Prediction
from lightning_memkit.prediction.work import OperatorWork, Work

KEPT = {"none": 100, "selective": 60, "every:2": 50, "full": 20}  # bytes a row
MORE = {"none": 10, "selective": 11, "every:2": 12, "full": 13}  # seconds a row
SIZES = (1, 2, 3, 4, 5, 6, 8, 11, 16, 32)


class Counted:
    """Seconds are what an operator is said to move."""

    def seconds(self, operator: OperatorWork) -> float:
        return float(operator.moved_bytes)

    def host_seconds(self, operator: OperatorWork) -> float:
        return 0.0


class Formula:
    """`resident` bytes, and so many a row; counts how often it is asked."""

    def __init__(self, resident: int = 1000, missing: tuple[str, ...] = (), curve: int = 0) -> None:
        self.resident, self.missing, self.curve, self.asked = resident, missing, curve, []

    def bytes(self, family: Family, rows: int) -> int:
        base = {"float32": 4, "mixed bfloat16": 3, "bfloat16, exact sums": 3}.get(family["precision"].name, 2)
        kept = KEPT[family["checkpointing"].name] - (10 if family["loss"].name == "chunked" else 0)
        return self.resident * base // 4 + rows * kept + self.curve * rows * rows

    def __call__(self, family: Family, rows: int) -> Prediction:
        for column in self.missing:
            if family[column].callbacks:
                raise UnavailableError(column, f"nothing for {column}")
        self.asked.append((family, rows))
        taken = self.bytes(family, rows)
        each = MORE[family["checkpointing"].name] + (1 if family["loss"].name == "chunked" else 0)
        slow = 2 if family["precision"].name == "float32" else 1
        work = Work(
            part={OperatorWork("part", (), (), 0, slow * each * rows + 5, False): 1},
            step={OperatorWork("step", (), (), 0, 7, False): 1},
        )
        anatomy = Anatomy(
            peak_bytes=taken, peak_phase="backward", peak_operator="mm", at_peak={"weights": taken}
        )
        return Prediction(anatomy=anatomy, timeline=(self.resident // 4, taken), work=work)


def problem(formula: Formula, usable: int, goal: Any = "speed") -> Problem:
    return Problem(
        predict=formula,
        floor=lambda family: 0,
        rows=SIZES[-1],
        sizes=SIZES,
        usable_bytes=usable,
        beside_bytes=0,
        times=Counted(),
        goal=goal,
    )


def all_families(**columns: tuple[Choice, ...]) -> list[Family]:
    found = {
        "precision": precisions(None),
        "ranks": (Choice(column="ranks", name=""),),
        "offload": offloads(None),
        "checkpointing": checkpointings(),
        "loss": losses(),
        **columns,
    }
    return list(families(found))


@pytest.mark.parametrize("usable", [1300, 1500, 2000, 4000])
@pytest.mark.parametrize("curve", [0, 1])
def test_it_finds_what_trying_everything_finds(usable, curve):
    formula = Formula(curve=curve)
    given = all_families()
    rows, missing = search(given, problem(formula, usable))
    own = problem(Formula(curve=curve), usable)
    everything = [own.row(family, size) for family in given for size in SIZES]
    best = min((row for row in everything if row.fits), key=lambda row: (row.seconds, row.taken_bytes))
    assert missing == {}
    assert rows[0].exact
    assert rows[0].fits
    assert rows[0].seconds == pytest.approx(best.seconds, rel=0.02)
    assert len(formula.asked) < len(everything) / 2
    for row in rows:  # what is said to fit fits; what is estimated does where bytes are a line
        taken = formula.bytes(row.family, row.micro_batch_size)
        assert not row.fits or taken <= usable or (curve and not row.exact)


def test_what_more_than_fits_is_not_searched():
    formula = Formula()
    rows, _ = search(all_families(), problem(formula, 10**6))
    fitting = [row for row in rows if row.fits]
    assert {row.family["checkpointing"].name for row in fitting} == {"none"}
    assert all(row.parts == 1 for row in fitting)
    assert "not needed: the whole batch fits with" in rows[-1].rejected
    assert len(formula.asked) <= 20  # of 320


def test_a_precision_whose_least_does_not_fit_is_left_after_one_prediction():
    formula = Formula(resident=4000)
    rows, _ = search(all_families(), problem(formula, 2100))  # float32 needs 4000
    asked = [family["precision"].name for family, _ in formula.asked]
    assert asked.count("float32") == 1
    reasons = {row.rejected for row in rows if row.family["precision"].name == "float32"}
    assert reasons == {
        "1 row at a time: 3.92 KiB: weights 3.92 KiB",
        "more than float32, full checkpointing, the loss without logits, which does not fit",
    }


def test_choices_that_a_module_has_nothing_for_are_left_out_and_said():
    rows, missing = search(all_families(), problem(Formula(missing=("loss",)), 2000))
    assert missing == {"loss": "nothing for loss"}
    assert {row.family["loss"].name for row in rows} == {"own"}
    rows, missing = search(all_families(), problem(Formula(missing=("loss", "checkpointing")), 2000))
    assert set(missing) == {"loss", "checkpointing"}
    assert {(row.family["loss"].name, row.family["checkpointing"].name) for row in rows} == {("own", "none")}


def test_the_least_memory_is_found():
    rows, _ = search(all_families(), problem(Formula(), 4000, "memory"))
    best = rows[0]
    assert (best.micro_batch_size, best.family["checkpointing"].name, best.family["loss"].name) == (
        1,
        "full",
        "chunked",
    )
    assert best.taken_bytes == min(row.taken_bytes for row in rows if row.fits)


def test_where_nothing_fits_every_row_says_why():
    rows, _ = search(all_families(), problem(Formula(), 100))
    assert rows
    assert all(row.rejected for row in rows)


def test_where_what_keeps_the_least_fails_what_keeps_more_is_tried():
    class Failing(Formula):
        def bytes(self, family: Family, rows: int) -> int:
            return super().bytes(family, rows) // (2 if family["offload"].name == ACTIVATIONS else 1)

        def __call__(self, family: Family, rows: int) -> Prediction:
            if family["offload"].name in (STATES, STATES_AND_ACTIVATIONS):
                raise ValueError("a strategy that has the states")
            return super().__call__(family, rows)

    columns = {"precision": precisions(None)[:1], "offload": offloads(DEVICES["rtx4090"])}
    rows, _ = search(all_families(**columns), problem(Failing(), 900))
    assert {row.family["offload"].name for row in rows if row.fits} == {ACTIVATIONS}


class Adam(Formula):
    """600 bytes of weights, as many of gradients unless they are released, and 1200 of states unless on the host."""

    def __call__(self, family: Family, rows: int) -> Prediction:
        found = super().__call__(family, rows)
        states = 0 if family["offload"].name in (STATES, STATES_AND_ACTIVATIONS) else 1200
        peak = found.peak_bytes + 600 + states + (0 if family.is_released else 600)
        lasting = {"weights": 600, "optimizer_states": states}
        return replace(found, anatomy=replace(found.anatomy, peak_bytes=peak), lasting=lasting)


def offloading(released: bool, usable: int) -> tuple[Adam, list[Family], Problem]:
    formula = Adam(resident=0)
    columns = {
        "precision": precisions(None)[:1],
        "offload": offloads(DEVICES["rtx4090"]),
        "gradients": releases()[released : released + 1],
    }
    floor = 600 if released else 1200
    return formula, all_families(**columns), replace(problem(formula, usable), floor=lambda family: floor)


def offloads_asked(formula: Formula) -> list[str]:
    """In their order."""
    return list(dict.fromkeys(family["offload"].name for family, _ in formula.asked))


@pytest.mark.parametrize(
    ("released", "usable", "reason"),
    [
        (False, 2300, "weights, gradients and optimizer states alone take 2.34 KiB"),
        (True, 1750, "weights and optimizer states alone take 1.76 KiB"),
    ],
)
def test_what_stays_on_the_device_rejects_all_that_keeps_it(released, usable, reason):
    formula, given, limited = offloading(released, usable)
    rows, _ = search(given, limited)
    assert {row.rejected for row in rows if row.family["offload"].name == ACTIVATIONS} == {reason}
    assert offloads_asked(formula)[:2] == ["", STATES]  # without states it probably fits, and does
    assert ACTIVATIONS not in offloads_asked(formula)
    assert any(row.fits for row in rows)


def test_what_may_fit_beside_what_stays_is_predicted():
    formula, given, limited = offloading(released=False, usable=2405)  # 2410 are taken at the least
    search(given, limited)
    assert ACTIVATIONS in offloads_asked(formula)


def test_what_does_not_fit_without_states_either_is_tried_with_all_on_the_host():
    formula, given, limited = offloading(released=False, usable=1205)
    rows, _ = search(given, limited)
    assert offloads_asked(formula) == ["", STATES_AND_ACTIVATIONS]
    assert not any(row.fits for row in rows)


def test_where_there_is_room_the_whole_batch_is_tried_first():
    formula = Formula(resident=100)
    rows, _ = search(all_families(), replace(problem(formula, 10**6), floor=lambda family: 100))
    assert rows[0].parts == 1
    assert {size for _, size in formula.asked} == {SIZES[-1]}


@pytest.mark.parametrize("floor", [1, 400])
def test_room_or_not_it_finds_the_same(floor):
    found = [
        search(
            all_families(), replace(problem(Formula(curve=1), 1500), floor=lambda family, least=least: least)
        )[0]
        for least in (floor, 0)
    ]
    best, same = (rows[0] for rows in found)
    assert (best.words, best.taken_bytes, best.seconds) == (same.words, same.taken_bytes, same.seconds)


def test_a_device_without_bfloat16_has_float16():
    assert [choice.name for choice in precisions(DEVICES["t4"])] == ["float32", "mixed float16"]


def test_where_larger_parts_gain_nothing_what_computes_more_is_not_searched():
    class Large(Formula):
        def __call__(self, family: Family, rows: int) -> Prediction:
            found = super().__call__(family, rows)
            each = MORE[family["checkpointing"].name]
            return replace(
                found, work=Work(part={OperatorWork("part", (), (), 0, 10**6 * each * rows, False): 1})
            )

    formula = Large()
    rows, _ = search(all_families(), problem(formula, 1650))
    assert rows[0].family["checkpointing"].name == "none"
    assert 1 < rows[0].parts
    assert any("fits, and more rows at a time gain nothing" in row.rejected for row in rows)
    assert len(formula.asked) <= 20


def test_lighter_is_what_does_nothing_that_the_other_does_not():
    light, *_, heavy = all_families(precision=precisions(None)[:1])
    assert is_lighter(light, heavy)
    assert not is_lighter(heavy, light)
    selective, every = (
        next(one for one in all_families() if one["checkpointing"].name == name)
        for name in ("selective", "every:2")
    )
    assert not is_lighter(selective, every)
    assert not is_lighter(light, all_families()[-1])  # of another precision


@pytest.mark.parametrize(("copied", "seconds"), [(0, 35 + 7), (10, 35 + 7 / HOST_BYTES_PER_SECOND), (99, 99)])
def test_copies_of_shards_overlap_with_a_micro_batch_and_the_host_steps(copied, seconds):
    class Copying(Formula):
        def __call__(self, family: Family, rows: int) -> Prediction:
            return replace(super().__call__(family, rows), copied_bytes=copied)

    family = all_families(precision=precisions(None)[1:2])[0]
    limited = replace(problem(Copying(), 10**6), sizes=(3,), rows=3)
    assert limited.row(family, 3).seconds == pytest.approx(seconds)


def test_shards_on_the_host_are_for_devices_that_are_not_the_host():
    assert [choice.name for choice in shardings(None)] == ["DDP", "FSDP2 stage 2", "FSDP2 stage 3"]
    *others, last = shardings(DEVICES["t4"])
    assert (len(others), last.arguments["strategy"].cpu_offload) == (3, True)
    heavy, light = (all_families(ranks=(one,))[0] for one in (last, others[2]))
    assert not is_lighter(heavy, light)


def test_shards_go_to_the_host_only_where_nothing_fits_without():
    def asked(usable: int) -> set[str]:
        formula = Formula()
        given = all_families(precision=precisions(None)[:1], ranks=shardings(DEVICES["t4"]))
        search(given, problem(formula, usable))
        return {family["ranks"].name for family, _ in formula.asked}

    assert ON_HOST not in asked(1300)
    assert ON_HOST in asked(900)
