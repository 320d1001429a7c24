"""The fine-tuning example learns answers, from random weights, a folder's, and a folder's that are streamed."""

import json
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from tests.examples import EXAMPLES, losses_in, train

NAME = "finetune_hf_causal_lm"
CHAT, TOKENIZER = EXAMPLES / NAME / "chat.jsonl", EXAMPLES / NAME / "tokenizer"
TINY = {
    "model_type": "llama", "vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip
SHORT = [
    "--data.batch_size=4",
    "--data.documents.limit=16",
    "--data.documents.validation=0",
    "--trainer.limit_val_batches=0",
    "--model.warmup_steps=1",
]
pytestmark = [
    pytest.mark.usefixtures("at_root"),
    pytest.mark.filterwarnings("ignore:PagedAdamW8bit moves its states"),  # on a GPU it pages
    pytest.mark.filterwarnings("ignore:torch_dtype is deprecated"),
]


class Weights(pl.Callback):
    """Keeps a run's weights for the test: before its first step and after its last."""

    runs: list[tuple[dict, dict]] = []

    def on_train_start(self, trainer, pl_module):
        self.first = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_end(self, trainer, pl_module):
        self.runs.append((self.first, {name: p.detach().clone() for name, p in pl_module.named_parameters()}))


def test_random_weights_learn_the_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = json.dumps(TINY)
    train(NAME, ["finetune.yaml"], tmp_path, *SHORT, f"--model.config={config}", "--trainer.max_steps=6")
    printed = capsys.readouterr().out
    losses = losses_in(printed)
    assert losses[-1] < losses[0] - 0.3, printed
    assert re.search(
        r"PagedAdamW8bit: .* with 8-bit states.*: model.model.embed_tokens.weight\.", caplog.text
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` leaves it."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    options = {name: value for name, value in TINY.items() if name != "model_type"}
    LlamaForCausalLM(LlamaConfig(**options)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_weights_of_a_folder_loaded_or_streamed_train_alike(saved: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    Weights.runs.clear()
    options = [
        *SHORT,
        f"--data.tokenizer={saved}",
        "--trainer.max_steps=2",
        "--trainer.callbacks+=tests.test_example_finetune_hf_causal_lm.Weights",
    ]
    train(NAME, ["finetune.yaml"], tmp_path, f"--model.weights={saved}", *options)
    streamed = [f"--model.config={saved}", f"--trainer.callbacks.source={saved}"]
    train(NAME, ["finetune.yaml", "streamed_weights.yaml"], tmp_path, *streamed, *options)
    given = AutoModelForCausalLM.from_pretrained(saved).bfloat16()
    loaded, streamed = Weights.runs
    for name, value in given.named_parameters():
        assert torch.equal(loaded[0][f"model.{name}"], value)
        assert torch.equal(streamed[0][f"model.{name}"], value)
    for name, value in loaded[1].items():
        assert torch.equal(streamed[1][name], value), name
        assert value.isfinite().all()
    assert any(not torch.equal(value, loaded[0][name]) for name, value in loaded[1].items())


def test_only_answers_have_labels() -> None:
    from transformers import AutoTokenizer

    from lightning_memkit import PackedDataModule
    from lightning_memkit.data.sources.shares import DocumentOptions

    lines = CHAT.read_text(encoding="utf-8").splitlines()[:8]
    data = PackedDataModule(
        [json.loads(line) for line in lines], str(TOKENIZER), context=256, batch_size=8, packing="none",
        documents=DocumentOptions(validation=0.0),
    )  # fmt: skip
    data.setup()
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    (batch,) = data.train_dataloader()
    learned = sorted(
        tokenizer.decode(ids[labels != -100])
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    )
    answers = [
        [turn["content"] for turn in json.loads(line)["messages"] if turn["role"] == "assistant"]
        for line in lines
    ]
    assert learned == sorted("".join(f"{answer}<|im_end|>\n" for answer in each) for each in answers)
