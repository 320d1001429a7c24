"""Float32 weights and states out of bfloat16 ones, in memory, live and from file to file."""

import copy

import pytest
import torch
from torch import nn

from lightning_memkit.initialization.casting import cast_module
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.consolidate import (
    NAMES_KEY,
    consolidate_checkpoint,
    consolidate_state_dicts,
    float32_state_dict,
    parameter_names,
    set_float32_weight,
)
from lightning_memkit.optim.consolidated_files import consolidate_file
from lightning_memkit.utilities.errors import NoEffectWarning

BF16, FP32 = torch.bfloat16, torch.float32
TIED = ("embed.weight", "head.weight")


class Tied(nn.Module):
    """Tied, frozen and float32 parameters, a table, a counter and a buffer that is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.middle, self.frozen, self.late = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("inv_freq", torch.rand(3))
        self.register_buffer("running", torch.rand(3))
        self.frozen.requires_grad_(False)


def optimizers_of(model: Tied) -> list[torch.optim.Optimizer]:
    first = torch.optim.AdamW([model.embed.weight, *model.norm.parameters()], lr=1e-2)
    second = torch.optim.SGD([*model.frozen.parameters(), model.middle.weight], lr=1e-2, momentum=0.9)
    return [first, second]


def with_late_group(optimizers: list[torch.optim.Optimizer], model: Tied) -> None:
    optimizers[1].add_param_group({"params": [model.middle.bias, *model.late.parameters()]})


def give_gradients(model: Tied, seed: int) -> None:
    """The same for float32 and bfloat16 weights: bfloat16 values, independent of the weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(BF16)
        if not name.startswith("frozen"):
            parameter.grad = noise.to(parameter.dtype)


def trained_pair(mode: str = "split", states: str = "exact", steps: int = 4):
    """A float32 model trained by torch alone, and its bfloat16 twin given the same gradients."""
    torch.manual_seed(3)
    truth = Tied()
    model = copy.deepcopy(truth)
    oracle = optimizers_of(truth)
    low_halves: dict[nn.Parameter, torch.Tensor] = {}
    cast_module(model, BF16, low_halves=low_halves)
    optimizers = optimizers_of(model)
    for optimizer in optimizers:
        compensate(optimizer, mode=mode, states=states, low_halves=low_halves)  # pyright: ignore[reportArgumentType]
    for step in range(steps):
        if step == 2:
            with_late_group(oracle, truth)
            with_late_group(optimizers, model)
            for parameter in (model.middle.bias, *model.late.parameters()):  # their float32 bits are new, too
                optimizers[1].state[parameter]["low_half"] = low_halves[parameter]
        for net, steppers in ((truth, oracle), (model, optimizers)):
            give_gradients(net, step)
            for stepper in steppers:
                stepper.step()
    return truth, oracle, model, optimizers


def checkpoint_of(model: Tied, optimizers: list[torch.optim.Optimizer]) -> dict:
    return {
        "epoch": 3,
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
        "Precision": {NAMES_KEY: parameter_names(model, optimizers)},
    }


def assert_plain_float32(value, path: str = "") -> None:
    if isinstance(value, torch.Tensor):
        assert value.dtype not in (BF16, torch.int16), path
    elif isinstance(value, dict):
        for key, item in value.items():
            assert not any(name in str(key) for name in ("memkit", "low_half", "compensation")), path
            assert_plain_float32(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            assert_plain_float32(item, path)


def through_a_file(value, path):
    torch.save(value, path)
    return torch.load(path, weights_only=True)


def test_split_gives_back_the_float32_training_bit_for_bit(tmp_path):
    truth, oracle, model, optimizers = trained_pair()
    saved = through_a_file(checkpoint_of(model, optimizers), tmp_path / "bf16.ckpt")
    assert saved["state_dict"]["middle.weight"].dtype == BF16
    plain = consolidate_checkpoint(saved)
    assert_plain_float32(plain)
    assert plain["epoch"] == 3
    expected = truth.state_dict()
    assert plain["state_dict"].keys() == expected.keys()
    for name, value in plain["state_dict"].items():
        assert value.dtype == expected[name].dtype, name
        if name == "running":
            assert torch.equal(value, expected[name].to(BF16).float())
        else:
            assert torch.equal(value, expected[name]), name
    assert plain["state_dict"][TIED[0]] is plain["state_dict"][TIED[1]]
    for ours, theirs in zip(plain["optimizer_states"], oracle, strict=True):
        theirs = theirs.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for index, state in theirs["state"].items():
            for name, value in state.items():
                assert torch.equal(ours["state"][index][name], value), (index, name)


def test_plain_float32_training_goes_on_from_it_bit_for_bit(tmp_path):
    truth, oracle, model, optimizers = trained_pair()
    plain = through_a_file(consolidate_checkpoint(checkpoint_of(model, optimizers)), tmp_path / "fp32.ckpt")
    torch.manual_seed(8)
    fresh = Tied()
    again = optimizers_of(fresh)
    with_late_group(again, fresh)
    fresh.load_state_dict(plain["state_dict"])
    for optimizer, state in zip(again, plain["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)
    for step in (7, 8):
        for net, steppers in ((truth, oracle), (fresh, again)):
            give_gradients(net, step)
            for stepper in steppers:
                stepper.step()
    for name, value in truth.state_dict().items():
        if name != "running":
            assert torch.equal(fresh.state_dict()[name], value), name


@pytest.mark.parametrize("mode", ["kahan", "split", "split24"])
def test_compact_states_widen_to_the_values_they_have(mode):
    _, _, model, optimizers = trained_pair(mode, "compact")
    plain = consolidate_checkpoint(checkpoint_of(model, optimizers))
    assert_plain_float32(plain)
    moment = optimizers[0].state[model.embed.weight]["exp_avg_sq"]
    assert moment.dtype == BF16
    assert torch.equal(plain["optimizer_states"][0]["state"][0]["exp_avg_sq"], moment.float())


def test_kahan_keeps_sixteen_bits():
    """The float32 weights are rounded to nearest where they are compensated, and stochastically by a step."""
    truth, oracle, model, optimizers = trained_pair("kahan", "exact", steps=0)
    start = consolidate_checkpoint(checkpoint_of(model, optimizers))["state_dict"]
    for name in (*TIED, "middle.weight"):
        master = truth.state_dict()[name]
        assert ((start[name] - master).abs() <= 2**-17 * master.abs()).all()
    truth.load_state_dict(start)
    for net, steppers in ((truth, oracle), (model, optimizers)):
        give_gradients(net, 0)
        for stepper in steppers:
            stepper.step()
    plain = consolidate_checkpoint(checkpoint_of(model, optimizers))
    for name in (*TIED, "middle.weight"):
        wide, master = plain["state_dict"][name], truth.state_dict()[name]
        assert ((wide - master).abs() <= 2**-16 * master.abs()).all()
        assert not torch.equal(wide, wide.to(BF16).float())


@pytest.mark.parametrize("mode", ["stochastic", "none"])
def test_modes_without_low_halves_widen_the_weights(mode):
    _, _, model, optimizers = trained_pair(mode, "compact", steps=2)
    plain = consolidate_checkpoint(checkpoint_of(model, optimizers))
    assert torch.equal(plain["state_dict"]["middle.weight"], model.middle.weight.detach().float())


def test_the_live_form_equals_the_file_and_shares_no_memory():
    _, _, model, optimizers = trained_pair()
    expected = consolidate_checkpoint(checkpoint_of(model, optimizers))["state_dict"]
    live = float32_state_dict(model, optimizers)
    assert live.keys() == expected.keys()
    for name, value in live.items():
        assert torch.equal(value, expected[name]), name
    assert live[TIED[0]] is live[TIED[1]]
    before = copy.deepcopy(live)
    for parameter in [*model.parameters(), *model.buffers()]:
        parameter.data.zero_()
    for name, value in live.items():
        assert torch.equal(value, before[name]), name
    assert float32_state_dict(model, optimizers[0], device="meta")["middle.weight"].device.type == "meta"


def test_weights_averaged_by_lightning_stand_beside_the_trained_ones():
    truth, _, model, optimizers = trained_pair()
    checkpoint = checkpoint_of(model, optimizers)
    average = {name: value + 1 for name, value in checkpoint["state_dict"].items()}
    checkpoint |= {"current_model_state": checkpoint["state_dict"], "state_dict": average}
    plain = consolidate_checkpoint(checkpoint)
    assert_plain_float32(plain)
    assert torch.equal(plain["current_model_state"]["middle.weight"], truth.middle.weight.detach())
    assert torch.equal(plain["state_dict"]["middle.weight"], average["middle.weight"].float())


def test_state_dicts_that_go_by_names_need_none():
    truth, _, model, optimizers = trained_pair()
    names = parameter_names(model, optimizers)
    by_name = []
    for optimizer, of_optimizer in zip(optimizers, names, strict=True):
        saved = optimizer.state_dict()
        saved["state"] = {of_optimizer[index][0]: state for index, state in saved["state"].items()}
        by_name.append(saved)
    weights, _ = consolidate_state_dicts(model.state_dict(), by_name, None)
    assert torch.equal(weights["middle.weight"], truth.middle.weight.detach())


def test_state_dicts_may_number_parameters_in_another_way():
    """As FSDP's rekeying does: by the module's order, not by the groups'."""
    truth, _, model, optimizers = trained_pair()
    names = parameter_names(model, optimizers)
    saved = [optimizer.state_dict() for optimizer in optimizers]
    for state_dict in saved:
        state_dict["state"] = {99 - key: state for key, state in state_dict["state"].items()}
        for group in state_dict["param_groups"]:
            group["params"] = [99 - key for key in group["params"]]
    weights, _ = consolidate_state_dicts(model.state_dict(), saved, names)
    for name, parameter in truth.named_parameters():
        assert torch.equal(weights[name], parameter), name


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch.compile
def test_names_of_frozen_foreign_and_compiled_parameters():
    model = nn.ModuleDict({"net": torch.compile(nn.Linear(2, 2))})  # pyright: ignore[reportArgumentType]
    foreign = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([foreign, *model.parameters()], lr=1.0)
    assert parameter_names(model, [optimizer]) == [[[], ["net._orig_mod.weight"], ["net._orig_mod.bias"]]]
    assert "net._orig_mod.weight" in model.state_dict()


@pytest.mark.parametrize("mode", ["kahan", "split", "split24", "none"])
def test_a_weight_set_in_float32_takes_its_low_half_along(mode):
    _, _, model, optimizers = trained_pair(mode)
    weight = model.middle.weight
    value = torch.randn(6, 6)
    set_float32_weight(weight, optimizers[1].state[weight], value)
    assert torch.equal(weight.detach(), value.to(BF16))
    got = float32_state_dict(model, optimizers)["middle.weight"]
    limit = {"split": 0.0, "split24": 2**-15, "kahan": 2**-16, "none": 2**-8}[mode]
    assert ((got - value).abs() <= limit * value.abs()).all()


def test_low_halves_without_names_are_refused_with_the_remedy():
    _, _, model, optimizers = trained_pair()
    checkpoint = checkpoint_of(model, optimizers)
    del checkpoint["Precision"]
    with pytest.raises(ValueError, match="no names of the parameters.*save it once more"):
        consolidate_checkpoint(checkpoint)


def test_names_of_another_moment_are_refused():
    _, _, model, optimizers = trained_pair()
    checkpoint = checkpoint_of(model, optimizers)
    optimizers[1].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    checkpoint["Precision"] = {NAMES_KEY: parameter_names(model, optimizers)}
    with pytest.raises(ValueError, match="Optimizer 1 has 6 parameters and 7 names"):
        consolidate_checkpoint(checkpoint)


def test_a_checkpoint_without_weights_is_refused():
    with pytest.raises(ValueError, match=r"no 'state_dict' \(it has 'model'\)"):
        consolidate_checkpoint({"model": {}})


def test_what_has_no_effect_or_loses_bits_says_so():
    with pytest.warns(NoEffectWarning, match="nothing to consolidate"):
        consolidate_checkpoint({"state_dict": nn.Linear(2, 2).state_dict()})
    with pytest.warns(UserWarning, match="only the 8 bits"):
        plain = consolidate_checkpoint({"state_dict": nn.Linear(2, 2).to(BF16).state_dict()})
    assert plain["state_dict"]["weight"].dtype == FP32
    assert "optimizer_states" not in plain


def test_from_file_to_file(tmp_path):
    truth, _, model, optimizers = trained_pair()
    source, target = tmp_path / "bf16.ckpt", tmp_path / "fp32.ckpt"
    torch.save(checkpoint_of(model, optimizers), source)
    kept = source.read_bytes()
    assert consolidate_file(source, target) == target
    weights = torch.load(target, weights_only=True)["state_dict"]
    assert torch.equal(weights["middle.weight"], truth.middle.weight.detach())
    with pytest.raises(FileExistsError, match="would be replaced; .* overwrite=True"):
        consolidate_file(source, target)
    assert source.read_bytes() == kept
    consolidate_file(source, source, overwrite=True)
    assert torch.equal(torch.load(source)["state_dict"][TIED[0]], weights[TIED[0]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16.ckpt", "fp32.ckpt"]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    _, _, model, optimizers = trained_pair()
    source, target = tmp_path / "bf16.ckpt", tmp_path / "fp32.ckpt"
    torch.save(checkpoint_of(model, optimizers), source)
    target.write_text("older")

    def full_disk(_, file) -> None:
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        consolidate_file(source, target, overwrite=True)
    assert target.read_text() == "older"
    assert len(list(tmp_path.iterdir())) == 2


class Unknown:
    pass


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, FileNotFoundError, "does not exist"),
        ("text", ValueError, "no checkpoint that torch can read"),
        (
            {"state_dict": {}, "hyper_parameters": Unknown()},
            ValueError,
            r"weights_only=True.*Unknown.*If you trust",
        ),
        ([1], ValueError, "holds a list"),
    ],
)
def test_unreadable_sources_are_refused(content, error, message, tmp_path):
    source = tmp_path / "source.ckpt"
    if isinstance(content, str):
        source.write_text(content)
    elif content is not None:
        torch.save(content, source)
    with pytest.raises(error, match=message):
        consolidate_file(source, tmp_path / "target.ckpt")
    assert not (tmp_path / "target.ckpt").exists()


def test_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder, but no sharded checkpoint"):
        consolidate_file(tmp_path, tmp_path / "target.ckpt")
    source = tmp_path / "source.ckpt"
    torch.save({}, source)
    with pytest.raises(FileNotFoundError, match="is no folder; create it"):
        consolidate_file(source, tmp_path / "absent" / "target.ckpt")
