"""Guards Lightning's private names that plugins/seams/evaluation_loop.py relies on."""

import inspect
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.core.module import LightningModule
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_memkit.plugins.seams import evaluation_loop as seam
from lightning_memkit.plugins.seams.lightning_run import EvaluationRun
from tests.plugins.toys import TokenTagger, loader, trainer


def parameters_of(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # pyright: ignore[reportArgumentType]


class Tagger(TokenTagger):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("rows", float(len(batch["x"])), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        return len(batch["x"])


@pytest.mark.parametrize("loop", [_EvaluationLoop, _PredictionLoop])
def test_loops_still_move_and_step_a_batch_through_the_strategy(loop: Any) -> None:
    step = inspect.getsource(loop._evaluation_step if loop is _EvaluationLoop else loop._predict_step)
    order = [
        '"batch_to_device", batch, dataloader_idx=dataloader_idx',
        "_batch_start",
        "_call_strategy_hook(trainer, ",
    ]
    places = [step.index(text) for text in order[:2]] + [step.rindex(order[2])]
    assert places == sorted(places)
    assert parameters_of(loop._build_kwargs) == ["self", "batch", "batch_idx", "dataloader_idx"]
    assert parameters_of(loop._build_step_args_from_hook_kwargs) == ["self", "hook_kwargs", "step_hook_name"]
    assert isinstance(loop.num_dataloaders, property)


def test_the_names_of_results_and_connector_are_lightning_s() -> None:
    assert parameters_of(Strategy.batch_to_device) == ["self", "batch", "device", "dataloader_idx"]
    assert parameters_of(vars(_ResultCollection)["log"])[:4] == ["self", "fx", "name", "value"]
    assert "_current_fx" in inspect.getsource(_LoggerConnector.should_reset_tensors)
    assert "results.reset(metrics=False" in inspect.getsource(LightningModule.log)
    assert "_current_fx_name = hook_name" in inspect.getsource(call._call_strategy_hook)
    quiet = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    for loop in (
        quiet.validate_loop,
        quiet.test_loop,
        quiet.predict_loop,
        quiet.fit_loop.epoch_loop.val_loop,
    ):
        assert loop.batch_progress.current.ready == 0
    assert quiet.predict_loop._predictions == []
    assert quiet.predict_loop.max_batches == []
    assert quiet._active_loop is None
    assert quiet._results is None


class Watching:
    """A driver that runs batches as they are, and writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool, int]] = []

    def stays_on_host(self, step: seam.EvaluationStep) -> bool:
        self.asked.append((step.hook, step.starts_run, step.dataloader_idx))
        return False

    def run(self, step: seam.EvaluationStep) -> Any:
        self.asked.append((step.hook, step.given is not step.batch, len(step.batch["x"])))
        return step.forward(step.whole())


def test_a_driver_is_asked_for_every_batch_and_the_undo_gives_the_strategy_back() -> None:
    quiet, driver = trainer(), Watching()
    before = dict(vars(quiet.strategy))
    undo = seam.install(quiet, driver)
    values = quiet.validate(Tagger(), [loader(8, count=16), loader(4, count=4)], verbose=False)
    assert [one for one in driver.asked if one[2] < 2] == [
        ("validation_step", True, 0),
        ("validation_step", False, 0),
        ("validation_step", False, 1),
    ]
    assert values[0]["rows/dataloader_idx_0"] == 16
    undo()
    assert {name: vars(quiet.strategy).get(name) for name in ("batch_to_device", *seam.HOOKS)} == {
        name: before.get(name) for name in ("batch_to_device", *seam.HOOKS)
    }


def test_an_undo_puts_back_what_was_replaced_before() -> None:
    quiet = trainer()
    mine = quiet.strategy.batch_to_device
    quiet.strategy.batch_to_device = mine
    seam.install(quiet, Watching())()
    assert vars(quiet.strategy)["batch_to_device"] is mine


def test_held_entries_are_not_counted_and_trials_reset_nothing() -> None:
    seen: list[list[dict[str, Any]]] = []

    class Twice(Watching):
        def run(self, step: seam.EvaluationStep) -> Any:
            with run.nothing_logged() as held:
                step.forward(step.whole())
            seen.append(held)
            before = run.keep_results()
            step.forward(step.whole())
            before()
            return super().run(step)

    quiet = trainer()
    run = EvaluationRun(quiet)
    seam.install(quiet, Twice())
    values = quiet.validate(Tagger(), loader(8, count=16), verbose=False)
    assert values == [{"rows": 16.0}]
    assert [(entry["fx"], entry["name"], float(entry["value"])) for held in seen for entry in held] == [
        ("validation_step", "rows", 8.0),
        ("validation_step", "rows", 8.0),
    ]


def test_how_many_predictions_are_kept() -> None:
    seen: list[float] = []

    class Asks(Watching):
        def run(self, step: seam.EvaluationStep) -> Any:
            seen.append(step.outputs_kept)
            return super().run(step)

    for returned in (True, False):
        quiet = trainer()
        seam.install(quiet, Asks())
        quiet.predict(Tagger(), loader(8, count=24), return_predictions=returned)
    assert seen == [3, 0, 0, 0, 0, 0]
