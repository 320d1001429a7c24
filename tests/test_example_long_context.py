"""The long-context example trains on a row that does not fit into its budget."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_memkit import MemoryBudget
from tests.examples import losses_in, train

pytestmark = pytest.mark.usefixtures("at_root")


class Seen(pl.Callback):
    """Keeps MemoryBudget."""

    budgets: list[MemoryBudget] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.budgets += [one for one in vars(trainer)["callbacks"] if isinstance(one, MemoryBudget)]


def test_a_row_that_does_not_fit_is_learned(tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "own.jsonl"
    text.write_text(('{"text": "' + "def pick(values): return sorted(values) " * 120 + '"}\n') * 10)
    size = {"model_type": "llama", "vocab_size": 259, "hidden_size": 32, "intermediate_size": 256}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    losses = {}
    for budget in ("1GiB", "9MiB"):
        Seen.budgets.clear()
        options = [
            f"--data.source={text}", "--data.context=2048", "--data.documents.validation=0.2",
            f"--model.config={size}",
            "--trainer.max_steps=4", f"--trainer.callbacks.budget={budget}",
            "--trainer.callbacks+=tests.test_example_long_context.Seen",
        ]  # fmt: skip
        train("long_context", ["row.yaml"], tmp_path, *options)
        losses[budget] = losses_in(capsys.readouterr().out)
        (seen,) = Seen.budgets
        assert seen.sizing is not None
        assert (seen.sizing.chunk_tokens is None) == (budget == "1GiB")
    assert losses["9MiB"] == pytest.approx(losses["1GiB"], abs=2e-3)
    assert len(losses["9MiB"]) == 4
    assert losses["9MiB"][-1] < losses["9MiB"][0]
