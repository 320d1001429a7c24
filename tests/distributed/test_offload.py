"""Activation offload on two ranks: the gradients of the same ranks without it, and no gathered parameter moves."""

import pytest
import torch

from lightning_memkit import ActivationOffload, FSDP2Strategy, PureBF16Precision, predict_memory
from lightning_memkit.checkpoints.sharded import gather
from tests.activations.offload_models import ids
from tests.distributed.launch import two_ranks
from tests.distributed.two_ranks_offload import COMPENSATIONS, Module
from tests.testing.needs import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("offload")


@pytest.fixture(scope="module")
def found(folder):
    return two_ranks("two_ranks_offload", folder)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2 nested"])
@pytest.mark.long
def test_gradients_are_bitwise_the_same_and_just_the_activations_move(found, kind, checkpointed):
    for rank in ("rank 0", "rank 1"):
        here, alone = found[rank][f"{kind} {checkpointed}"], found[rank][f"alone {checkpointed}"]
        assert here["same"]
        assert here["again"]
        assert here["moved"] == alone["moved"] > 0


@pytest.mark.parametrize("checkpointed", [False, True])
def test_parameters_gathered_in_half_precision_do_not_move(found, checkpointed):
    for rank in ("rank 0", "rank 1"):
        here, alone = found[rank][f"fsdp2 mixed {checkpointed}"], found[rank][f"alone {checkpointed}"]
        assert here["same"]
        assert 0 < here["moved"] < alone["moved"]


@pytest.mark.parametrize("strategy", ["FSDP2Strategy", "FSDP2Strategy on the host", "ZeRO1Strategy"])
def test_trainers_offload_beside_the_strategies_of_memkit(found, strategy):
    """Bitwise the weights without, and up to rounding those of one process; the device holds less in a step."""
    alone = found["one process"]
    for rank in ("rank 0", "rank 1"):
        without, beside = found[rank][strategy, False], found[rank][strategy, True]
        assert beside["weights"].keys() == alone.keys()
        for name, weight in alone.items():
            assert torch.equal(beside["weights"][name], without["weights"][name]), name
            assert float((beside["weights"][name] - weight).abs().max()) <= 2e-5, name
        assert beside["hazards"] == without["hazards"]  # torch's own copies of gradients
        assert beside["to host"] - without["to host"] > 10 * 2**10 * 64
        assert beside["peak"] < 0.7 * without["peak"]


def test_weights_gradients_and_states_are_on_the_host_too(found):
    for rank in ("rank 0", "rank 1"):
        on_the_host, on_the_device = (
            found[rank]["FSDP2Strategy on the host", True],
            found[rank]["FSDP2Strategy", True],
        )
        assert on_the_host["between"] < 0.05 * on_the_device["between"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("on_the_host", [False, True])
@pytest.mark.long
def test_a_rank_takes_what_was_predicted(found, on_the_host, offloads):
    callbacks = [ActivationOffload(min_bytes=4096)] if offloads else []
    strategy = FSDP2Strategy(cpu_offload=on_the_host)
    trainer = {"strategy": strategy, "devices": 2, "callbacks": callbacks}
    predicted = predict_memory(Module(), ids(), trainer=trainer, device="rtx4090")
    here = found["rank 0"]["FSDP2Strategy on the host" if on_the_host else "FSDP2Strategy", offloads]
    assert predicted.peak_bytes == pytest.approx(here["between"] + here["peak"], abs=1024)  # counts of steps
    assert (predicted.host_bytes > 0) == (on_the_host or offloads)


@pytest.mark.parametrize("mode", COMPENSATIONS, ids=" ".join)
@pytest.mark.long
def test_shards_on_the_host_are_compensated_and_saved_there(found, mode):
    plugins = {"plugins": [PureBF16Precision(*mode)]}
    trainer = {"strategy": FSDP2Strategy(cpu_offload=True), "devices": 2, **plugins}
    predicted = predict_memory(Module(), ids(), trainer=trainer, device="rtx4090")
    here = found["rank 0"][mode[0]]
    assert here["save"] == 0
    assert predicted.peak_bytes == pytest.approx(here["between"] + here["peak"], abs=1024)
    # The host takes what a rank takes that has no other device, less the batch.
    alone = predict_memory(Module(), ids(), trainer={**trainer, "strategy": FSDP2Strategy()})
    assert predicted.offloaded_bytes == pytest.approx(alone.phases["optimizer"] - ids().nbytes, abs=1024)


@pytest.mark.long
def test_what_a_forward_makes_from_nothing_is_on_the_device():
    """A forward within the closure of a step; its first operator has no tensor to tell where it is."""

    class Positions(Module):
        def training_step(self, batch, batch_idx):
            table = torch.arange(1 << 20, dtype=torch.float32)
            return super().training_step(batch, batch_idx) + 0 * (table * 2).cos()[0]

    trainer = {"strategy": FSDP2Strategy(cpu_offload=True), "devices": 2}
    with_table, without = (
        predict_memory(module, ids(), trainer=trainer, device="rtx4090") for module in (Positions(), Module())
    )
    assert with_table.host_bytes == without.host_bytes
    assert with_table.phases["forward"] > without.phases["forward"] + (8 << 20)


@pytest.mark.parametrize("strategy", ["FSDP2Strategy", "FSDP2Strategy on the host"])
def test_threads_write_copies_of_what_devices_held(found, folder, strategy):
    saved = gather(folder / f"{strategy} True")["state_dict"]
    weights = found["rank 0"][strategy, True]["weights"]
    assert saved.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(saved[name], weight), name
