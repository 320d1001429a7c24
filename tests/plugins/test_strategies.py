# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportCallIssue=false
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.utils.data import DataLoader

from lightning_memkit import FSDP2Strategy, OnDeviceStrategy, PureBF16Precision
from lightning_memkit.plugins.callbacks.random_state import KEY, RandomState
from lightning_memkit.plugins.strategies.on_device import parameter_dtype
from tests.initialization.test_building import Float32Bytes
from tests.plugins.noise import NOISE

pytestmark = NOISE


class Late(LightningModule):
    """Built in `configure_model`; notes what the build staged in float32."""

    def __init__(self):
        super().__init__()
        self.network = None

    def configure_model(self):
        if self.network is not None:
            return
        torch.manual_seed(0)
        self.counter = Float32Bytes()
        with self.counter:
            self.network = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1))

    def on_fit_start(self):
        self.built = {(p.dtype, p.device.type) for p in self.network.parameters()}

    def training_step(self, batch, batch_idx):
        assert self.network is not None
        return self.network(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trainer(tmp_path, **options):
    return Trainer(
        **{"max_steps": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, **options},
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )


def rows():
    return DataLoader(torch.ones(8, 4), batch_size=2)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-true", "64-true", "plugin"])
@pytest.mark.filterwarnings("ignore:You passed .*but AMP with fp16")
def test_configure_model_builds_at_the_precisions_dtype(precision, tmp_path):
    model = Late()
    options = {"plugins": PureBF16Precision()} if precision == "plugin" else {"precision": precision}
    before = torch.get_default_dtype()
    trainer(tmp_path, strategy="memkit", **options).fit(model, rows())
    expected = torch.bfloat16 if precision == "plugin" else parameter_dtype(precision)
    assert model.built == {(expected, "cpu")}
    assert torch.get_default_dtype() == before
    if expected == torch.bfloat16:
        assert model.counter.peak <= 4 * 4 * 64


def test_the_stock_strategy_with_the_plugin_as_the_control_stages_no_more_either(tmp_path):
    model = Late()
    trainer(tmp_path, plugins=PureBF16Precision()).fit(model, rows())
    assert model.built == {(torch.bfloat16, "cpu")}


def test_init_module_builds_at_the_dtype(tmp_path):
    counter = Float32Bytes()
    with counter, trainer(tmp_path, strategy="memkit", precision="bf16-true").init_module():
        model = nn.Linear(64, 64)
    assert model.weight.dtype == torch.bfloat16
    assert counter.live == 0
    assert counter.peak == 4 * 64 * 64
    torch.manual_seed(0)
    with trainer(tmp_path, strategy="memkit").init_module(empty_init=True):
        nn.Linear(64, 64)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())  # no values were drawn


def test_the_registered_name_the_instance_and_the_class_path_are_one(tmp_path):
    for strategy in ("memkit", OnDeviceStrategy(), OnDeviceStrategy(device="cpu")):
        assert isinstance(trainer(tmp_path, strategy=strategy).strategy, OnDeviceStrategy)


def test_the_explicit_device_chooses_the_accelerator():
    assert Trainer(strategy=OnDeviceStrategy(device="cpu"), logger=False).strategy.root_device.type == "cpu"
    assert OnDeviceStrategy(device="cuda").root_device == torch.device("cuda", 0)
    assert OnDeviceStrategy(device="cuda:1").parallel_devices == [torch.device("cuda", 1)]


def test_several_devices_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match="the Trainer has 2; write devices=1"):
        trainer(tmp_path, strategy="memkit", devices=2)


def test_an_unreadable_device_is_refused():
    with pytest.raises(ValueError, match=r'device=\'gpu\' is not a device; write "auto"'):
        OnDeviceStrategy(device="gpu")


def test_random_state_is_in_every_checkpoint_and_resume_is_bitwise(tmp_path):
    def fit(folder, steps, ckpt_path=None):
        keep = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)
        run = trainer(
            tmp_path, strategy="memkit", max_steps=steps, enable_checkpointing=True, callbacks=[keep]
        )
        model = Late()
        run.fit(model, rows(), ckpt_path=ckpt_path)
        assert sum(isinstance(callback, RandomState) for callback in run.callbacks) == 1
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    whole = fit(tmp_path, 8)
    path = tmp_path / "epoch=0-step=4.ckpt"
    assert KEY in torch.load(path, weights_only=True)
    torch.rand(7)
    assert torch.equal(fit(tmp_path, 8, path), whole)


def test_a_given_random_state_callback_is_not_doubled(tmp_path):
    run = trainer(tmp_path, strategy="memkit", callbacks=[RandomState()])
    run.fit(Late(), rows())
    assert sum(isinstance(callback, RandomState) for callback in run.callbacks) == 1


def test_a_precision_that_memkit_does_not_know_is_left_alone(tmp_path):
    class Own(Precision):
        precision = "own"  # pyright: ignore[reportAssignmentType]

    model = Late()
    trainer(tmp_path, strategy=OnDeviceStrategy(), plugins=Own()).fit(model, rows())
    assert model.built == {(torch.float32, "cpu")}


@pytest.mark.long
def test_importing_the_public_name_registers_the_strategy():
    code = (
        "from lightning_memkit import OnDeviceStrategy; from lightning.pytorch import Trainer;"
        "print(type(Trainer(strategy='memkit', accelerator='cpu', logger=False).strategy).__name__)"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "OnDeviceStrategy", out.stderr


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("cuda", {}, "nccl"),
        ("cuda", {"cpu_offload": True}, "cpu:gloo,cuda:nccl"),
        ("cuda", {"cpu_offload": True, "process_group_backend": "nccl"}, "cpu:gloo,cuda:nccl"),
        ("cuda", {"cpu_offload": True, "process_group_backend": "gloo"}, "gloo"),
        ("cpu", {"cpu_offload": True}, "gloo"),
        ("cpu", {}, "gloo"),
    ],
)
def test_ranks_whose_shards_are_on_the_host_talk_there_too(monkeypatch, device, options, expected):
    """NCCL has no collectives of host memory, where norms of offloaded gradients are reduced."""
    monkeypatch.setattr(FSDP2Strategy, "root_device", torch.device(device))
    strategy = FSDP2Strategy(**options)
    made = []
    monkeypatch.setattr(
        "lightning.pytorch.strategies.model_parallel._init_dist_connection",
        lambda *given, **_: made.append(given[1]),
    )
    monkeypatch.setattr(strategy, "set_world_ranks", lambda: None)
    monkeypatch.setattr("lightning.pytorch.strategies.model_parallel.reset_seed", lambda: None)
    strategy.cluster_environment = object()
    strategy._accelerator = SimpleNamespace(setup_device=lambda device: None)
    strategy._setup_distributed()
    assert made == [expected]
