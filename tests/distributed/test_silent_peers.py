"""A peer that was silent once is not waited for again, whoever caught the error."""

import time
from contextlib import suppress
from datetime import timedelta

import pytest
from torch import distributed

from lightning_memkit.distributed.agreement import Agreement
from lightning_memkit.distributed.timeouts import RankTimeoutError

TIMEOUT_SECONDS = 1.0


@pytest.fixture
def agreement(tmp_path):
    """Of one rank, which agrees with itself."""
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    found = Agreement()
    try:
        yield found
    finally:
        found.close()
        distributed.destroy_process_group()


def fail(agreement: Agreement, error: Exception, seconds: float) -> None:
    with agreement.working("the ranks worked"):
        time.sleep(seconds)
        raise error


def test_agreements_after_a_silent_peer_fail_at_once(agreement):
    with suppress(Exception):  # as a trial of a few rows does
        fail(
            agreement,
            RuntimeError("[unbound_buffer.cc:81] Timed out waiting 1000ms for recv"),
            TIMEOUT_SECONDS,
        )
    for agree in (agreement.meet, lambda: agreement.largest([1]), lambda: agreement.total([1])):
        with pytest.raises(RankTimeoutError, match="for another rank while the ranks worked; .* 1 s"):
            agree()


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (RuntimeError("The size of tensor a must match the size of tensor b"), TIMEOUT_SECONDS),
        (RuntimeError("Timed out waiting for a file"), 0),
        (ValueError("timeout"), TIMEOUT_SECONDS),
    ],
)
def test_other_errors_of_a_long_step_are_no_silent_peer(agreement, error, seconds):
    with pytest.raises(type(error), match=str(error)):
        fail(agreement, error, seconds)
    assert agreement.largest([3]) == [3]
    agreement.meet()
