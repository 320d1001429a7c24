"""Recompute or offload: the rule against hand-made costs."""

import pytest

from lightning_memkit.activations.offload import describe_choices
from lightning_memkit.activations.offload_choice import (
    BlockCost,
    CopyRates,
    choose_blocks,
    measure_copy_rates,
)
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER


def costs(*runs):
    return [BlockCost(name=name, forward_seconds=s, moved_bytes=b) for name, s, b in runs]


def recomputed(runs, to_host=100.0, to_device=100.0):
    choices = choose_blocks(costs(*runs), CopyRates(to_host=to_host, to_device=to_device))
    return [choice.cost.name for choice in choices if choice.recompute]


@pytest.mark.parametrize(
    ("moved", "to_host", "to_device", "expected"),
    [
        (100, 100, 100, []),  # just as long as the next block's forward
        (101, 100, 100, ["a", "b"]),
        (101, 200, 50, ["a", "b"]),  # on the way back a backward of twice the time is there to hide behind
        (100, 100, 50, []),
    ],
)
def test_a_copy_must_hide_behind_the_next_block(moved, to_host, to_device, expected):
    runs = [("a", 1.0, moved), ("b", 1.0, moved), ("c", 1.0, moved)]
    assert recomputed(runs, to_host, to_device) == expected


def test_each_block_is_judged_by_the_block_after_it():
    assert recomputed([("a", 9.0, 500), ("b", 1.0, 50), ("c", 5.0, 50), ("d", 0.1, 1)]) == ["a", "c"]


def test_the_last_block_never_leaves():
    assert recomputed([("a", 1.0, 10), ("b", 1.0, 10**9)]) == []


def test_a_block_that_runs_twice_is_judged_by_its_worst_run():
    assert recomputed([("a", 1.0, 50), ("b", 1.0, 5), ("a", 0.1, 50), ("c", 0.1, 50)]) == ["a"]


def test_choices_are_in_order_and_said_in_one_line():
    runs = [("a", 0.002, 3 << 20), ("b", 0.001, 100), ("a", 0.002, 3 << 20)]
    choices = choose_blocks(costs(*runs), CopyRates(to_host=1e9, to_device=1e9))
    assert [choice.cost.name for choice in choices] == ["a", "b"]
    assert describe_choices(choices) == (
        "1 of 2 blocks are offloaded, 1 checkpointed: 3.00 MiB of a don't hide behind a block's forward of 2.00 ms"
    )
    assert describe_choices(choices[1:]) == "1 of 1 blocks are offloaded"


@NEEDS_COMPILER
def test_what_copies_are_timed_with_goes_back_to_the_system():
    with fake_device() as device:
        rates = measure_copy_rates(device.torch_device)
        assert min(rates.to_host, rates.to_device) > 0
        assert device.pinned_reserved_peak_bytes > 0
        assert device.pinned_reserved_bytes == 0
