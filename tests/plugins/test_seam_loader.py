"""Guards Lightning's private names that plugins/seams/loaders.py relies on."""

import inspect

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors import data_connector
from torch.utils.data import DataLoader

from lightning_memkit.plugins.seams import loaders
from tests.plugins.noise import NOISE
from tests.plugins.toys import TokenTagger, loader, trainer

pytestmark = NOISE


def test_loaders_are_prepared_checked_and_replaced_where_we_do() -> None:
    source = inspect.getsource(data_connector._process_dataloader)
    order = ("trainer.strategy.process_dataloader(dataloader)", "_worker_check(", "_auto_add_worker_init_fn(")
    places = [source.index(name) for name in order]
    assert places == sorted(places)
    assert list(inspect.signature(data_connector._worker_check).parameters) == [
        "trainer",
        "dataloader",
        "name",
    ]
    assert "_process_dataloader(trainer, trainer_fn, stage, dl)" in inspect.getsource(_FitLoop.setup_data)


def test_fetches_are_profiled_by_bound_methods_that_are_looked_up_every_epoch() -> None:
    source = inspect.getsource(_TrainingEpochLoop.on_run_start)
    assert "data_fetcher._start_profiler = self._on_before_fetch" in source
    assert "data_fetcher._stop_profiler = self._on_after_fetch" in source


def test_a_fit_shows_its_fetches_its_batches_and_its_loaders() -> None:
    calls: list[str] = []
    left: list[float] = []

    class Looks(TokenTagger):
        def on_train_batch_end(self, *args: object) -> None:
            left.append(loaders.batches_left(self.trainer))
            assert not loaders.is_within_an_epoch(self.trainer)
            assert [type(one) for one in loaders.training_loaders(self.trainer)] == [DataLoader]

    fitted = trainer(max_steps=-1, max_epochs=1)
    undo = loaders.watch_fetches(fitted, lambda: calls.append("begins"), lambda: calls.append("ends"))
    assert loaders.training_loaders(fitted) == []
    fitted.fit(Looks(), loader(count=24))
    assert calls == ["begins", "ends"] * 3
    assert left == [2, 1, 0]
    undo()
    assert "_on_before_fetch" not in vars(fitted.fit_loop.epoch_loop)


def test_the_states_of_loaders_lie_where_they_are_forgotten() -> None:
    class Stateful(DataLoader):
        def state_dict(self) -> dict:
            return {"here": 1}

        def load_state_dict(self, state: dict) -> None:
            raise AssertionError(state)

    saved = {}

    class Saves(TokenTagger):
        def on_save_checkpoint(self, checkpoint: dict) -> None:
            saved.update(checkpoint)

    fitted = trainer(max_steps=1)
    rows = loader().dataset
    fitted.fit(Saves(), Stateful(rows, batch_size=8))
    fitted._checkpoint_connector.dump_checkpoint()
    assert saved["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"here": 1}]
    loaders.forget_loader_states(saved)
    assert "combined_loader" not in saved["loops"]["fit_loop"]["state_dict"]
    loaders.forget_loader_states({})


def test_the_users_hooks_before_the_transfer_are_found() -> None:
    class Hooked(LightningModule):
        def transfer_batch_to_device(self, batch: object, device: object, dataloader_idx: int) -> object:
            return batch

    fitted = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=False)
    fitted.strategy._lightning_module = TokenTagger()
    assert loaders.transfer_hooks(fitted) == []
    fitted.strategy._lightning_module = Hooked()
    assert loaders.transfer_hooks(fitted) == ["Hooked.transfer_batch_to_device"]
