# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
"""8-bit optimizers in a fit: by name in YAML, embeddings in 32 bits at any precision, resume bit for bit."""

import copy
import logging
import subprocess
import sys
from itertools import product
from typing import Any

import bitsandbytes as bnb
import lightning.pytorch as pl
import pytest
import torch
import torchao.optim
import yaml
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_memkit import OnDeviceStrategy, PureBF16Precision
from lightning_memkit.cli import main
from lightning_memkit.optim.eight_bit import adapt_bitsandbytes, adapter_of
from lightning_memkit.plugins.cli._optimizer_names import classes_named_in
from lightning_memkit.utilities.errors import MissingPackageError
from tests.plugins.noise import NOISE

pytestmark = [
    *NOISE,
    pytest.mark.filterwarnings("ignore:.*jsonargparse"),
    pytest.mark.filterwarnings("ignore:.*configure_optimizers. is not overridden"),
    pytest.mark.filterwarnings("ignore:.*nothing is paged"),
]
BUILT: list[pl.LightningModule] = []


class Speaker(pl.LightningModule):
    """An embedding tied to the head, and a layer that is large enough for 8 bits."""

    def __init__(self, optimizer: str = "AdamW8bit") -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.mix = nn.Linear(32, 256)
        self.back = nn.Linear(256, 32)
        self.head = nn.Linear(32, 128, bias=False)
        self.head.weight = self.embedding.weight
        self.optimizer = optimizer
        BUILT.append(self)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.back(torch.tanh(self.mix(self.embedding(batch)))))
        return functional.cross_entropy(logits.float(), (3 * batch + 1) % 128)

    def configure_optimizers(self) -> Any:
        optimizer = getattr(bnb.optim, self.optimizer)(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        rows = torch.randint(0, 128, (48,), generator=torch.Generator().manual_seed(2))
        return DataLoader(rows, batch_size=16)


class WithoutOptimizer(Speaker):
    configure_optimizers = pl.LightningModule.configure_optimizers


def fit(module: pl.LightningModule, folder, *, ckpt_path=None, **options) -> pl.Trainer:
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            **options,
        }
    )
    trainer.fit(module, ckpt_path=ckpt_path, weights_only=True)
    return trainer


def dtypes(module: pl.LightningModule) -> dict[str, torch.dtype]:
    """Of the first state of each weight matrix."""
    states = module.trainer.optimizers[0].state
    return {
        name: states[parameter]["state1"].dtype
        for name, parameter in module.named_parameters()
        if parameter.dim() == 2
    }


def tensors(module: pl.LightningModule) -> list[Tensor]:
    found = [parameter.detach() for parameter in module.parameters()]
    for state in module.trainer.optimizers[0].state.values():
        found += [state[name] for name in sorted(state) if isinstance(state[name], Tensor)]
    return found


MODES = ("kahan", "split", "split24", "stochastic", "none")
OPTIMIZERS = ("AdamW8bit", "Lion8bit", "PagedAdamW8bit")


@pytest.mark.parametrize(("mode", "states"), list(product(MODES, ("compact", "exact"))))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_from_lightnings_checkpoint_is_bitwise(name, mode, states, tmp_path):
    torch.manual_seed(1)
    whole = Speaker(name)
    first = copy.deepcopy(whole)

    def precision() -> PureBF16Precision:
        return PureBF16Precision(mode, states)

    fit(whole, tmp_path, plugins=[precision()], max_epochs=2)
    fit(first, tmp_path, plugins=[precision()]).save_checkpoint(tmp_path / "first.ckpt")
    assert torch.load(tmp_path / "first.ckpt", weights_only=True)["optimizer_states"]
    resumed = Speaker(name)  # other initial weights, in float32
    fit(resumed, tmp_path, plugins=[precision()], max_epochs=2, ckpt_path=tmp_path / "first.ckpt")
    left, right = tensors(whole), tensors(resumed)
    assert [tensor.dtype for tensor in left] == [tensor.dtype for tensor in right]
    assert all(map(torch.equal, left, right))
    assert len(left) > 4 * 2


RUNS: dict[str, Any] = {
    "pure bf16": lambda: {"plugins": [PureBF16Precision()]},
    "pure bf16 under memkit": lambda: {"plugins": [PureBF16Precision()], "strategy": "memkit"},
    "memkit": lambda: {"strategy": OnDeviceStrategy()},
    "memkit, bf16-true": lambda: {"strategy": OnDeviceStrategy(), "precision": "bf16-true"},
    "memkit, bf16-mixed": lambda: {"strategy": OnDeviceStrategy(), "precision": "bf16-mixed"},
}


@pytest.mark.parametrize("run", RUNS)
def test_embeddings_keep_32_bits_at_any_precision_and_it_is_said_once(run, tmp_path, caplog):
    module = Speaker()
    with caplog.at_level(logging.INFO):
        fit(module, tmp_path, **RUNS[run]())
    expected = {"embedding.weight": torch.float32, "mix.weight": torch.uint8, "back.weight": torch.uint8}
    assert dtypes(module) == expected
    printed = [record.message for record in caplog.records if "bytes a parameter" in record.message]
    assert len(printed) == 1
    assert printed[0].startswith("AdamW8bit: ")
    assert printed[0].endswith(
        " for the other 21.1%; not quantized, since 8 bits are too few there: embedding.weight."
    )


def test_the_stock_trainer_leaves_everything_in_8_bits(tmp_path):
    module = Speaker()
    fit(module, tmp_path)
    assert set(dtypes(module).values()) == {torch.uint8}


def test_8_bytes_a_parameter_and_the_share_of_the_exceptions(tmp_path, caplog):
    found = []

    class Look(Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer) -> None:
            found.append(precision.compensations[0].bytes_per_parameter())

    precision = PureBF16Precision("split")
    with caplog.at_level(logging.INFO):
        fit(Speaker(), tmp_path, plugins=[precision], callbacks=[Look()])
    measured = found[-1]
    assert measured.quantized.weights == measured.quantized.gradients == measured.quantized.compensation == 2
    scales, tables = 2 * 4 / 256, 2 * 1024 / (2 * 32 * 256)
    assert measured.quantized.total == pytest.approx(8 + scales + tables)
    biases = 8 * 4 * (256 + 32) / measured.exceptions.parameters  # 32 bits are 16 there: states are compact
    assert measured.exceptions.total == pytest.approx(14 - biases / 8)
    exceptions = 128 * 32 + 256 + 32  # the embedding, which is the head too, and two biases
    assert measured.exceptions_share == exceptions / (exceptions + 2 * 32 * 256)
    assert str(measured) in caplog.text


def test_a_module_can_switch_it_off(tmp_path):
    class Small(Speaker):
        def configure_optimizers(self) -> Any:
            optimizer = bnb.optim.AdamW8bit(self.parameters())
            adapt_bitsandbytes(optimizer, keep_at_risk=False)
            return optimizer

    module = Small()
    fit(module, tmp_path, plugins=[PureBF16Precision()], strategy="memkit")
    assert set(dtypes(module).values()) == {torch.uint8}


def test_two_optimizers_are_adapted_each(tmp_path):
    class Two(Speaker):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            first.step()
            second.step()

        def configure_optimizers(self) -> Any:
            others = [p for name, p in self.named_parameters() if not name.startswith("embedding")]
            return bnb.optim.Lion8bit(others), torch.optim.SGD(self.embedding.parameters(), lr=0.1)

    module = Two()
    fit(module, tmp_path, plugins=[PureBF16Precision()])
    eight, plain = module.trainer.optimizers
    assert adapter_of(eight).kept == {}
    assert adapter_of(plain) is None


TRAINER = {
    "max_steps": 2,
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
IN_CONFIG: dict[str, Any] = {
    "a word": "AdamW8bit",
    "a class name": {"class_path": "AdamW8bit", "init_args": {"lr": 0.01, "betas": [0.9, 0.95]}},
    "a class path": {"class_path": "bitsandbytes.optim.AdamW8bit", "init_args": {"lr": 0.01}},
}


def write_config(folder, **config) -> str:
    path = folder / "given.yaml"
    model = {"class_path": f"{__name__}.WithoutOptimizer"}
    trainer = {**TRAINER, "default_root_dir": str(folder), **config.pop("trainer", {})}
    path.write_text(yaml.safe_dump({"seed_everything": 1, "model": model, "trainer": trainer, **config}))
    return str(path)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a config in a folder of its own; returns its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    BUILT.clear()
    return lambda **keys: write_config(tmp_path, **keys)


@pytest.mark.parametrize("optimizer", IN_CONFIG.values(), ids=IN_CONFIG)
@pytest.mark.parametrize("precision", ["32-true", "plugin"])
def test_one_word_in_yaml_names_an_8bit_optimizer(config, optimizer, precision):
    """Under the stock strategy; torchao's class of the same name is there, and is not meant."""
    assert torchao.optim.AdamW8bit
    trainer = {"plugins": ["PureBF16Precision"]} if precision == "plugin" else {"precision": precision}
    assert main(["fit", "--config", config(optimizer=optimizer, trainer=trainer)]) == 0
    (used,) = BUILT[-1].trainer.optimizers
    assert type(used) is bnb.optim.AdamW8bit
    assert dtypes(BUILT[-1])["mix.weight"] == torch.uint8
    assert dtypes(BUILT[-1])["embedding.weight"] == torch.float32


def test_a_name_on_the_command_line_goes_before_the_configs(config):
    given = config(optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}})
    assert main(["fit", "--config", given, "--optimizer", "PagedLion8bit", "--optimizer.lr=0.01"]) == 0
    (used,) = BUILT[-1].trainer.optimizers
    assert type(used) is bnb.optim.PagedLion8bit
    assert used.defaults["lr"] == 0.01


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--optimizer=AdamW8bit"], True),
        (["--optimizer", "PagedAdamW"], True),
        (["--optimizer.class_path", "bitsandbytes.optim.AdamW"], True),
        (["--model.optimizer", "Lion8bit"], True),
        (["--model.init_args.optimizer={class_path: AdEMAMix8bit}"], True),
        (["--optimizer=optimizer.yaml"], True),
        (["-c", "config.yaml"], True),
        (["--config=config.yaml", "--optimizer=AdamW"], True),
        ({"fit": {"optimizer": {"class_path": "SGD8bit"}}}, True),
        (["--optimizer=AdamW"], False),
        (["--optimizer=torchao.optim.AdamW8bit"], False),
        (["--model.name=AdamW8bit", "AdamW8bit"], False),
        (["--config=absent.yaml", "--optimizer"], False),
        (["--config=broken.yaml", "--optimizer={"], False),
        ({"model": {"name": "AdamW8bit"}}, False),
    ],
)
def test_only_names_of_bitsandbytes_load_it(words, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "optimizer.yaml").write_text("class_path: Lion8bit\n")
    (tmp_path / "config.yaml").write_text("fit:\n  optimizer:\n    class_path: PagedAdamW8bit\n")
    (tmp_path / "broken.yaml").write_text("optimizer: [AdamW8bit\n")
    for module in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    if named:
        with pytest.raises(
            MissingPackageError, match=r"The optimizer \S+ needs the package 'bitsandbytes'.*\[bnb\]"
        ):
            classes_named_in(words)
    else:
        assert classes_named_in(words) == ()


@pytest.mark.long
def test_bitsandbytes_is_imported_by_its_name_only_and_its_absence_is_one_line(config, tmp_path):
    program = (
        "import sys; from lightning_memkit.cli import main\n"
        "print(main(['fit', '--config', sys.argv[1], '--optimizer=SGD', '--print_config']))\n"
        "print('bitsandbytes' in sys.modules)\n"
        "sys.modules['bitsandbytes'] = None\n"
        "print(main(['fit', '--config', sys.argv[1], '--optimizer=AdamW8bit']))\n"
    )
    given = tmp_path / "plain.yaml"
    given.write_text(yaml.safe_dump({"model": "lightning.pytorch.demos.boring_classes.BoringModel"}))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(given)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-3:] == ["0", "False", "1"], done.stderr
    assert "memkit: error: MissingPackageError: The optimizer AdamW8bit needs the package" in done.stderr
    assert "-e '.[bnb]'" in done.stderr
