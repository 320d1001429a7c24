# pyright: reportArgumentType=false
"""Predictions with offloads and released gradients, against runs on an accelerator that counts bytes."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import ActivationCheckpointing, PureBF16Precision, predict_memory
from lightning_memkit.activations import offload_visits
from lightning_memkit.activations.offload import offload_activations
from lightning_memkit.optim import state_home
from lightning_memkit.optim.offload import offload_states
from lightning_memkit.plugins.callbacks.activation_offload import ActivationOffload
from lightning_memkit.plugins.callbacks.gradient_release import GradientRelease
from lightning_memkit.plugins.callbacks.optimizer_offload import OptimizerOffload
from lightning_memkit.prediction.contained import contained
from tests.plugins.fake_accelerator import on_fake_device
from tests.plugins.noise import NOISE
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = [
    *NOISE,
    pytest.mark.filterwarnings("ignore::lightning_memkit.NoEffectWarning"),
    pytest.mark.filterwarnings("ignore:The host has no room for more activations"),
]

GPU, WIDTH, LENGTH, DEPTH = "rtx4090", 64, 32, 6
BUCKET, SMALL = 200_000, 4096
# The counts of steps, 4 bytes a parameter: on the host of a run, and not told apart in a prediction.
SCALARS = 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Deep(LightningModule):
    """Blocks whose operators are the same on CUDA and on the device "fake"."""

    def __init__(self, optimizer=torch.optim.AdamW, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, 8)
        self.optimizer_class, self.options = optimizer, {"foreach": False, **options}

    def training_step(self, batch, batch_idx):
        return self.head(self.blocks(batch[0])).square().mean()

    def configure_optimizers(self):
        return self.optimizer_class(self.parameters(), lr=1e-3, **self.options)


def batch(rows):
    return [torch.randn(rows, LENGTH, WIDTH)]


def measured(module, rows, **options):
    """The most bytes on the device and of pinned host memory in three steps; of a fork, since more forks follow."""
    return contained(lambda: _measured(module, rows, options))


def _measured(module, rows, options):
    with fake_device() as device:
        # On its way to a custom device, unlike one to CUDA, a module gets other parameters, and what
        # PureBF16Precision knows of them is lost.
        module.to(device.torch_device)
        trainer = Trainer(
            **on_fake_device(),
            **options,
            max_steps=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = TensorDataset(torch.cat(batch(rows) * 6))
        trainer.fit(module, DataLoader(data, batch_size=rows))
        return device.peak_bytes, device.pinned_peak_bytes


CLIP, TWO = {"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}


def bf16(*arguments):
    return lambda: {"plugins": [PureBF16Precision(*arguments)]}


def among(*callbacks, **options):
    """Trainer arguments with new callbacks."""
    return lambda: {**options, "callbacks": [make() for make in callbacks]}


def states():
    return OptimizerOffload(BUCKET)


def activations():
    return ActivationOffload(SMALL)


CASES = {
    "plain": dict,
    "plain, two parts": lambda: dict(TWO),
    "plain, split exact": bf16("split", "exact"),
    "release": among(GradientRelease),
    "release each at once": among(lambda: GradientRelease(bundle_bytes=0)),
    "release, clipped": among(GradientRelease, **CLIP),
    "release, checkpointing": among(GradientRelease, ActivationCheckpointing),
    "release, split exact": lambda: {**bf16("split", "exact")(), "callbacks": [GradientRelease()]},
    "states": among(states),
    "states in one bucket": among(OptimizerOffload),
    "states, two parts, clipped": among(states, **CLIP, **TWO),
    "states, checkpointing": among(states, ActivationCheckpointing),
    "states, release": among(states, lambda: GradientRelease(bundle_bytes=0)),
    "states, split exact": lambda: {**bf16("split", "exact")(), "callbacks": [states()]},
    "activations": among(activations),
    "activations, two parts": among(activations, **TWO),
    "activations, little host": among(lambda: ActivationOffload(SMALL, host_bytes=600_000)),
    "activations, checkpointing": among(activations, ActivationCheckpointing),
    "activations, split exact": lambda: {**bf16("split", "exact")(), "callbacks": [activations()]},
    "all": among(activations, states, GradientRelease, ActivationCheckpointing),
}


def _runs():
    """With the peak in the optimizer's step (few rows) and in the backward; one of the two is slow."""
    for case in CASES:
        quick = 16 if case.startswith("activations") else 1
        for rows in (1, 16):
            yield pytest.param(case, rows, marks=() if rows == quick else pytest.mark.slow)


@pytest.mark.sampled(6)
@NEEDS_COMPILER
@pytest.mark.parametrize(("case", "rows"), list(_runs()))
@pytest.mark.long
def test_the_peak_is_that_of_a_run(case, rows):
    predicted = predict_memory(Deep(), batch(rows), trainer=CASES[case](), device=GPU)
    peak, pinned = measured(Deep(), rows, **CASES[case]())
    assert predicted.peak_bytes == pytest.approx(peak, abs=SCALARS)
    assert predicted.host_bytes == pinned
    assert (pinned > 0) == ("states" in case or "activations" in case or case == "all")


@pytest.mark.sampled(3)
@NEEDS_COMPILER
@pytest.mark.parametrize("compensation", ["kahan", "split", "split24", "stochastic"])
@pytest.mark.parametrize("callbacks", [[], [states]], ids=["plain", "states"])
@pytest.mark.long
def test_steps_on_shadows_take_what_an_accelerators_take(compensation, callbacks):
    """No kernel is fused for NAdam; those of AdamW are CUDA's own."""

    def options():
        return {**bf16(compensation)(), **among(*callbacks)()}

    predicted = predict_memory(Deep(torch.optim.NAdam), batch(1), trainer=options(), device=GPU)
    peak, pinned = measured(Deep(torch.optim.NAdam), 1, **options())
    assert predicted.anatomy.peak_phase == "optimizer"
    assert predicted.peak_bytes == pytest.approx(peak, abs=SCALARS)
    assert predicted.host_bytes == pinned


def test_what_is_offloaded_is_told():
    predicted = predict_memory(Deep(), batch(16), trainer=among(activations, states)(), device=GPU)
    assert "Host: " in str(predicted)
    assert predicted.anatomy.at_peak["optimizer_states"] < SCALARS  # only the counts
    saved = predict_memory(Deep(), batch(16), device=GPU).anatomy.at_peak["saved_activations"]
    assert 0 < predicted.anatomy.at_peak["saved_activations"] < 0.6 * saved
    assert predicted.total_bytes - predicted.anatomy.fixed_bytes == predicted.reserved_bytes


@pytest.mark.long
def test_offloads_are_chosen_by_time_nowhere():
    trainer = among(lambda: ActivationOffload(SMALL, choose="auto"), accumulate_grad_batches=4)()
    predicted = predict_memory(Deep(), batch(16), trainer=trainer, device=GPU)
    all_offloaded = predict_memory(Deep(), batch(16), trainer={**trainer, **among(activations)()}, device=GPU)
    assert predicted.peak_bytes == all_offloaded.peak_bytes
    assert any("offloaded" in what for what in predicted.assumed)
    assert not all_offloaded.assumed


def test_on_the_cpu_nothing_is_saved():
    plain = predict_memory(Deep(), batch(4))
    predicted = predict_memory(Deep(), batch(4), trainer=among(activations, states)())
    assert predicted.peak_bytes == plain.peak_bytes
    assert predicted.host_bytes == 0
    assert "Host: " not in str(predicted)


def test_ranks_keep_their_states_on_their_hosts():
    many = {"devices": 4, "strategy": "ddp"}
    plain = predict_memory(Deep(), batch(1), trainer=many, device=GPU)
    predicted = predict_memory(Deep(), batch(1), trainer={**many, **among(states)()}, device=GPU)
    moments = 8 * sum(parameter.numel() for parameter in Deep().parameters())
    assert predicted.host_bytes == moments
    assert plain.peak_bytes - predicted.peak_bytes > 0.9 * moments


def test_a_step_that_is_a_function_is_predicted_with_offloads():
    module = Deep()
    optimizer = module.configure_optimizers()
    offload_states(optimizer, bucket_bytes=BUCKET)
    offload_activations(module, min_bytes=SMALL)

    def step(given):
        module.training_step(given, 0).backward()
        optimizer.step()
        optimizer.zero_grad()

    predicted = predict_memory(step, batch(16), device=GPU)
    by_trainer = predict_memory(Deep(), batch(16), trainer=among(activations, states)(), device=GPU)
    assert predicted.host_bytes == by_trainer.host_bytes
    assert predicted.peak_bytes == pytest.approx(by_trainer.peak_bytes, rel=0.15)  # gradients go earlier here


def test_afterwards_the_host_is_the_host_again(monkeypatch):
    """Where there are no forks, a prediction changes names of this process for a while."""
    monkeypatch.delattr("os.fork", raising=False)
    before = state_home._HOST_MEMORY, offload_visits._MOVABLE, offload_visits.Lane, state_home.is_at_home
    predicted = predict_memory(Deep(), batch(1), trainer=among(activations, states)(), device=GPU)
    assert predicted.host_bytes > 0
    assert before == (
        state_home._HOST_MEMORY,
        offload_visits._MOVABLE,
        offload_visits.Lane,
        state_home.is_at_home,
    )
