"""Predicted peaks of many ranks against those of real ones, which gloo connects."""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

from benchmarks._measured_prediction_ranks import TRAINING, Measured, measured, peak_bytes
from benchmarks._prediction_ranks import Case, Trained, batch, build, predict
from lightning_memkit import FSDP2Strategy, predict_memory
from lightning_memkit.distributed.sharding import Sharding
from lightning_memkit.prediction.caching_allocator import CachingAllocator
from lightning_memkit.prediction.contained import contained
from lightning_memkit.utilities.errors import PredictionError

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")

TOLERANCE = 0.03
FAST = [
    Case(strategy="ddp views", extra="accumulated"),
    Case(strategy="zero1", model="mlp", precision="kahan"),
    Case(strategy="stage 2", extra="clipped"),
    Case(strategy="stage 3", precision="kahan", optimizer="loop"),
    Case(strategy="in configure_model", precision="kahan", policy="full"),
]
MORE = [
    Case(strategy="ddp", extra="mixed"),
    Case(strategy="ddp views", policy="full", optimizer="loop"),
    Case(strategy="zero1"),
    Case(strategy="stage 3", policy="full"),
    Case(strategy="stage 3", precision="kahan", extra="accumulated"),
]


@cache
def measured_at_once(cases: tuple[Case, ...]) -> dict[Case, Measured]:
    """All come from one launch, which takes longer than they do."""
    return dict(zip(cases, measured(list(cases)), strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", FAST, ids=str)
@pytest.mark.long
def test_two_ranks_take_what_was_predicted(case):
    assert predict(case) == pytest.approx(measured_at_once(tuple(FAST))[case].most, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_kinds_of_two_ranks_take_what_was_predicted(case):
    assert predict(case) == pytest.approx(measured_at_once(tuple(MORE))[case].most, rel=TOLERANCE)


def test_what_another_thread_frees_is_told_as_unheard():
    kind = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind], profile_memory=True) as trace:
        with torch.profiler.record_function(TRAINING):
            pass
        held = [torch.empty(3000, dtype=torch.uint8), torch.empty(5000, dtype=torch.uint8)]
        thread = threading.Thread(target=held.pop)  # the last to hold the larger one
        thread.start()
        thread.join()
        held.clear()
    assert peak_bytes(trace) == (8000, 5000)


SWEPT = [
    Case(ranks=4, model=model, strategy=strategy, precision=precision, policy=policy, optimizer=optimizer)
    for model in ("transformer", "mlp")
    for strategy in ("ddp", "ddp unused", "zero1", "stage 2", "stage 3", "in configure_model")
    for precision in ("float32", "kahan")
    for policy, optimizer in (("none", "foreach"), ("full", "loop"))
] + [
    Case(ranks=4, strategy=strategy, extra=extra)
    for strategy in ("ddp", "ddp views", "zero1", "stage 2", "stage 3", "in configure_model")
    for extra in ("mixed", "clipped", "accumulated")
]


@pytest.fixture(scope="module")
def four_ranks() -> dict[Case, Measured]:
    return dict(zip(SWEPT, measured(SWEPT, timeout_s=1800), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", SWEPT, ids=str)
def test_four_ranks_take_what_was_predicted(case, four_ranks):
    assert predict(case) == pytest.approx(four_ranks[case].most, rel=TOLERANCE)


def predicted(strategy: Any = "ddp", devices: Any = 2, **others: Any) -> Any:
    trainer = {"strategy": strategy, "devices": devices, **others}
    return predict_memory(Trained(Case(strategy="any")), batch(), trainer=trainer)


@pytest.mark.long
def test_ranks_are_told():
    found = predicted(devices="4", num_nodes=2)
    assert found.ranks == 8
    assert "per rank, of 8, in the" in str(found)
    assert sum(found.anatomy.at_peak.values()) == found.peak_bytes
    alone = predict_memory(Trained(Case(strategy="any")), batch())
    assert alone.ranks == 1
    assert "per rank" not in str(alone)
    assert predicted("auto", [0, 1]).anatomy == predicted(devices="0,1").anatomy  # as Lightning has it
    assert predicted("memkit_fsdp2", 1).anatomy.largest["weights"] == alone.anatomy.largest["weights"]


@pytest.mark.long
def test_the_anatomy_is_what_is_known_by_hand():
    alone = predict_memory(Trained(Case(strategy="any")), batch()).anatomy.largest
    weights = alone["weights"]
    ddp, views = predicted(), predicted(DDPStrategy(gradient_as_bucket_view=True))
    assert {ddp.anatomy.at_peak[name] for name in ("weights", "gradients", "communication")} == {weights}
    assert views.anatomy.at_peak["gradients"] == weights
    assert views.anatomy.at_peak["communication"] == 0  # the buckets are the gradients
    zero = predict_memory(build(Case(strategy="zero1")), batch(), trainer={"strategy": "ddp", "devices": 4})
    assert zero.anatomy.largest["optimizer_states"] == pytest.approx(alone["optimizer_states"] / 4, rel=0.15)
    three, two = (predicted(Sharding(stage=stage), 8).anatomy.largest for stage in (3, 2))
    assert three["weights"] == pytest.approx(weights / 8, rel=0.03)
    assert three["optimizer_states"] == pytest.approx(2 * three["weights"], rel=0.01)
    assert two["communication"] > three["communication"]


@pytest.mark.long
def test_strategies_by_name_are_predicted_as_what_they_stand_for():
    """ZeRO-1 by the module's own hand, and FSDP2 at its default stage."""
    for own, name, theirs in (("zero1", "memkit_zero1", "ddp"), ("stage 3", "memkit_fsdp2", FSDP2Strategy())):
        one = predict_memory(build(Case(strategy=own)), batch(), trainer={"strategy": theirs, "devices": 4})
        plain = build(Case(strategy="ddp"))
        other = predict_memory(plain, batch(), trainer={"strategy": name, "devices": 4})
        assert one.peak_bytes == other.peak_bytes


@pytest.mark.long
def test_a_model_that_one_rank_can_t_hold_is_sharded_without_memory():
    found = predict_memory(
        lambda: Wide(Case(strategy="any")),
        batch(),
        trainer={"strategy": "memkit_fsdp2", "devices": 8, "num_nodes": 8},
    )
    assert found.ranks == 64
    assert found.anatomy.at_peak["weights"] == pytest.approx(8 * 8192 * 8192 * 4 / 64, rel=0.03)


class Wide(Trained):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(96, 8192), torch.nn.Linear(8192, 8192), torch.nn.Linear(8192, 96)
            )
            for _ in range(8)
        )


@pytest.mark.long
def test_without_a_fork_nothing_is_left(monkeypatch):
    expected = predicted("memkit_fsdp2")
    monkeypatch.delattr("os.fork")
    assert predicted("memkit_fsdp2").anatomy == expected.anatomy
    assert not torch.distributed.is_initialized()
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_rank_of_a_group_predicts_elsewhere(tmp_path):
    def inside() -> str:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        with pytest.raises(PredictionError) as caught:
            predicted()
        return str(caught.value)

    assert "is a rank of a process group already: predict" in contained(inside)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "deepspeed": (lambda: predicted("deepspeed_stage_2"), "'deepspeed_stage_2' can't be predicted.*write \"ddp"),
    "fsdp1": (lambda: predicted("fsdp"), "strategy='fsdp' can't be predicted"),
    "an object": (lambda: predicted(FSDPStrategy()), "strategy=FSDPStrategy can't be predicted"),
    "unknown": (lambda: predicted("ddpp"), "strategy='ddpp' can't be predicted"),
    "how many": (lambda: predicted(devices="auto"), "devices='auto' doesn't say how many ranks.*devices=8"),
    "all": (lambda: predicted(devices=-1), "devices=-1 doesn't say how many"),
    "none": (lambda: predicted(devices=0), "devices=0 is no number of at least 1"),
    "nodes": (lambda: predicted(num_nodes=0), "num_nodes=0 is no number"),
    "one device": (lambda: predicted("memkit"), "strategy='memkit' trains on one device, and devices=2 on 1"),
    "tensor parallel": (lambda: predicted(ModelParallelStrategy()), "tensor parallelism.*data_parallel_size=2"),
    "mesh": (lambda: predicted(ModelParallelStrategy(4, 1)), "on 2 ranks.*write data_parallel_size=2"),
    "hook": (lambda: predicted(DDPStrategy(ddp_comm_hook=print)), "with ddp_comm_hook"),
    "no Trainer": (lambda: predict_memory(lambda given: None, batch(), trainer={"devices": 2}), "has no Trainer"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_can_t_be_predicted_is_refused_at_the_call(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_stages_are_two_or_three():
    with pytest.raises(ValueError, match="stage=1: FSDP2 shards at stage 3, or 2"):
        Sharding(stage=1)
    with pytest.raises(ValueError, match="is one pattern"):
        Sharding(blocks="blocks.*")


def test_options_stay_as_they_are():
    strategy = DDPStrategy(
        accelerator=CPUAccelerator(),
        cluster_environment=LightningEnvironment(),
        start_method="spawn",
        static_graph=True,
    )
    given = {"strategy": strategy, "devices": 2, "plugins": LightningEnvironment()}
    before, within = dict(given), dict(vars(strategy))
    assert predict_memory(Trained(FAST[0]), batch(), trainer=given).ranks == 2
    assert given == before
    assert vars(strategy) == within


def test_what_fsdp2_gathers_is_reserved_for_its_own_streams():
    found = predict_memory(
        Trained(Case(strategy="any")),
        batch(),
        trainer={"strategy": "memkit_fsdp2", "devices": 2},
        device="h100-80gb",
    )
    assert found.device == "h100-80gb"
    assert found.reserved_bytes > found.peak_bytes
    allocator = CachingAllocator()
    block = allocator.allocate(4 << 20, stream=1)
    allocator.free(block)
    allocator.allocate(4 << 20)
    assert allocator.reserved_bytes == 2 * (20 << 20)
    allocator.allocate(4 << 20, stream=1)
    assert allocator.reserved_bytes == 2 * (20 << 20)
