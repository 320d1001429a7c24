# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Training starts from weights in files, under any strategy, with no code in the module."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors.torch import save_file

from lightning_memkit import MemkitCLI, OnDeviceStrategy, predict_memory
from lightning_memkit.optim.split import split
from lightning_memkit.plugins.callbacks.initial_weights import InitialWeights
from lightning_memkit.utilities.errors import WeightsError
from tests.plugins.noise import NOISE
from tests.plugins.several_ranks import LENGTH, Language, Loader
from tests.plugins.two_ranks_initial_weights import Early, Late, fit
from tests.processes import run_on_ranks

pytestmark = NOISE
POSITIONS = torch.linspace(-1, 1, LENGTH)[:, None]


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    return {name: torch.randn_like(v) for name, v in Language().state_dict().items() if name != "head.weight"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    save_file(values(), path)
    return str(path)


@pytest.fixture(scope="module")
def ranks(source: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("ranks") / "found.pt"
    done = run_on_ranks("tests.plugins.two_ranks_initial_weights", str(path), source)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path)


def check(begun: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    for name, value in values().items():
        assert torch.equal(begun[name], value.to(dtype)), name
    assert torch.equal(begun["head.weight"], begun["embedding.weight"])


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("FSDP2, early", torch.float32),
        ("FSDP2, late", torch.bfloat16),
        ("FSDP2, late, Kahan", torch.bfloat16),
        ("FSDP2, late, offloaded", torch.float32),
        ("FSDP2, config", torch.float32),
        ("DDP, early", torch.float32),
        ("DDP, late", torch.float32),
    ],
)
def test_ranks_start_from_the_weights(case, dtype, ranks):
    check(ranks[case]["begun"], dtype)
    if case != "FSDP2, late":  # Lightning's bf16-true casts tables
        assert torch.equal(ranks[case]["positions"], POSITIONS)
    assert ranks[case]["was_empty"] == ("early" not in case)


def test_the_split_form_keeps_what_a_cast_drops(source, ranks):
    class Split(Early):
        def configure_optimizers(self):
            kept = self.trainer.precision_plugin._low_halves
            self.low = {name: kept[parameter].clone() for name, parameter in self.named_parameters()}
            return super().configure_optimizers()

    module = fit(Split(), "auto", source, "split")
    for name, value in values().items():
        high, low = split(value)
        assert torch.equal(module.begun[name], high), name
        assert torch.equal(module.low[name], low), name
        on_rank = ranks["FSDP2, early, split"]
        assert torch.equal(on_rank["begun"][name], high), name
        box, part = on_rank["low"][name]
        assert torch.equal(part, low[tuple(slice(start, end) for start, end in box)]), name


@pytest.mark.parametrize(
    ("case", "cast"),
    [
        ("Early, bf16-true", torch.Tensor.bfloat16),
        ("Early, split", lambda value: split(value)[0]),
        ("Late, kahan", torch.Tensor.bfloat16),
        ("Late, 32-true", torch.Tensor.float),
    ],
)
def test_shards_are_those_of_float32_initialisation_then_cast(case, cast, ranks):
    """In one process, without memkit: what is cast or drawn after sharding would differ."""
    torch.manual_seed(0)
    plain = Language()
    assert ranks[f"initialised, {case}"].keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(ranks[f"initialised, {case}"][name], cast(value)), name


def test_ranks_say_what_is_refused(ranks):
    assert ranks["refused"].startswith("WeightsError")
    assert "Missing in the source (1): scale" in ranks["refused"]


def test_without_files_initialisers_fill_the_shards(ranks):
    assert all(torch.isfinite(value).all() for value in ranks["own"].values())
    assert torch.equal(ranks["own"]["scale"], torch.ones(32))
    assert torch.equal(ranks["own"]["layers.0.norm.weight"], torch.ones(32))
    assert float(ranks["own"]["embedding.weight"].std()) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("strategy", ["auto", OnDeviceStrategy])
@pytest.mark.parametrize("kind", [Early, Late])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "kahan"])
def test_one_device_starts_from_the_weights(kind, strategy, precision, source):
    module = fit(kind(), strategy if strategy == "auto" else strategy(), source, precision)
    check(module.begun, torch.float32 if precision == "32-true" else torch.bfloat16)
    if kind is Late:
        assert module.was_empty
    if precision != "bf16-true":  # Lightning's own casts tables
        assert torch.equal(module.first, POSITIONS)


def test_weights_that_files_lack_are_those_of_initialisation(source, tmp_path):
    some = {name: value for name, value in values().items() if name != "scale"}
    save_file(some, tmp_path / "some.safetensors")
    torch.manual_seed(3)
    plain = Language()
    torch.manual_seed(3)
    with pytest.raises(WeightsError, match=r"Missing in the source \(1\): scale"):
        fit(Late(), OnDeviceStrategy(), str(tmp_path / "some.safetensors"))
    torch.manual_seed(3)
    module = fit(Late(), OnDeviceStrategy(), str(tmp_path / "some.safetensors"), strict=False)
    assert not module.was_empty
    assert torch.equal(module.begun.pop("scale"), plain.scale)
    assert all(torch.equal(module.begun[name], value) for name, value in some.items())


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_test_after_training_tests_what_was_trained_and_a_resumed_checkpoint_counts(source, tmp_path):
    class Tested(Late):
        def test_step(self, batch, batch_idx):
            self.tested = self.scale.detach().clone()

    options = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": tmp_path,
    }  # fmt: skip
    module, callback = Tested(), InitialWeights(source)
    trainer = Trainer(**options, max_steps=2, callbacks=[callback])
    trainer.fit(module, Loader(0, 1))
    trained = module.scale.detach().clone()
    trainer.test(module, Loader(0, 1), verbose=False)
    assert torch.equal(module.tested, trained)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = Tested()
    resumed = Trainer(**options, max_steps=3, callbacks=[InitialWeights(source)])
    resumed.fit(again, Loader(0, 1), ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(again.begun["scale"], trained)


class Built(Early):
    """Notes where it was built."""

    def __init__(self):
        super().__init__()
        self.built = {parameter.device.type for parameter in self.parameters()}

    def train_dataloader(self):
        return Loader(0, 1)


@pytest.mark.parametrize(("strict", "place"), [("true", "meta"), ("false", "cpu")])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_model_of_a_config_has_no_weights_of_its_own(
    precision, strict, place, source, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    callback = f"{{class_path: InitialWeights, init_args: {{source: {source}, strict: {strict}}}}}"
    words = [f"--trainer.{one}=false" for one in ("logger", "enable_checkpointing", "enable_progress_bar")]
    words += ["--trainer.accelerator=cpu", "--trainer.max_steps=1", f"--trainer.precision={precision}"]
    words += [
        "--seed_everything=0",
        f"--trainer.callbacks=[{callback}]",
        "--trainer.enable_model_summary=false",
    ]
    cli = MemkitCLI(Built, args=["fit", *words], save_config_callback=None)
    assert cli.model.built == {place}
    check(cli.model.begun, torch.float32 if precision == "32-true" else torch.bfloat16)
    assert torch.equal(cli.model.first, POSITIONS) or precision == "bf16-true"


def test_predictions_need_no_weights(source):
    batch = torch.randint(0, 96, (4, LENGTH))
    for kind in (Early, Late):
        ours = predict_memory(kind(), batch, trainer={"callbacks": [InitialWeights(source + ".nowhere")]})
        assert ours.peak_bytes == predict_memory(kind(), batch).peak_bytes


def test_files_that_do_not_fit_are_refused_at_setup(tmp_path):
    save_file({"scale": torch.ones(3)}, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=r"scale: stored \(3,\), in the module \(32,\)"):
        fit(Early(), "auto", str(tmp_path / "w.safetensors"))


def test_a_config_names_the_weights(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = f"{{class_path: InitialWeights, init_args: {{source: {source}, rename: {{old.: null}}}}}}"
    cli = MemkitCLI(
        Early,
        args=[
            "--seed_everything=0",
            "--trainer.accelerator=cpu",
            "--trainer.logger=false",
            f"--trainer.callbacks=[{callback}]",
        ],
        run=False,
        save_config_callback=None,
    )
    (found,) = [one for one in cli.trainer.callbacks if isinstance(one, InitialWeights)]
    assert repr(found) == f"InitialWeights(source={source!r}, rename={{'old.': None}}, strict=True)"
