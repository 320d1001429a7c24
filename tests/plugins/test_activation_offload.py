# pyright: reportOptionalCall=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
"""Activation offload inside Lightning's Trainer, on an accelerator without hardware."""

import gc

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_memkit import ActivationCheckpointing, MemoryBudget, NoEffectWarning
from lightning_memkit.plugins.callbacks.activation_offload import ActivationOffload
from tests.activations.offload_models import DEPTH, WIDTH, Deep, ids
from tests.plugins.fake_accelerator import on_fake_device
from tests.plugins.noise import NOISE
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = [*NOISE, NEEDS_COMPILER]

ROWS, LENGTH, STEPS = 8, 32, 5
INPUT = ROWS * LENGTH * WIDTH * 4
SMALL = 4096


class Model(LightningModule):
    def __init__(self, late=False, fail_at=None, checkpoint_at_call=False):
        super().__init__()
        self.fail_at = fail_at
        self.network = None if late else Deep(dropout=0.0)
        if late:
            self.configure_model = self._build_late

    def _build_late(self):
        if self.network is None:
            torch.manual_seed(0)
            self.network = Deep(dropout=0.0)

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fail_at:
            raise RuntimeError("a step that fails")
        return self.network(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watch(Callback):
    """Peak and host bytes of the steps after the first."""

    def __init__(self, device):
        self.device = device

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before = self.device.live_bytes
        self.device.reset_peak()

    def on_train_batch_end(self, *_):
        self.peak = self.device.peak_bytes - self.before
        self.host = self.device.pinned_bytes


def fit(device, tmp_path, *callbacks, model=Model, **options):
    torch.manual_seed(0)
    module, watch = model(), Watch(device)
    trainer = Trainer(
        **{**on_fake_device(), **options},
        max_steps=STEPS,
        callbacks=[*callbacks, watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(ids(ROWS * STEPS, LENGTH), batch_size=ROWS))
    return {name: value.cpu() for name, value in module.state_dict().items()}, watch


@pytest.fixture
def device():
    with fake_device() as device:
        yield device
        gc.collect()
        device.synchronize()
        assert device.hazards == 0


def assert_same(ours, plain):
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("late", [False, True], ids=["built in __init__", "built in configure_model"])
def test_training_is_bitwise_the_same_with_a_lower_peak_and_undone(device, tmp_path, late):
    plain, without = fit(device, tmp_path)
    models = []

    def model():
        models.append(Model(late))
        return models[0]

    ours, watch = fit(device, tmp_path, ActivationOffload(SMALL), model=model)
    assert_same(ours, plain)
    assert without.peak - watch.peak >= (DEPTH - 3) * 10 * INPUT
    assert watch.host >= (DEPTH - 1) * 10 * INPUT
    assert device.pinned_bytes == 0
    assert all("_compiled_call_impl" not in vars(module) for module in models[0].modules())


@pytest.mark.parametrize("offload_first", [False, True])
def test_beside_checkpointing_the_blocks_inputs_are_offloaded(device, tmp_path, offload_first):
    plain, _ = fit(device, tmp_path)
    callbacks = [ActivationCheckpointing(), ActivationOffload(SMALL)]
    ours, watch = fit(device, tmp_path, *(callbacks[::-1] if offload_first else callbacks))
    assert_same(ours, plain)
    assert watch.host == DEPTH * INPUT


def test_in_parts_of_a_memory_budget(device, tmp_path):
    def budget():
        return MemoryBudget("1GiB", micro_batch_size=2, weigh_by="samples")

    plain, without = fit(device, tmp_path, budget())
    ours, watch = fit(device, tmp_path, budget(), ActivationOffload(SMALL))
    assert_same(ours, plain)
    assert watch.peak < without.peak
    assert (
        (DEPTH - 1) * 10 * INPUT / 4 <= watch.host <= DEPTH * 10 * INPUT * 3 / 4
    )  # the probe's part is larger


def test_auto_says_what_it_chose(device, tmp_path, capsys, monkeypatch):
    from lightning_memkit.activations import offload
    from lightning_memkit.activations.offload_choice import CopyRates

    said = []
    monkeypatch.setattr("lightning_memkit.plugins.seams.bars.rank_zero_info", said.append)
    monkeypatch.setattr(offload, "measure_copy_rates", lambda *_: CopyRates(to_host=1.0, to_device=1.0))
    plain, _ = fit(device, tmp_path)
    ours, _ = fit(device, tmp_path, ActivationOffload(SMALL, choose="auto"))
    assert_same(ours, plain)
    assert len(said) == 1
    assert "1 of 6 blocks are offloaded, 5 checkpointed" in said[0]


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (Model, {"min_bytes": "1GiB"}, "has min_bytes='1GiB'; write a smaller min_bytes"),
        (lambda: _without_calls(), {"min_bytes": SMALL}, "no block was called by itself"),
    ],
)
def test_nothing_moved_is_said_once(device, tmp_path, model, options, why):
    with pytest.warns(NoEffectWarning, match=why) as caught:
        fit(device, tmp_path, ActivationOffload(**options), model=model)
    assert len([w for w in caught if w.category is NoEffectWarning]) == 1


def _without_calls():
    """As a model compiled as a whole: no block's `__call__` runs."""
    model = Model()

    def forward(batch):
        x = model.network.embedding(batch)
        for block in model.network.blocks:
            x = block.forward(x)
        return model.network.head(x)

    model.network.forward = forward
    return model


def test_on_the_cpu_it_says_that_nothing_is_saved(tmp_path, device):
    with pytest.warns(NoEffectWarning, match="does nothing on cpu.*use ActivationCheckpointing"):
        fit(device, tmp_path, ActivationOffload(), accelerator="cpu", strategy="auto")


def test_an_error_undoes_the_patch_and_one_callback_serves_two_fits(device, tmp_path):
    callback, models = ActivationOffload(SMALL), []

    def failing():
        models.append(Model(fail_at=2))
        return models[0]

    with pytest.raises(RuntimeError, match="a step that fails"):
        fit(device, tmp_path, callback, model=failing)
    assert all("_compiled_call_impl" not in vars(module) for module in models[0].modules())
    assert device.pinned_bytes == 0
    plain, _ = fit(device, tmp_path)
    ours, watch = fit(device, tmp_path, callback)
    assert_same(ours, plain)
    assert watch.host > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_bytes": "much"}, "'much' is not a size"),
        ({"choose": "best"}, 'write "offload"'),
        ({"blocks": "Block"}, r"write blocks=\['Block'\]"),
    ],
)
def test_bad_options_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        ActivationOffload(**options)


def test_repr_round_trips():
    callback = ActivationOffload("2MiB", "4GiB", ["A*"], False, "auto")
    assert vars(eval(repr(callback))) == vars(callback)
