"""The contrastive example learns to find answers, with a batch that does not fit, within its budget."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_memkit import MemoryBudget
from tests.examples import losses_in, train

pytestmark = pytest.mark.usefixtures("at_root")

NAME = "contrastive"


class Seen(pl.Callback):
    """Keeps MemoryBudget and the metrics."""

    budgets: list[MemoryBudget] = []
    first: list[float] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.budgets += [one for one in vars(trainer)["callbacks"] if isinstance(one, MemoryBudget)]

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.first.append(float(trainer.callback_metrics["val_first"]))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Queries whose first word is the answer's last."""
    path = tmp_path / "own.jsonl"
    words = [f"{chr(97 + number % 26)}{chr(97 + number // 26)}" for number in range(320)]
    pairs = [{"query": f"{word} {word}", "answer": f"to {word}"} for word in words]
    path.write_text("".join(json.dumps(each) + "\n" for each in pairs))
    return path


def test_pairs_of_a_batch_that_does_not_fit_are_learned(own: Path, tmp_path: Path, capsys: Any) -> None:
    Seen.budgets.clear()
    Seen.first.clear()
    options = [
        f"--data.source={own}", "--data.batch_size=256", "--data.validation=64", "--data.longest=[6,6]",
        "--model.longest=[6,6]", "--model.width=32", "--model.layers=2", "--model.learning_rate=5e-3",
        "--trainer.max_epochs=25", "--trainer.check_val_every_n_epoch=25", "--trainer.callbacks.budget=7MiB",
        "--trainer.callbacks+=tests.test_example_contrastive.Seen",
    ]  # fmt: skip
    train(NAME, ["towers.yaml"], tmp_path, *options)
    printed = capsys.readouterr().out
    losses = losses_in(printed)
    assert losses[-1] < losses[0] - 1, printed
    assert Seen.first[-1] > 5 / 64
    (budget,) = Seen.budgets
    assert budget.sizing is not None
    assert budget.sizing.chunk_rows is not None
    assert budget.peak_bytes <= 7 * 2**20
