"""The probe within Lightning: it stops a training that leaks, and a training that doesn't ends as without it."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from examples.pretrain_causal_lm.model import CausalLM
from lightning_memkit import MemoryBudget, NoEffectWarning, packed_attention
from lightning_memkit.attention.adapters import use_packed_attention
from lightning_memkit.attention.contamination import ContaminationError
from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.plugins.callbacks import contamination
from lightning_memkit.plugins.callbacks.contamination import ContaminationProbe
from tests.attention.test_transformers import model_of
from tests.distributed.launch import two_ranks
from tests.plugins.noise import NOISE
from tests.plugins.toys import trainer, weights

pytestmark = NOISE


class Batches:
    """Batches of 4 rows of 48 tokens: documents of several lengths, then padding."""

    def __init__(self, *, documents: int = 4) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[PackedBatch]:
        generator = np.random.default_rng(0)
        for _ in range(len(self)):
            rows = [generator.integers(5, 11, self.documents).tolist() for _ in range(4)]
            yield batch_of([[*row, 48 - sum(row)] for row in rows], generator)


def batch_of(rows: list[list[int]], generator: np.random.Generator) -> PackedBatch:
    """Rows of segments of these lengths, each row's last one padding."""
    tokens = torch.from_numpy(generator.integers(0, 64, (len(rows), sum(rows[0]))))
    bounds = [0, *np.cumsum(rows).tolist()]
    labels, positions = tokens.flatten().clone(), torch.zeros(tokens.numel(), dtype=torch.int64)
    padding = set(range(len(rows[0]) - 1, len(bounds) - 1, len(rows[0])))
    for number, (begin, end) in enumerate(pairwise(bounds)):
        positions[begin:end] = torch.arange(end - begin) + (number in padding)
        labels[begin : end if number in padding else begin + 1] = -100
    return PackedBatch(
        input_ids=tokens,
        labels=labels.view_as(tokens),
        position_ids=positions.view_as(tokens),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=max(map(max, rows)),
    )


def leaking(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def model(attention: Any = packed_attention, kind: type[CausalLM] = CausalLM) -> CausalLM:
    torch.manual_seed(0)
    return kind(64, width=32, layers=2, heads=2, attention=attention, warmup_steps=2)


def test_a_leak_stops_the_training_before_its_first_step():
    module = model(leaking)
    before = weights(module)
    fitted = trainer(ContaminationProbe(), max_steps=3)
    with pytest.raises(
        ContaminationError, match=r"First seen in the output of blocks.0.out .*packed_attention"
    ):
        fitted.fit(module, Batches())
    assert fitted.global_step == 0
    assert torch.equal(weights(module), before)


def dropped(block: Any, given: Any, out: Any) -> Tensor:
    return F.dropout(out, 0.1)


class Dropping(CausalLM):
    """Drops activations, and counts its rows: micro-batches count the same."""

    rows = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rows += len(batch["input_ids"])
        drop = self.blocks[0].register_forward_hook(dropped)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            drop.remove()


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.long
def test_a_training_ends_as_without_the_probe(budget):
    ends, logged = [], []
    for probe in ([], [ContaminationProbe()]):
        module = model(kind=Dropping)
        torch.manual_seed(1)
        callbacks = [*probe, *([MemoryBudget("1GiB", budget)] if budget else [])]
        fitted = trainer(*callbacks, max_steps=4, accumulate_grad_batches=1)
        fitted.fit(module, Batches())
        ends.append((weights(module), torch.get_rng_state(), module.rows))
        logged.append(fitted.callback_metrics)
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2] == ends[1][2]
    assert logged[0].keys() == logged[1].keys()
    assert torch.equal(logged[0]["train_loss"], logged[1]["train_loss"])


def test_it_runs_once_a_fit():
    forwards: list[int] = []  # not the module's own, which the probe puts back

    class Counting(CausalLM):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            forwards.append(batch_idx)
            return super().training_step(batch, batch_idx)

    module = model(kind=Counting)
    trainer(ContaminationProbe(), max_steps=4).fit(module, Batches())
    assert len(forwards) == 4 + 4
    trainer(max_steps=4).fit(module, Batches())
    assert len(forwards) == 4 + 4 + 4


class HuggingFace(LightningModule):
    """The whole batch is handed to a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of("LlamaForCausalLM").train()

    def training_step(self, batch: Any) -> Tensor:
        given = dict(batch) if self.model.config._attn_implementation.startswith("memkit") else {
            key: batch[key] for key in ("input_ids", "position_ids", "labels")
        }  # fmt: skip
        return self.model(**given).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def test_a_model_of_transformers_is_stopped_and_after_the_switch_trained():
    module = HuggingFace()
    with pytest.raises(
        ContaminationError, match=r"model.model.layers.0.self_attn.*use_packed_attention\(model\)"
    ):
        trainer(ContaminationProbe(), max_steps=2).fit(module, Batches())
    use_packed_attention(module)
    fitted = trainer(ContaminationProbe(), max_steps=2)
    fitted.fit(module, Batches())
    assert fitted.global_step == 2


class Manual(CausalLM):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_what_can_not_be_probed_is_said():
    with pytest.warns(NoEffectWarning, match="with manual optimization training_step steps the optimizer"):
        trainer(ContaminationProbe(), max_steps=2).fit(model(leaking, Manual), Batches())

    def plain(rows: Any) -> dict[str, Tensor]:
        tokens = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": tokens, "labels": tokens}

    rows: Any = [{"input_ids": torch.randint(0, 64, (16,))} for _ in range(8)]
    with pytest.warns(NoEffectWarning, match="the batches are no PackedBatch but dict"):
        trainer(ContaminationProbe(), max_steps=1).fit(model(leaking), DataLoader(rows, 4, collate_fn=plain))


def test_a_document_a_row_is_not_probed():
    fitted = trainer(ContaminationProbe(), max_steps=10)
    fitted.fit(model(leaking), Batches(documents=0))
    assert fitted.global_step == 10


def test_so_many_batches_of_a_document_a_row_are_named(monkeypatch):
    monkeypatch.setattr(contamination, "_TRIED_BATCHES", 3)
    with pytest.warns(NoEffectWarning, match="no row of the first 3 batches holds two documents"):
        trainer(ContaminationProbe(), max_steps=4).fit(model(leaking), Batches(documents=0))


@pytest.mark.parametrize("attention", [None, leaking], ids=["apart", "leaking"])
def test_of_several_loaders_each_step_gets_the_number_of_its_own(attention):
    """The first loader's batches are not packed, and are left alone."""
    seen: list[tuple[int, type]] = []

    class Two(CausalLM):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            seen.append((dataloader_idx, type(batch)))
            if dataloader_idx:
                super().validation_step(batch, batch_idx)

    module = model(**({} if attention is None else {"attention": attention}), kind=Two)
    loaders: Any = [DataLoader(TensorDataset(torch.zeros(4, 1)), 2), Batches()]
    run = trainer(ContaminationProbe(), limit_val_batches=2)
    if attention is None:
        run.validate(module, loaders, verbose=False)
    else:
        with pytest.raises(ContaminationError, match="see each other"):
            run.validate(module, loaders, verbose=False)
    assert {number: kind is PackedBatch for number, kind in seen} == {0: False, 1: True}


def test_memory_for_one_row_is_enough():
    sizes: list[int] = []

    class Narrow(CausalLM):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if not torch.is_grad_enabled():
                sizes.append(len(batch["input_ids"]))
                if len(batch["input_ids"]) > 1:
                    raise torch.OutOfMemoryError("two rows are too many")
            return super().training_step(batch, batch_idx)

    trainer(ContaminationProbe(), max_steps=1).fit(model(kind=Narrow), Batches())
    assert sizes == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_two_ranks_agree(strategy, tmp_path):
    """One rank's rows hold one document each: it runs along, and stops where the other finds a leak."""
    first, second = two_ranks("two_ranks_contamination", tmp_path, strategy)["ends"]
    assert first["fit, clean"] == second["fit, clean"] == "2 steps"
    assert first["validate, clean"] == second["validate, clean"] == "0 steps"
    for name in ("fit, leak", "validate, leak"):
        assert "of row 1 change with other documents" in first[name]
        assert "on another rank, whose error names the place" in second[name]
