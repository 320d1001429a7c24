"""Compensated steps of ZeRO-1: each rank's share is stepped as one rank would step all of it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.optim import AdamW, Optimizer

from lightning_memkit.optim.compensation import compensate, compensation_of
from lightning_memkit.optim.gradient_release import release_gradients
from lightning_memkit.optim.offload import offload_states
from lightning_memkit.prediction.contained import contained

# what torch's own module of ZeRO-1 says when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")

RANKS, STEPS = 2, 6
MODES = ("kahan", "split", "split24", "stochastic")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8)).bfloat16()


def train(module: nn.Module, optimizer: Optimizer, steps: int = STEPS) -> list[Tensor]:
    inputs = torch.linspace(-1, 1, 5 * 24).reshape(5, 24).bfloat16()
    for _ in range(steps):
        optimizer.zero_grad()
        module(inputs).float().pow(2).sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


def zero(module: nn.Module, **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(module.parameters(), optimizer_class=AdamW, lr=1e-3, **options)


def on_ranks(work: Callable[[], Any], folder: Path, ranks: int = RANKS) -> list[Any]:
    """What `work` returns on each rank of a group that gloo connects."""

    def of_rank(rank: int) -> Any:
        store = f"file://{folder}/store"
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        found = work()
        distributed.barrier()
        return found

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: contained(lambda: of_rank(rank), timeout_s=100), range(ranks)))


@pytest.mark.parametrize("mode", MODES)
def test_ranks_train_as_one_would(mode, tmp_path):
    alone = network()
    before = [parameter.detach().clone() for parameter in alone.parameters()]
    optimizer = AdamW(alone.parameters(), lr=1e-3)
    compensate(optimizer, mode=mode, states="exact")
    expected = train(alone, optimizer)

    def work() -> Any:
        module = network()
        sharded = zero(module)
        handle = compensate(sharded, mode=mode, states="exact", bucket_bytes=4096)  # several buckets a step
        assert compensation_of(sharded) is compensation_of(sharded.optim) is handle
        weights = train(module, sharded)
        assert not sharded.state
        return [weight.tolist() for weight in weights], sum(
            p in sharded.optim.state for p in module.parameters()
        )

    found = on_ranks(work, tmp_path)
    assert found[0][0] == found[1][0]
    assert sum(states for _, states in found) == len(expected)  # each is kept by one rank
    for weight, first, trained in zip(expected, before, found[0][0], strict=True):
        assert not torch.equal(weight, first)
        # Noise goes by a weight's place among those that are stepped: the rounded weight may be its neighbour.
        if mode not in ("stochastic", "split24"):
            assert weight.tolist() == trained
        if mode == "split24":
            torch.testing.assert_close(
                weight, torch.tensor(trained, dtype=weight.dtype), rtol=2**-6, atol=1e-4
            )


@pytest.mark.parametrize(("mode", "states"), [("split", "compact"), ("split24", "8-bit")])
def test_a_consolidated_checkpoint_resumes_bit_for_bit(mode, states, tmp_path):
    def work() -> tuple[Any, Any]:
        def fresh() -> tuple[nn.Sequential, Any]:
            module = network()
            sharded = zero(module)
            compensate(sharded, mode=mode, states=states)
            return module, sharded

        module, sharded = fresh()
        train(module, sharded)
        saved: dict[str, Any] = {}
        for rank in range(RANKS):
            sharded.consolidate_state_dict(to=rank)
            if rank == distributed.get_rank():
                saved = sharded.state_dict()
        resumed, again = fresh()
        resumed.load_state_dict(module.state_dict())
        again.load_state_dict(saved)
        named = {name for state in again.optim.state.values() for name in state}
        if distributed.get_rank() == 1:  # it has the weight whose rows are long enough
            assert ("exp_avg_8bit" in named) == (states == "8-bit")
        for one, other in zip(module.parameters(), resumed.parameters(), strict=True):
            ours, theirs = sharded.optim.state.get(one, {}), again.optim.state.get(other, {})
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        handles = compensation_of(sharded), compensation_of(again)
        full, same = (
            [value.tolist() for _, value in handle.float32_weights()] for handle in handles if handle
        )
        return full, same

    for full, same in on_ranks(work, tmp_path):
        assert full == same


def test_what_steps_inside_the_backward_is_refused(tmp_path):
    def work() -> str:
        with pytest.raises(TypeError) as caught:
            compensate(zero(network(), overlap_with_ddp=True))
        return str(caught.value)

    (message,) = on_ranks(work, tmp_path, ranks=1)
    assert "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps inside DDP's backward" in message


def test_steps_in_parts_are_refused(tmp_path):
    def work() -> list[str]:
        said = []
        for change in (offload_states, release_gradients):
            with pytest.raises(TypeError) as caught:
                change(zero(network()))
            said.append(str(caught.value))
        return said

    (said,) = on_ranks(work, tmp_path, ranks=1)
    assert "all at once, which a step in buckets can't follow" in said[0]
    assert "all at once, which a step within backward can't follow" in said[1]
