from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_memkit.distributed.ddp import why_no_late_reduction
from tests.distributed.launch import two_ranks
from tests.distributed.two_ranks_ddp import DTYPES, OPTIONS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two_ranks("two_ranks_ddp", tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("late", ["late", "late in small buckets"])
def test_late_reduction_is_ddp_bitwise(found: dict[str, Any], option: str, dtype: str, late: str) -> None:
    case = found[f"{option}-{dtype}"]
    expected, reduced = case["ddp"], case[late]["gradients"]
    assert {name for name, grad in reduced.items() if grad is None} == {"idle.weight", "idle.bias"}
    for name, gradient in expected.items():
        if gradient is None or name.startswith(
            "idle"
        ):  # a static graph's DDP makes zeros of what nobody uses
            continue
        assert torch.equal(reduced[name], gradient), name


@pytest.mark.parametrize("option", OPTIONS)
def test_parts_issue_no_collective_and_reducing_allocates_nothing(found: dict[str, Any], option: str) -> None:
    case = found[f"{option}-float32"]["late"]
    assert case["collectives"] == 0
    assert case["allocations"] == 0
    assert case["failed"] == ()


def test_float32_gradients_of_bfloat16_weights_stay_float32(found: dict[str, Any]) -> None:
    mean, reduced = found["float32"]["mean"], found["float32"]["found"]
    assert reduced.keys() == mean.keys()
    assert len(mean) == 6
    for name, gradient in reduced.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, mean[name]), name


def test_gradients_are_divided_before_they_are_added(found: dict[str, Any]) -> None:
    assert float(found["overflow"]) == float(torch.tensor(3e38))


def test_channels_last_gradients_are_averaged_in_their_own_order(found: dict[str, Any]) -> None:
    for gradient in found["strided"].values():
        assert torch.equal(gradient, torch.arange(108.0).view(4, 3, 3, 3) * 2)


def test_a_failure_is_known_to_all_and_changes_no_gradient(found: dict[str, Any]) -> None:
    failures = found["failures"]
    assert failures["failed"] == (1,)
    assert failures["at_zeros"] == (0,)
    assert len(failures["untouched"]) == 6
    assert all(failures["untouched"])


def test_buffers_are_rank_0s_where_ddp_would_broadcast_them(found: dict[str, Any]) -> None:
    assert found["buffers"] == {"True": [1, 1], "False": [1, 2]}


def test_ranks_agree_on_numbers(found: dict[str, Any]) -> None:
    assert found["numbers"] == [[1, 2.5], [0, 2.5], [1, 5]]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("store") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_why_gradients_can_not_be_reduced_late() -> None:
    plain = DistributedDataParallel(nn.Linear(2, 2))
    assert why_no_late_reduction(plain) == ""
    plain.register_comm_hook(None, allreduce_hook)
    assert "communication hook" in why_no_late_reduction(plain)
    built_in = DistributedDataParallel(nn.Linear(2, 2))
    built_in._register_builtin_comm_hook(distributed.BuiltinCommHookType.FP16_COMPRESS)
    assert "communication hook" in why_no_late_reduction(built_in)
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    assert "0 has sparse gradients" in why_no_late_reduction(sparse)
    synced: Any = SimpleNamespace(module=nn.Sequential(nn.SyncBatchNorm(2)))  # DDP refuses it on a CPU
    assert "0 (SyncBatchNorm)" in why_no_late_reduction(synced)
