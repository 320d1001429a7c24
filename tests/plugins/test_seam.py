"""Guards Lightning's private names that training_loop.py, strategy.py and logged.py of plugins/seams rely on."""

import inspect

from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization import automatic
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_memkit import MemoryBudget
from tests.plugins.toys import TokenTagger, loader, trained, trainer


def parameters_of(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # pyright: ignore[reportArgumentType]


def test_the_loop_still_makes_its_closure_where_we_do() -> None:
    loop = automatic._AutomaticOptimization
    assert parameters_of(loop._make_closure) == ["self", "kwargs", "optimizer", "batch_idx"]
    assert parameters_of(loop._make_zero_grad_fn) == ["self", "batch_idx", "optimizer"]
    assert parameters_of(loop._make_backward_fn) == ["self", "optimizer"]
    assert parameters_of(loop.run) == ["self", "optimizer", "batch_idx", "kwargs"]
    assert parameters_of(automatic.Closure.closure) == ["self", "args", "kwargs"]
    source = inspect.getsource(automatic.Closure.closure)
    assert source.index("_step_fn()") < source.index("_zero_grad_fn()") < source.index("_backward_fn(")


def test_results_and_hooks_keep_their_names() -> None:
    assert parameters_of(vars(_ResultCollection)["log"])[:4] == ["self", "fx", "name", "value"]
    assert hasattr(call, "_call_strategy_hook")
    source = inspect.getsource(_TrainingEpochLoop)
    assert "train_dataloader_next" in source
    assert '"batch_to_device"' in source
    epoch_loop = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu").fit_loop.epoch_loop
    assert isinstance(epoch_loop._results, _ResultCollection)
    assert isinstance(epoch_loop.automatic_optimization, automatic._AutomaticOptimization)


def test_the_seam_is_given_back_and_state_dict_keys_are_lightning_s() -> None:
    fitted = trainer(MemoryBudget("1GiB", micro_batch_size=3), max_steps=2)
    loop = fitted.fit_loop.epoch_loop
    stock, keys = loop.automatic_optimization, set(loop.state_dict())
    seen = {}

    class Look(TokenTagger):
        def on_train_batch_end(self, *args: object) -> None:
            seen["loop"] = type(loop.automatic_optimization).__name__
            seen["keys"] = set(loop.state_dict())

    fitted.fit(Look(), loader())
    assert seen == {"loop": "PartsOptimization", "keys": keys}
    assert loop.automatic_optimization is stock
    assert "batch_to_device" not in vars(fitted.strategy)
    assert stock.optim_progress.optimizer_steps == 2


def test_zero_grad_and_steps_are_counted_once_a_batch() -> None:
    _, plain = trained(max_steps=5)
    _, split = trained(MemoryBudget("1GiB", micro_batch_size=3), max_steps=5)
    progress = [
        t.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict() for t in (plain, split)
    ]
    assert progress[0] == progress[1]
    assert plain.global_step == split.global_step == 5
