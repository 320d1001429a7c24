"""Collectives that are announced, with peers that are played; two real ranks are in test_two_ranks_evaluation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memkit.distributed.agreement import Meeting, PeerEndedError, StepOutcome
from lightning_memkit.distributed.announced import together
from lightning_memkit.distributed.catch_up import CannotCatchUpError
from lightning_memkit.distributed.collectives import collectives_issued


class Peers:
    """An agreement in which rank 1 runs out of memory, or ends, before the meeting of that number."""

    rank = 0

    def __init__(self, fails_at: int | None = None, ends_at: int | None = None) -> None:
        self.fails_at, self.ends_at = fails_at, ends_at
        self.told: list[StepOutcome] = []
        self.ended = False

    def meet(self, outcome: StepOutcome = StepOutcome.DONE) -> Meeting:
        if len(self.told) == self.ends_at:
            raise PeerEndedError("Rank 1 ended.")
        failed = (1,) if len(self.told) == self.fails_at else ()
        self.told.append(outcome)
        return Meeting(failed=failed + (0,) * (outcome == StepOutcome.OUT_OF_MEMORY), counts=())

    def end(self) -> None:
        self.ended = True


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def run_together(peers: Peers, run: Any) -> Any:
    return together(peers, run)  # pyright: ignore[reportArgumentType]


def issues(value: torch.Tensor) -> list[torch.Tensor]:
    """Two collectives, among other operators."""
    gathered = [torch.empty_like(value)]
    distributed.all_gather(gathered, value * 2)
    distributed.all_reduce(gathered[0])
    return gathered


def test_other_operators_are_not_announced_and_barriers_are() -> None:
    peers = Peers()
    run_together(peers, lambda: (torch.ones(2).sum().item(), distributed.barrier()))
    assert peers.told == [StepOutcome.DONE] * 2


def test_a_compiled_function_runs_compiled_again_afterwards() -> None:
    ran: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            ran.append("compiled")
            return graph(*arguments)

        return run

    def doubled(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    compiled = torch.compile(doubled, backend=backend)
    run_together(Peers(), lambda: compiled(torch.ones(3)))
    assert ran == []
    compiled(torch.ones(3))
    run_together(Peers(), lambda: compiled(torch.ones(3)))
    compiled(torch.ones(3))
    assert ran == ["compiled"] * 2


def test_ranks_meet_before_each_collective_and_at_the_end() -> None:
    peers = Peers()
    assert torch.equal(run_together(peers, lambda: issues(torch.ones(3)))[0], torch.full((3,), 2.0))
    assert peers.told == [StepOutcome.DONE] * 3


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_peer_s_failure_is_heard_before_the_collective_it_does_not_join(fails_at: int) -> None:
    peers, before = Peers(fails_at), collectives_issued()
    with pytest.raises(torch.OutOfMemoryError, match="Rank 1 ran out of memory; all"):
        run_together(peers, lambda: issues(torch.ones(3)))
    assert before is not None
    assert collectives_issued() == before + fails_at
    assert peers.told == [StepOutcome.DONE] * (fails_at + 1)


def test_a_step_that_swallows_what_it_hears_fails_all_the_same() -> None:
    def swallows() -> None:
        for _ in range(2):
            try:
                issues(torch.ones(3))
            except torch.OutOfMemoryError:
                continue

    peers = Peers(1)
    with pytest.raises(torch.OutOfMemoryError, match="Rank 1"):
        run_together(peers, swallows)
    assert len(peers.told) == 2


def test_this_rank_s_failure_is_told_once_and_raised_in_its_own_words() -> None:
    def fails() -> None:
        issues(torch.ones(3))
        raise torch.OutOfMemoryError("the device is full")

    peers = Peers()
    with pytest.raises(torch.OutOfMemoryError, match="^the device is full$"):
        run_together(peers, fails)
    assert peers.told == [StepOutcome.DONE, StepOutcome.DONE, StepOutcome.OUT_OF_MEMORY]


class Full(TorchDispatchMode):
    """Collectives find no memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise torch.OutOfMemoryError("the device is full")
        return func(*args, **(kwargs or {}))


def test_memory_that_runs_out_within_a_collective_ends_the_rank() -> None:
    with Full(), pytest.raises(CannotCatchUpError, match="within a collective"):
        run_together(Peers(), lambda: issues(torch.ones(3)))


def test_other_errors_surface_and_are_told() -> None:
    peers, error = Peers(), KeyError("labels")

    def breaks() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        run_together(peers, breaks)
    assert caught.value is error
    assert peers.ended


def test_a_peer_that_ended_ends_this_rank_without_a_word() -> None:
    peers = Peers(ends_at=1)
    with pytest.raises(PeerEndedError):
        run_together(peers, lambda: issues(torch.ones(3)))
    assert not peers.ended
