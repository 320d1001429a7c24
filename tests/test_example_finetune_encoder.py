"""The encoder example classifies texts: of the standard library, and of a JSONL with a saved encoder and tokenizer."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_memkit import MemoryBudget
from tests.examples import EXAMPLES, losses_in, train

pytestmark = pytest.mark.usefixtures("at_root")

NAME = "finetune_encoder"
TINY: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 259, "pad_token_id": 257, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


class Seen(pl.Callback):
    """Keeps what MemoryBudget says about its parts."""

    histories: list = []

    def on_train_end(self, trainer, pl_module):
        budget = next(one for one in vars(trainer)["callbacks"] if isinstance(one, MemoryBudget))
        self.histories.append(budget.history)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Texts of very different lengths whose label can be read off them."""
    path = tmp_path / "own.jsonl"
    texts = [
        {"text": word * (1 + number % 12), "label": word}
        for number, word in enumerate(["good ", "bad "] * 40)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in texts))
    return path


def test_own_texts_are_learned_in_parts(own: Path, tmp_path: Path, capsys) -> None:
    Seen.histories.clear()
    options = [
        f"--data.source={own}", '--data.names=["good ", "bad "]', "--data.longest=128", "--data.batch_size=32",
        "--data.validation=0.2", "--model.labels=2", f"--model.config={json.dumps(TINY)}",
        "--model.learning_rate=1e-2", "--trainer.max_steps=6", "--trainer.callbacks.budget=2MiB",
        "--trainer.callbacks+=tests.test_example_finetune_encoder.Seen",
    ]  # fmt: skip
    train(NAME, ["encoder.yaml"], tmp_path, *options)
    printed = capsys.readouterr().out
    losses = losses_in(printed)
    assert losses[-1] < losses[0] - 0.2, printed
    assert "val_accuracy" in printed
    (history,) = Seen.histories
    assert history[0].row_tokens == 55, history  # of the longest text; parts hold rows without their padding


@pytest.mark.slow
def test_the_config_as_it_is_learns_from_the_standard_library(tmp_path: Path, capsys) -> None:
    train(NAME, ["encoder.yaml"], tmp_path, "--trainer.max_steps=30")
    losses = losses_in(capsys.readouterr().out)
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.5, losses


@pytest.mark.slow
def test_a_saved_encoder_gets_a_new_head(own: Path, tmp_path: Path, capsys) -> None:
    from transformers import AutoTokenizer, BertConfig, BertModel

    options = {name: value for name, value in TINY.items() if name != "model_type"}
    BertModel(BertConfig(**options)).save_pretrained(tmp_path / "bert")
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "finetune_hf_causal_lm" / "tokenizer")
    tokenizer.save_pretrained(tmp_path / "bert")
    options = [
        f"--model.weights={tmp_path / 'bert'}", f"--data.tokenizer={tmp_path / 'bert'}", "--model.config={}",
        f"--data.source={own}", '--data.names=["good ", "bad "]', "--model.labels=2",
        "--model.learning_rate=1e-2", "--trainer.max_epochs=4", "--data.batch_size=16",
    ]  # fmt: skip
    train(NAME, ["encoder.yaml"], tmp_path, *options)
    losses = losses_in(capsys.readouterr().out)
    assert losses[-1] < losses[0] - 0.2, losses
