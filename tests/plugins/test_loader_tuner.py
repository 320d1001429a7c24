# pyright: reportArgumentType=false
"""LoaderTuner in a Trainer: workers by simulated times, and batches that don't change with them."""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.connectors import data_connector
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_memkit import LoaderTuner, MemoryBudget, NoEffectWarning, PackedDataModule
from lightning_memkit.data.loading.batch_options import BatchOptions
from lightning_memkit.data.loading.host_memory import HostMemory
from lightning_memkit.data.loading.load_times import LoadTimes
from lightning_memkit.data.loading.resumable_loader import ResumableLoader
from lightning_memkit.data.loading.worker_batches import BatchError
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.plugins.callbacks.random_state import RandomState
from lightning_memkit.plugins.data import _training_loaders, loader_tuner
from tests.data.test_loader_tuning import simulated
from tests.plugins.fake_accelerator import on_fake_device
from tests.plugins.noise import NOISE
from tests.plugins.toys import trainer
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = [*NOISE, pytest.mark.filterwarnings("ignore:.*have no .validation_step")]
SAMPLES, BATCH = 120, 4
STEPS = SAMPLES // BATCH
MUCH = HostMemory(shared_bytes=2**40, ram_bytes=2**40)


class Samples(torch.utils.data.Dataset):
    """Samples that are augmented at random."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(torch.rand(()))])

    def __len__(self) -> int:
        return SAMPLES


class Network(LightningModule):
    """Dropout draws from the numbers that a shuffle draws from."""

    def __init__(self, asks_for_stepping_batches: bool = False, dropout: float = 0.5) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(2, 1), nn.Dropout(dropout)
        self.asks = asks_for_stepping_batches
        self.seen: list[list[float]] = []

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.seen.append(batch.flatten().tolist())
        return self.dropout(self.layer(batch / SAMPLES)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Workers(Callback):
    """The workers in use at every step."""

    def __init__(self, tuner: LoaderTuner) -> None:
        self.tuner, self.used = tuner, []

    def on_train_batch_start(self, *_: Any) -> None:
        assert self.tuner._tuning is not None
        self.used.append(self.tuner._tuning.plan.num_workers)


class Saves(Callback):
    def __init__(self, path: Any, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.fixture
def times(monkeypatch):
    """Says how long building a batch and a step take; the machine has 16 processors and much memory."""
    monkeypatch.setattr(loader_tuner, "usable_processors", lambda: 16.0)
    for module in (loader_tuner, _training_loaders):
        monkeypatch.setattr(module, "host_room", lambda _=1: MUCH)

    def say(tuner: LoaderTuner, load: float, step: float = 0.1, **others: float) -> LoaderTuner:
        class Said(LoadTimes):
            start_wait = 0.0

            def measured(self, warm_up: int = 0):
                assert tuner._tuning is not None
                return simulated(tuner._tuning.plan, load, step, **others)

        monkeypatch.setattr(loader_tuner, "LoadTimes", Said)
        tuner._reset()
        return tuner

    return say


def loader(**options: Any) -> DataLoader:
    return DataLoader(Samples(), **{"batch_size": BATCH, "shuffle": True, **options})


def fit(
    *callbacks: Any,
    data: Any = None,
    module: Callable[[], Network] = Network,
    resume: Any = None,
    **options: Any,
):
    torch.manual_seed(0)
    network = module()
    torch.manual_seed(1)
    fitted = trainer(*callbacks, **{"max_steps": -1, "max_epochs": 2, **options})
    fitted.fit(network, **({"datamodule": data} if isinstance(data, LightningDataModule) else
                          {"train_dataloaders": loader() if data is None else data}), ckpt_path=resume)  # fmt: skip
    return network


def test_workers_are_set_within_the_first_epoch_and_the_training_is_the_same(times, caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch.utilities.rank_zero")
    tuner = times(LoaderTuner(), load=0.15)
    workers = Workers(tuner)
    tuned = fit(tuner, workers)
    assert workers.used == [0] * 12 + [3] * (2 * STEPS - 12)
    none = LoaderTuner(max_workers=0)
    untuned = fit(times(none, load=0.15), Workers(none))
    assert tuned.seen == untuned.seen
    assert torch.equal(tuned.layer.weight, untuned.layer.weight)
    said = [record.message for record in caplog.records if "LoaderTuner" in record.message]
    assert said[0] == (
        "LoaderTuner: 3 workers, 2 batches ahead each (no workers before). A batch took 150 ms to build and 100 ms to "
        "train on; the loop waited 60.0% of the time."
    )
    assert len(said) == 2


def test_samples_and_their_order_are_those_of_the_loader_without_it(times):
    plain = fit(module=Network)
    tuned = fit(times(LoaderTuner(), load=0.15))
    ours, theirs = (
        [[int(value) for value in batch[::2]] for batch in model.seen] for model in (tuned, plain)
    )
    # The augmentation draws from numbers of its own, so that the next epoch's shuffle finds others.
    assert ours[:STEPS] == theirs[:STEPS]
    assert sorted(sum(ours[STEPS:], [])) == list(range(SAMPLES))

    def generator():
        return torch.Generator().manual_seed(5)

    plain = fit(data=loader(generator=generator()))
    tuned = fit(times(LoaderTuner(), load=0.15), data=loader(generator=generator()))
    assert [batch[::2] for batch in tuned.seen] == [batch[::2] for batch in plain.seen]


@pytest.mark.parametrize(
    ("as_made", "asks"),
    [
        (0, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, True), (2, False), (2, True))),
    ],
)
@pytest.mark.parametrize(("step", "load"), [(5, 0.15), (STEPS, 0.15), (STEPS + 17, 0.05)])
@pytest.mark.long
def test_a_resumed_training_goes_on_with_the_batch_that_came_next(times, tmp_path, step, load, asks, as_made):
    def tuner():
        return times(LoaderTuner(), load=load)

    data = {"num_workers": as_made}
    path = tmp_path / "saved.ckpt"
    straight = fit(
        RandomState(),
        tuner(),
        Saves(path, step),
        data=loader(**data),
        module=partial(Network, asks),
        max_epochs=3,
    )
    assert "combined_loader" not in torch.load(path)["loops"]["fit_loop"]["state_dict"]
    resumed = fit(
        RandomState(), tuner(), data=loader(**data), module=partial(Network, asks), resume=path, max_epochs=3
    )
    assert resumed.seen == straight.seen[step:]
    assert torch.equal(resumed.layer.weight, straight.layer.weight)


def test_the_plan_is_in_the_checkpoint(times, tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(times(LoaderTuner(), load=0.15), Saves(path, STEPS + 2))
    tuner = times(LoaderTuner(), load=0.15)
    workers = Workers(tuner)
    fit(tuner, workers, resume=path)
    assert workers.used == [3] * (STEPS - 2)


@pytest.mark.filterwarnings("ignore:.*not resumable")
def test_a_checkpoint_goes_without_the_tuner_and_one_without_it_is_told_apart(times, tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(times(LoaderTuner(), load=0.15), Saves(path, 5))
    with pytest.warns(
        UserWarning, match="add the following callbacks: ..LoaderTuner"
    ):  # Lightning misses the callback
        fit(resume=path, max_epochs=1)
    fit(Saves(path, 5))
    with pytest.warns(UserWarning, match="begins the epoch anew: some batches come twice"):
        fit(times(LoaderTuner(), load=0.15), resume=path)


def packed(**batches: Any) -> PackedDataModule:
    documents = [[number % 200] * (number % 7 + 1) for number in range(300)]
    return PackedDataModule(
        documents, context=8, batch_size=4, documents=DocumentOptions(validation=0.0), batches=BatchOptions(**batches)
    )  # fmt: skip


class Packed(Network):
    def training_step(self, batch: Any, _: int) -> Tensor:
        self.seen.append(batch["input_ids"].flatten().tolist())
        return self.layer(batch["input_ids"][:, :2].float() / SAMPLES).square().mean()


def test_the_packed_loaders_workers_are_set_where_they_are(times, tmp_path):
    path = tmp_path / "saved.ckpt"
    tuner = times(LoaderTuner(), load=0.15)
    workers = Workers(tuner)
    tuned = fit(tuner, workers, Saves(path, 20), data=packed(), module=Packed)
    assert workers.used[:12] == [0] * 12
    assert set(workers.used[12:]) == {3}
    assert tuned.seen == fit(data=packed(), module=Packed).seen
    tuner = times(LoaderTuner(), load=0.15)
    workers = Workers(tuner)
    resumed = fit(tuner, workers, data=packed(num_workers=1), module=Packed, resume=path)
    assert resumed.seen == tuned.seen[20:]
    assert set(workers.used) == {3}


def test_a_loader_that_needs_no_workers_gives_them_up_between_epochs(times):
    tuner = times(LoaderTuner(), load=0.001, step=0.1)
    workers = Workers(tuner)
    fit(tuner, workers, data=packed(num_workers=2), module=Packed)
    steps = len(workers.used) // 2
    assert workers.used == [2] * steps + [0] * steps


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "shared", "most"), [({}, 2**40, 3), ({"max_workers": 2}, 2**40, 2), ({}, 100, 2), ({}, 60, 0)]
)
@pytest.mark.long
def test_workers_stay_within_memory_and_the_users_limit(times, monkeypatch, options, shared, most):
    tuner = times(LoaderTuner(**options), load=0.15)
    room = HostMemory(shared_bytes=shared, ram_bytes=2**40)
    monkeypatch.setattr(loader_tuner, "host_room", lambda _: room)  # a batch takes 4 * 2 * 4 bytes
    workers = Workers(tuner)
    fit(tuner, workers)
    assert workers.used[-1] == most


class Record(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[int, dict[str, float]]] = []

    name, version = "record", "0"  # pyright: ignore[reportAssignmentType]

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.values.append((step or 0, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def test_stall_fraction_and_workers_are_logged(times):
    logger = Record()
    fit(times(LoaderTuner(), load=0.15), logger=logger, log_every_n_steps=10, max_epochs=1)
    logged = {step: values for step, values in logger.values if "loader/stall_fraction" in values}
    assert list(logged) == [9, 19, 29]
    assert [values["loader/num_workers"] for values in logged.values()] == [0, 3, 3]
    assert all(0 < values["loader/stall_fraction"] < 1 for values in logged.values())
    assert {values["loader/load_ms"] for values in logged.values()} == {150.0}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.rand(SAMPLES, 2))


class Own:
    """A loader of the user's own make."""

    def __iter__(self):
        return iter(torch.rand(20, 2))

    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lambda: DataLoader(Stream(), batch_size=BATCH), "Stream is an IterableDataset"),
        (lambda: DataLoader(Samples(), BATCH, in_order=False), "in_order=False"),
        (lambda: {"a": loader(), "b": loader()}, "there are 2 training loaders"),
        (lambda: Own(), "Own is no torch DataLoader"),
    ],
)
def test_what_can_not_be_tuned_is_left_with_the_reason_and_still_logged(times, data, why):
    class Takes(Network):
        def training_step(self, batch: Any, _: int) -> Tensor:
            return super().training_step(batch["a"] if isinstance(batch, dict) else batch, _)

    logger = Record()
    with pytest.warns(NoEffectWarning, match=f"leaves the workers as they are: {why}"):
        fit(times(LoaderTuner(), load=0.15), data=data(), module=Takes, logger=logger, log_every_n_steps=10,
            max_epochs=1)  # fmt: skip
    assert any("loader/stall_fraction" in values for _, values in logger.values)


def test_a_packed_stream_is_left_with_what_sets_it():
    def documents():
        yield from ([number % 200] * (number % 7 + 1) for number in range(300))

    data = PackedDataModule(documents, context=8, batch_size=4, packing="stream",
                            documents=DocumentOptions(validation=0.0))  # fmt: skip
    with pytest.warns(NoEffectWarning, match="a stream is read by one thread"):
        fit(LoaderTuner(), data=data, module=Packed, max_epochs=1)


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_patched_is_given_back(times, fails):
    stock = data_connector._worker_check

    class Fails(Network):
        def training_step(self, batch: Any, _: int) -> Tensor:
            assert data_connector._worker_check is not stock
            if fails and len(self.seen) == 3:
                raise RuntimeError("a step that fails")
            return super().training_step(batch, _)

    fitted = trainer(times(LoaderTuner(), load=0.15), max_steps=5)
    if fails:
        with pytest.raises(RuntimeError, match="a step that fails"):
            fitted.fit(Fails(), loader())
    else:
        fitted.fit(Fails(), loader())
    assert data_connector._worker_check is stock
    assert "process_dataloader" not in vars(fitted.strategy)
    assert not {"_on_before_fetch", "_on_after_fetch"} & set(vars(fitted.fit_loop.epoch_loop))
    assert isinstance(fitted.train_dataloader, ResumableLoader)
    assert fitted.train_dataloader.times is None


def test_validation_keeps_its_own_loader(times):
    seen = []

    class Validates(Network):
        def validation_step(self, batch: Any, _: int) -> None:
            seen.append(type(self.trainer.val_dataloaders))

    fitted = trainer(times(LoaderTuner(), load=0.15), max_steps=5)
    fitted.fit(Validates(), loader(), loader(shuffle=False))
    assert set(seen) == {DataLoader}
    assert isinstance(fitted.train_dataloader, DataLoader)  # what other callbacks ask for


def test_the_same_callback_trains_twice(times):
    tuner = times(LoaderTuner(), load=0.15)
    first, second = (fit(tuner) for _ in range(2))
    assert first.seen == second.seen


def test_a_worker_that_dies_ends_the_training_with_its_batch(times, monkeypatch):
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))

    class Dies(Samples):
        def __getitem__(self, index: int) -> Tensor:
            if index == 4 * 20:
                os._exit(7)
            return super().__getitem__(index)

    with pytest.raises(BatchError, match="ended with exit code 7 while it built batch 20 of the epoch"):
        fit(times(LoaderTuner(), load=0.15), data=DataLoader(Dies(), BATCH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_stall": 2}, r"target_stall=2 is outside \(0, 1\); for 2 % write 0.02"),
        ({"target_stall": 0.0}, "target_stall=0.0 is outside"),
        ({"max_workers": -1}, "max_workers=-1 is below 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoaderTuner(**options)


# On an accelerator


class Hooked(Network):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert batch.device.type == "cpu"
        return batch


@pytest.mark.sampled(2)
@NEEDS_COMPILER
@pytest.mark.parametrize("load", [0.15, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("options", "callbacks", "module", "ahead"),
    [
        ({}, [], Network, True),
        ({"copy_ahead": False}, [], Network, False),
        ({}, [], Hooked, False),
        ({}, [partial(MemoryBudget, "1GiB", micro_batch_size=2)], Network, False),
    ],
)
@pytest.mark.long
def test_batches_are_copied_ahead_unless_somebody_wants_them_on_the_host(
    times, load, options, callbacks, module, ahead
):
    callbacks = [make() for make in callbacks]  # a parameter would keep the trainer until the session's end
    expected = fit(times(LoaderTuner(), load), *callbacks, module=partial(module, dropout=0.0))
    tuner, devices = times(LoaderTuner(**options), load), set()

    class Looks(Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            strategy, move = trainer.strategy, trainer.strategy.batch_to_device
            strategy.batch_to_device = lambda batch, *a, **k: (
                devices.add(batch.device.type) or move(batch, *a, **k)
            )

    with fake_device() as device:
        found = fit(
            tuner,
            *callbacks,
            Looks(),
            module=partial(module, dropout=0.0),
            accelerator="auto",
            **on_fake_device(),
        )
        assert device.hazards == 0
    assert devices == {"fake" if ahead else "cpu"}
    assert len(found.seen) == len(expected.seen)
    assert torch.equal(found.layer.weight.cpu(), expected.layer.weight)


@pytest.mark.parametrize("limit", [1.0, 3])
def test_a_fit_with_persistent_workers_sees_what_it_sees_without_the_callback(limit: float | int) -> None:
    found = []
    for callbacks in ([], [LoaderTuner(max_workers=0)], [LoaderTuner(max_workers=2)]):
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(2)
        data = DataLoader(
            torch.arange(24.0).reshape(12, 2),
            BATCH,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
            generator=generator if limit == 3 else None,
        )
        network = Network()
        trainer(*callbacks, max_steps=-1, max_epochs=3, limit_train_batches=limit).fit(network, data)
        weight = network.layer.weight.detach().tolist()
        found.append([network.seen, weight, torch.rand(1).item(), generator.get_state().tolist()])
    assert found[1] == found[0]
    assert found[2] == found[0]
