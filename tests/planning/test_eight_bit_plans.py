"""8-bit states in plans: only where they are asked for; in a config, and as a line to write."""

import importlib.util
from typing import Any

import pytest
import torch
import yaml
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from lightning_memkit import ActivationCheckpointing, Budget, plan
from lightning_memkit.cli import main
from lightning_memkit.planning.choices import families, optimizer_states, refusal, seven_bytes
from lightning_memkit.planning.eight_bit import EightBit, eight_bit_of, with_8_bit_states
from lightning_memkit.utilities.errors import PlanError
from tests.plugins.test_planning import config
from tests.plugins.test_prediction import Language, batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # of a package that is imported
]
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
)

LEAST = Budget("64MiB", "cpu", "memory")
SEVEN = "bfloat16, 24 bits"
FULL = {"precision": "32-true", "callbacks": [ActivationCheckpointing("full")]}


def weight() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(64, 64))]


@needs_bitsandbytes
@pytest.mark.long
def test_they_are_there_where_they_were_asked_for_only():
    found = plan(Language, batch(2, 32), LEAST, trainer=FULL)
    assert not any(row.family.optimizer for row in found.rows)
    assert found.hint == ""
    found = plan(Language, batch(2, 32), LEAST, trainer=FULL, optimizer_states="open")
    saved, quantized = (
        row.prediction.anatomy.largest["optimizer_states"]
        for name in ("", "8-bit states")
        for row in found.fitting
        if row.prediction and row.family["states"].name == name and not row.family.is_released
    )
    assert quantized < 0.8 * saved  # embeddings keep 32-bit states
    assert {"states in 8 bits" in row.family.changes for row in found.fitting if row.family.optimizer} == {
        True
    }


@needs_bitsandbytes
@pytest.mark.long
def test_in_code_the_plan_says_the_line_to_write():
    def build() -> Language:
        return Language(lambda *args, **kwargs: AdamW(*args, betas=(0.9, 0.95), **kwargs))

    found = plan(build, batch(2, 32), LEAST, trainer=FULL, optimizer_states="open")
    row = next(row for row in found.fitting if row.family.optimizer)
    line = r"write `bitsandbytes.optim.AdamW8bit\(self.parameters\(\), lr=.*betas=\(0.9, 0.95\), eps=.*` in"
    with pytest.raises(PlanError, match=line):
        found.trainer_kwargs(row)
    with pytest.raises(PlanError, match=line):
        found.config({"optimizer": {"class_path": "torch.optim.SGD"}}, row)
    section = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1, "fused": True, "eps": None}}
    assert found.config({"optimizer": section}, row)["optimizer"] == {
        "class_path": "bitsandbytes.optim.AdamW8bit",
        "init_args": {"lr": 0.1},
    }
    assert found.config({"optimizer": section}, found.fitting[-1])["optimizer"] == section


@needs_bitsandbytes
@pytest.mark.long
def test_where_nothing_fits_it_says_what_8_bits_would_take():
    found = plan(Language, batch(2, 32), Budget("100KiB", "cpu"), trainer=FULL)
    assert "AdamW could keep its states in 8 bits" in str(found)
    with pytest.raises(PlanError, match=r'8-bit states, .*(time|once) takes .*optimizer_states="open"'):
        found.trainer_kwargs()
    other = plan(lambda: Language(RMSprop), batch(2, 32), Budget("100KiB", "cpu"), trainer=FULL)
    assert other.hint == ""


@pytest.mark.long
def test_a_precision_with_8_bit_states_is_planned_where_states_are_open():
    given = {"callbacks": [ActivationCheckpointing("full")]}

    def build() -> Language:
        return Language(width=128)

    closed = plan(build, batch(2, 32), LEAST, trainer=given)
    assert not any(row.family["precision"].name == SEVEN for row in closed.rows)
    found = plan(build, batch(2, 32), LEAST, trainer=given, optimizer_states="open")
    by_precision = {
        row.family["precision"].name: row.prediction.anatomy.largest
        for row in found.fitting
        if row.prediction and row.family.optimizer is None and not row.family.is_released
    }
    least, kahan = by_precision[SEVEN], by_precision["bfloat16, Kahan"]
    assert least["weights"] == kahan["weights"]
    assert least["compensation"] == kahan["compensation"] / 2
    assert least["optimizer_states"] == pytest.approx(kahan["optimizer_states"] / 2, rel=0.03)  # with scales
    row = found.best
    assert row.family["precision"].name == SEVEN
    assert row.family.changes == "bfloat16 arithmetic and gradients, states in 8 bits"
    assert found.config()["trainer"]["plugins"] == [
        {
            "class_path": "lightning_memkit.PureBF16Precision",
            "init_args": {"compensation": "split24", "states": "8-bit"},
        }
    ]
    (plugin,) = found.trainer_kwargs()["plugins"]
    assert (plugin.compensation, plugin.states) == ("split24", "8-bit")


@pytest.mark.long
def test_where_nothing_fits_the_precision_with_8_bit_states_is_named_for_any_optimizer():
    given = {"callbacks": [ActivationCheckpointing("full")]}
    found = plan(lambda: Language(RMSprop, width=256), batch(2, 32), Budget("100KiB", "cpu"), trainer=given)
    assert "PureBF16Precision could keep states in 8 bits" in found.hint
    assert "bfloat16 with 24 bits and 8-bit states" in found.hint


def test_states_are_not_quantised_twice():
    columns = {"precision": (seven_bytes(),), "states": optimizer_states(EightBit(replaces="AdamW"))}
    plain, twice = families(columns)
    assert (refusal(plain), refusal(twice)) == ("", "its precision keeps states in 8 bits already")


@pytest.mark.long
def test_optimizers_without_an_8_bit_equivalent_are_named(monkeypatch):
    with pytest.raises(ValueError, match="optimizer_states='8-bit' is unknown; write 'given' or 'open'"):
        plan(Language, batch(2, 32), LEAST, optimizer_states="8-bit")  # pyright: ignore
    monkeypatch.setattr("lightning_memkit.plugins.planning._planned_optimizer.find_spec", lambda name: None)
    found = plan(Language, batch(2, 32), LEAST, trainer=FULL, optimizer_states="open")
    assert "bitsandbytes is not installed" in found.unavailable["states"]
    monkeypatch.undo()
    if importlib.util.find_spec("bitsandbytes") is not None:
        found = plan(lambda: Language(RMSprop), batch(2, 32), LEAST, trainer=FULL, optimizer_states="open")
        assert "RMSprop has no 8-bit" in found.unavailable["states"]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda p: RMSprop(p), "RMSprop has no 8-bit equivalent"),
        (lambda p: AdamW(p, amsgrad=True), "AdamW\\(amsgrad=True\\) has no 8-bit equivalent"),
        (lambda p: Adam(p, weight_decay=0.1), "adds the decay to the gradient"),
        (lambda p: SGD(p, lr=0.1), "SGD without momentum keeps no states"),
        (lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True), "nesterov=True"),
    ],
)
def test_other_steps_are_not_taken_for_the_same(optimizer, message):
    with pytest.raises(ValueError, match=message):
        eight_bit_of(optimizer(weight()))


@needs_bitsandbytes
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: AdamW(p, lr=0.01, betas=(0.8, 0.9), weight_decay=0.3),
        lambda p: Adam(p, lr=0.02),
        lambda p: SGD(p, lr=0.01, momentum=0.8, weight_decay=0.1),
    ],
)
def test_the_8_bit_optimizer_takes_nearly_the_same_steps(optimizer):
    torch.manual_seed(0)
    gradients = [torch.randn(64, 64) for _ in range(4)]
    weights = []
    for swap in (lambda one: one, with_8_bit_states):
        (parameter,) = own = weight()
        stepping = swap(optimizer([{"params": own, "lr": 0.03}]))
        LambdaLR(stepping, lambda step: 1.0)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            stepping.step()
        weights.append(parameter.detach())
    moved = (weights[0] - 1).norm()
    assert (weights[0] - weights[1]).norm() < 0.1 * moved


@needs_bitsandbytes
@pytest.mark.long
def test_the_planned_config_trains_in_8_bits(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, planned = config(tmp_path, plugins=[], precision="32-true"), tmp_path / "planned.yaml"
    given: dict[str, Any] = yaml.safe_load(open(path).read())
    given["optimizer"] = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}}
    given["trainer"]["callbacks"] = [
        {"class_path": "lightning_memkit.ActivationCheckpointing", "init_args": {"policy": "full"}}
    ]
    given["model"]["init_args"]["width"] = 64  # of smaller matrices bitsandbytes keeps 32 bits
    open(path, "w").write(yaml.safe_dump(given))
    words = ["plan", "--config", path, "--budget", "8MiB", "--device", "cpu", "--goal", "memory"]
    assert main([*words, "--optimizer-states", "open", "--explain", "--output", str(planned)]) == 0
    said = capsys.readouterr().out
    assert "32-bit states of embeddings" in said, said
    assert yaml.safe_load(planned.read_text())["optimizer"] == {
        "class_path": "bitsandbytes.optim.AdamW8bit",
        "init_args": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.01},
    }
    assert main(["fit", "--config", str(planned)]) == 0
