"""Rows by hand: what is on the host, on other ranks, in chunks or released is counted so."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_memkit import (
    ActivationCheckpointing,
    ChunkedLoss,
    GradientRelease,
    OptimizerOffload,
    PureBF16Precision,
    predict_memory,
)
from lightning_memkit.planning.choices import (
    GIVEN,
    Choice,
    checkpointings,
    losses,
    offloads,
    precisions,
    releases,
    shardings,
)
from lightning_memkit.planning.explained import beside_prediction
from lightning_memkit.planning.problem import ChunkLimits, Row
from lightning_memkit.prediction.devices import DEVICES
from tests.planning.test_search import all_families

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")

GPU, LAYERS, WIDTH, WORDS, LENGTH = "h100-80gb", 3, 64, 2048, 32


class Llama(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            use_cache=False,
        )
        self.model = transformers.LlamaForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def row(predicted: Any, **columns: Choice) -> Row:
    chosen = {name: (choice,) for name, choice in columns.items()}
    family = all_families(**{"precision": precisions(None)[-1:], **chosen})[0]
    return Row(family=family, micro_batch_size=2, prediction=predicted)


def line(table: str, name: str) -> str:
    return next(text for text in table.splitlines() if text.startswith(name))


@pytest.mark.long
def test_what_is_released_on_the_host_and_in_chunks():
    kept = [ActivationCheckpointing("full"), ChunkedLoss(), OptimizerOffload(), GradientRelease()]
    given = {"plugins": PureBF16Precision(), "callbacks": kept}
    predicted = predict_memory(Llama, batch(), trainer=given, device=GPU)
    chosen = row(
        predicted,
        offload=offloads(DEVICES[GPU])[2],
        gradients=releases()[1],
        checkpointing=checkpointings()[-1],
        loss=losses()[1],
    )
    decided = ("precision", "offload", "gradients", "checkpointing", "loss")
    as_given = row(predicted, **{name: Choice(column=name, name=GIVEN) for name in decided})
    tables = beside_prediction(chosen, Llama(), batch()), beside_prediction(as_given, Llama(), batch(), given)
    assert tables[0] == tables[1]
    largest = WORDS * WIDTH
    assert f"{largest:,} × 2" in line(tables[0], "the largest gradient")
    assert f"{largest:,} × 4" in line(tables[0], "states of adamw of the largest parameter")
    assert f"{LAYERS} layers" in line(tables[0], "inputs of the blocks")
    assert f"{WORDS:,}·{WIDTH} × 4 / 3" in line(tables[0], "a chunk of logits")
    assert "log-softmax" not in tables[0]
    assert f"{2 * LENGTH * 8}.0" in line(tables[0], "batch") or "512 B" in line(tables[0], "batch")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.long
def test_what_other_ranks_have(stage):
    choice = shardings(None)[stage - 1]
    given = {"plugins": PureBF16Precision(), "callbacks": [ActivationCheckpointing("full")], "devices": 4}
    trainer = {**given, "strategy": choice.arguments["strategy"]}
    predicted = predict_memory(Llama, batch(), trainer=trainer, device=GPU)
    table = beside_prediction(row(predicted, ranks=choice, loss=losses()[0]), Llama(), batch(), given)
    for name in ("weights", "gradients", "states of adamw", "compensation"):
        assert line(table, name).split("  ")[0] == name
        assert "/ 4" in line(table, name)
    gathered = "a block and the next gathered" if stage == 3 else f"{LAYERS} blocks gathered"
    assert line(table, gathered)
    assert line(table, "the rest gathered")


def test_rows_in_chunks_of_tokens_say_what_the_calculation_leaves_out():
    given = {"plugins": PureBF16Precision(), "callbacks": []}
    predicted = predict_memory(Llama, batch(), trainer=given, device=GPU)
    plain = row(predicted)
    chunked = replace(plain, chunks=ChunkLimits(tokens=8))
    without, shown = (beside_prediction(one, Llama(), batch(), given) for one in (plain, chunked))
    note = "By hand without modules in chunks of 8 tokens: activations are less as predicted."
    assert shown == f"{without}\n{note}"
