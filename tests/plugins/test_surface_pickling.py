"""What a user pickles, copies or spawns: Trainer, plugins, module and optimizer, before, in and after a fit."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cloudpickle
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.data import get_all_subclasses
from torch.utils.data import BatchSampler, DataLoader

from lightning_memkit import MemoryBudget, PureBF16Precision
from lightning_memkit.plugins.callbacks.initial_weights import InitialWeights
from lightning_memkit.plugins.seams import loaders
from tests.test_package import OFFLOADING, TRAINED, Blocks, build, give_weights, quiet_trainer
from tests.testing.fake_device import fake_device

pytestmark = pytest.mark.filterwarnings("ignore:GradientRelease.*")
ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "cloudpickle": lambda thing: cloudpickle.loads(cloudpickle.dumps(thing)),
    "deepcopy": copy.deepcopy,
}


class FailsAtItsSecondStep(Blocks):
    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == 1:
            raise ArithmeticError("the user's own")
        return super().training_step(batch, index)


class CopiesInTheStep(Blocks):
    """Copies itself where a moving average of the weights would."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Blocks] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        if self.trainer.training:
            kept, self.copies = self.copies, []
            kept.append(copy.deepcopy(self))
            self.copies = kept
        return loss


def plugin_named(name: str, folder: Path) -> Any:
    plugin = build(name)
    if isinstance(plugin, InitialWeights):
        give_weights(plugin, folder)
    return plugin


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Each plugin after a fit; those that hold most of a run at the other moments, too.
MOMENTS = [
    (name, moment) if moment == "after" or name in {"MemoryBudget", "MemoryReport"}
    else pytest.param(name, moment, marks=pytest.mark.slow)
    for name in TRAINED for moment in ("before", "after", "failed")
]  # fmt: skip


@pytest.mark.parametrize(("name", "moment"), MOMENTS)
def test_a_trainer_and_all_it_has_are_pickled_and_copied(name: str, moment: str, elsewhere: Path) -> None:
    module = FailsAtItsSecondStep() if moment == "failed" else Blocks()
    with fake_device() if name in OFFLOADING else nullcontext():
        plugin = plugin_named(name, elsewhere)
        trainer = quiet_trainer([plugin], elsewhere)
        if moment != "before":
            with pytest.raises(ArithmeticError) if moment == "failed" else nullcontext():
                trainer.fit(module)
        for again in ROUND_TRIPS.values():
            assert repr(again(plugin)) == repr(plugin)
            assert_equal(weights_of(again(module)), weights_of(module))
            copied = again(trainer)
            assert copied.global_step == trainer.global_step
            assert [type(one) for one in copied.callbacks] == [
                type(one) for one in vars(trainer)["callbacks"]
            ]


class RaisesInItsLoader(Blocks):
    def train_dataloader(self) -> Any:
        raise ArithmeticError("the user's own")


def test_a_tuned_loader_is_copied_also_where_a_run_before_failed_in_the_user_s_loader(
    elsewhere: Path,
) -> None:
    """From then on Lightning notes for good what is set on loaders of any run."""
    names = ("__init__", "__setattr__", "__delattr__")
    classes = [DataLoader, BatchSampler, *get_all_subclasses(DataLoader), *get_all_subclasses(BatchSampler)]
    before = {kind: {name: vars(kind)[name] for name in names if name in vars(kind)} for kind in classes}
    try:
        with pytest.raises(ArithmeticError):
            quiet_trainer([], elsewhere).fit(RaisesInItsLoader())
        trainer = quiet_trainer([plugin_named("LoaderTuner", elsewhere)], elsewhere)
        trainer.fit(Blocks())
        (loader,) = loaders.training_loaders(trainer)
        assert any(name.startswith("__pl_") for name in vars(loader))
        for again in ROUND_TRIPS.values():
            assert again(trainer).global_step == trainer.global_step
    finally:
        for kind, kept in before.items():
            for name in names:
                for found in (name, f"__old{name}"):
                    if found in vars(kind):
                        delattr(kind, found)
                if name in kept:
                    setattr(kind, name, kept[name])


@pytest.mark.parametrize("name", TRAINED)
def test_a_copied_trainer_saves_and_trains_on_as_the_original(name: str, elsewhere: Path) -> None:
    with fake_device() if name in OFFLOADING else nullcontext():
        trainer = quiet_trainer([plugin_named(name, elsewhere)], elsewhere)
        trainer.fit(Blocks())
        copied = copy.deepcopy(trainer)
        found = []
        for one in (trainer, copied):
            module = one.lightning_module
            one.save_checkpoint(elsewhere / "one.ckpt")
            saved = one.strategy.load_checkpoint(elsewhere / "one.ckpt", weights_only=False)
            torch.manual_seed(1)
            one.fit_loop.max_epochs = 2
            one.fit(module)
            found.append((saved, weights_of(module)))
    (saved, weights), (saved_by_copy, weights_by_copy) = found
    assert saved["callbacks"].keys() == saved_by_copy["callbacks"].keys()
    assert repr(saved["callbacks"]) == repr(saved_by_copy["callbacks"])
    assert_equal(saved["state_dict"], saved_by_copy["state_dict"])
    assert repr(saved["optimizer_states"]) == repr(saved_by_copy["optimizer_states"])
    for key, value in weights.items():
        torch.testing.assert_close(weights_by_copy[key], value, msg=key)


@pytest.mark.parametrize("name", TRAINED)
def test_a_module_copied_in_its_step_is_a_module_of_its_own(name: str, elsewhere: Path) -> None:
    """The copies have the weights of their step, run alone, and training takes no note of them."""
    found = []
    for kind in (Blocks, CopiesInTheStep):
        with fake_device() if name in OFFLOADING else nullcontext():
            torch.manual_seed(0)
            module = kind()
            quiet_trainer([plugin_named(name, elsewhere)], elsewhere).fit(module)
            found.append((weights_of(module), module))
    (plain, _), (weights, module) = found
    assert_equal(weights, plain)
    assert isinstance(module, CopiesInTheStep)
    assert len(module.copies) >= 2
    first = module.copies[0].cpu()
    before = weights_of(first)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    for batch in first.train_dataloader():
        Blocks.training_step(first, batch, 0).backward()
        optimizer.step()
    assert any(not torch.equal(value, before[key]) for key, value in weights_of(first).items())
    assert_equal(weights_of(module), weights)  # of the original nothing has changed


class Snapshots(pl.Callback):
    """Pickles the module and its optimizer where training is under way."""

    def __init__(self) -> None:
        self.found: list[tuple[bytes, dict[str, torch.Tensor]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        optimizer = pl_module.optimizers(use_pl_optimizer=False)
        self.found.append((pickle.dumps((pl_module, optimizer)), weights_of(pl_module)))


@pytest.mark.parametrize("name", TRAINED)
def test_module_and_optimizer_are_pickled_between_two_steps(name: str, elsewhere: Path) -> None:
    snapshots = Snapshots()
    with fake_device() if name in OFFLOADING else nullcontext():
        trainer = quiet_trainer([plugin_named(name, elsewhere), snapshots], elsewhere)
        trainer.fit(Blocks())
        assert snapshots.found
        for pickled, weights in snapshots.found:
            module, optimizer = pickle.loads(pickled)
            assert_equal(weights_of(module), weights)
            own = {id(parameter) for parameter in module.parameters()}
            assert {id(p) for group in optimizer.param_groups for p in group["params"]} == own


@pytest.mark.parametrize("again", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
@pytest.mark.parametrize("mode", ["kahan", "split", "split24", "stochastic", "none"])
def test_a_copied_optimizer_is_compensated_as_the_original(mode: Any, again: Any, elsewhere: Path) -> None:
    """Plain bfloat16 steps of the copy would lose nearly all of these updates."""
    trainer = quiet_trainer([PureBF16Precision(compensation=mode)], elsewhere)
    trainer.fit(Blocks())
    pairs = [(trainer.lightning_module, trainer.optimizers[0])]
    pairs.append(again(pairs[0]))
    for module, optimizer in pairs:
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            for parameter in module.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            optimizer.step()
    assert_equal(weights_of(pairs[1][0]), weights_of(pairs[0][0]))
    for ours, theirs in zip(pairs[1][1].state.values(), pairs[0][1].state.values(), strict=True):
        assert_equal(
            {key: torch.as_tensor(value) for key, value in ours.items()},
            {key: torch.as_tensor(value) for key, value in theirs.items()},
        )


def test_a_copy_says_what_the_original_has_found(elsewhere: Path) -> None:
    budget = MemoryBudget(budget="1GiB", micro_batch_size=3)
    quiet_trainer([budget], elsewhere).fit(Blocks())

    copied = pickle.loads(pickle.dumps(budget))

    assert copied.state_dict() == budget.state_dict() != {}
    assert copied.sizing == budget.sizing
    assert copied.history == budget.history


def spawned(names: list[str], folder: Path) -> dict[str, torch.Tensor]:
    plugins = [plugin_named(name, folder) for name in names]
    torch.manual_seed(0)
    module = Blocks()
    trainer = quiet_trainer(plugins, folder, accelerator="cpu", devices=1, strategy="ddp_spawn")
    trainer.fit(module)
    return weights_of(module)


# Strategies start processes themselves; released gradients and offloading say that DDP is none of theirs.
SPAWNED = [name for name in TRAINED if name not in {"OnDeviceStrategy", "GradientRelease", *OFFLOADING}]


@pytest.mark.slow
@pytest.mark.parametrize("name", SPAWNED)
def test_each_plugin_trains_in_a_spawned_process(name: str, elsewhere: Path) -> None:
    assert_equal(spawned([name], elsewhere), spawned([name], elsewhere))


@pytest.mark.parametrize(
    "names", [["MemoryBudget", "MemoryReport"], pytest.param(SPAWNED, marks=pytest.mark.slow)], ids="+".join
)
@pytest.mark.long
def test_plugins_train_together_in_a_spawned_process(names: list[str], elsewhere: Path) -> None:
    torch.manual_seed(0)
    begun = Blocks().state_dict()
    trained = spawned(names, elsewhere)
    assert any(not torch.equal(begun[name].to(value.dtype), value) for name, value in trained.items())
