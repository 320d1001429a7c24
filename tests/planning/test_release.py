"""The search where gradients may be released: one micro-batch a step, and only where it is needed."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_memkit.planning.choices import Family, offloads, precisions, refusal, releases, shardings
from lightning_memkit.planning.choices import optimizer_states as states
from lightning_memkit.planning.eight_bit import EightBit
from lightning_memkit.planning.search import search
from lightning_memkit.prediction.devices import DEVICES
from tests.planning.test_search import SIZES, Formula, all_families, problem

GRADIENTS, ON_HOST = 600, 300


class Releasing(Formula):
    """Gradients take their own bytes until they are released, and what is on the host takes none."""

    def bytes(self, family: Family, rows: int) -> int:
        away = ON_HOST if "states" in family["offload"].name else 0
        return super().bytes(family, rows) - away + (0 if family.is_released else GRADIENTS)


def test_released_gradients_take_the_whole_batch():
    formula = Releasing()
    rows, _ = search(all_families(gradients=releases()), problem(formula, 1500))
    released = [row for row in rows if row.family.is_released and row.micro_batch_size]
    assert released
    assert all(row.parts == 1 for row in released)
    assert {size for family, size in formula.asked if family.is_released} == {SIZES[-1]}
    assert any(row.fits and row.family.is_released for row in rows)


def test_a_released_plan_is_found_where_it_is_the_fastest():
    one = precisions(None)[-1:]
    rows, _ = search(all_families(gradients=releases(), precision=one), problem(Releasing(), 1200))
    # Without release 1100 bytes are there before the first row is: a part has a few of them.
    assert rows[0].family.is_released
    assert rows[0].parts == 1
    alone, _ = search(all_families(precision=one), problem(Releasing(), 1200))
    assert rows[0].seconds < alone[0].seconds


def test_where_the_whole_batch_fits_nothing_is_released():
    formula = Releasing()
    rows, _ = search(all_families(gradients=releases()), problem(formula, 10**6))
    assert not any(family.is_released for family, _ in formula.asked)
    reasons = {row.rejected for row in rows if row.family.is_released}
    assert all(reason.startswith("not needed: the whole batch fits with") for reason in reasons)


def test_for_the_least_memory_one_prediction_shows_that_release_saves_nothing():
    formula = Releasing()
    given = all_families(gradients=releases(), precision=precisions(None)[:1])
    rows, _ = search(given, problem(formula, 10**6, "memory"))
    assert rows[0].taken_bytes == min(row.taken_bytes for row in rows if row.fits)
    assert sum(family.is_released for family, _ in formula.asked) >= 1

    class Wide(Releasing):  # activations of the whole batch outweigh the gradients
        def bytes(self, family: Family, rows: int) -> int:
            return super().bytes(family, rows) + 100 * rows

    formula = Wide()
    rows, _ = search(given, problem(formula, 10**6, "memory"))
    assert not rows[0].family.is_released
    assert sum(family.is_released for family, _ in formula.asked) == 1
    assert any(row.rejected.startswith("more than float32") for row in rows)


def test_what_keeps_the_least_on_the_device_stands_for_all_offloads():
    formula = Releasing(resident=4000)
    given = all_families(offload=offloads(DEVICES["rtx4090"]), precision=precisions(None)[-1:])
    rows, _ = search(given, problem(formula, 1000))
    assert not any(row.fits for row in rows)
    asked = {family["offload"].name for family, _ in formula.asked}
    assert asked == {"", "states and activations on the host"}
    reasons = {row.rejected for row in rows}
    assert "more than with states and activations on the host, which does not fit" in reasons


def test_a_floor_names_what_it_counts():
    floors: Callable[[Family], int] = lambda family: 900 if family.is_released else 2000  # noqa: E731
    limited = replace(problem(Releasing(), 1200), floor=floors)
    rows, _ = search(all_families(gradients=releases()), limited)
    assert {row.rejected for row in rows if not row.family.is_released} == {
        "weights and gradients alone take 1.95 KiB"
    }


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"gradients": 1, "ranks": 0}, "DDP reduces gradients after the hooks"),
        ({"gradients": 1, "precision": 1}, "scaler looks for overflows"),
        ({"offload": 2, "ranks": 1}, "states of sharded parameters"),
        ({"offload": 3, "ranks": 2}, "states of sharded parameters"),
        ({"offload": 1, "ranks": 2}, ""),
        ({"states": 1, "ranks": 2}, "bitsandbytes steps whole tensors"),
        ({"gradients": 1, "ranks": 2}, ""),
        ({"states": 1, "gradients": 1, "offload": 2}, ""),
    ],
)
def test_what_can_not_go_together_is_refused_without_a_prediction(named, reason):
    columns = {
        "precision": precisions(DEVICES["t4"]),
        "ranks": shardings(DEVICES["t4"]),
        "offload": offloads(DEVICES["t4"]),
        "gradients": releases(),
        "states": states(EightBit(replaces="AdamW")),
    }
    chosen = {name: (choices[named[name]],) for name, choices in columns.items() if name in named}
    family = all_families(**{"precision": precisions(None)[:1], **chosen})[0]
    assert reason in refusal(family)
    assert bool(refusal(family)) == bool(reason)
    formula = Formula()
    rows, _ = search([family, all_families()[0]], problem(formula, 10**6))
    assert (family in [asked for asked, _ in formula.asked]) == (not reason)
    assert len(rows) == 2
