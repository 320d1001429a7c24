import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser

from lightning_memkit.attention.contamination import ContaminationError
from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.data.loading.batch_options import BatchOptions
from lightning_memkit.data.loading.loader import PackedLoader
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.plugins.data.packed_data import PackedDataModule
from lightning_memkit.utilities.errors import MissingPackageError

SHARES = DocumentOptions(validation=0.2)


def documents(count: int, longest: int = 12, seed: int = 0) -> list[list[int]]:
    """Documents in which every token of the corpus is another."""
    lengths = np.random.default_rng(seed).integers(1, longest + 1, count)
    ends = np.cumsum(lengths)
    return [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]


class Recorder(pl.LightningModule):
    """Trains one weight; remembers the tokens of every batch."""

    def __init__(self, asks_for_stepping_batches: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.asks_for_stepping_batches = asks_for_stepping_batches
        self.seen: list[list[int]] = []

    def training_step(self, batch: PackedBatch) -> torch.Tensor:
        assert isinstance(batch, PackedBatch)
        self.seen.append(batch["input_ids"].flatten().tolist())
        return self.weight * 1.0

    def validation_step(self, batch: PackedBatch) -> None:
        assert isinstance(batch, PackedBatch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks_for_stepping_batches:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saver(pl.Callback):
    """Saves where ModelCheckpoint does, with no state of its own that a resume would ask for."""

    def __init__(self, path, *, step=None, epoch=None, validated_at=None) -> None:
        self.path, self.step, self.epoch, self.validated_at = path, step, epoch, validated_at

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer, _):
        if trainer.global_step == self.validated_at:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, _):
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def fit(model: Recorder, data: PackedDataModule, *callbacks, resume=None, **options) -> Recorder:
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, "logger": False, **options},
    )
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    return model


def module(num_workers: int = 0, **options) -> PackedDataModule:
    options = {"context": 16, "batch_size": 4, "documents": SHARES, **options}
    return PackedDataModule(documents(60), **{"batches": BatchOptions(num_workers=num_workers), **options})


BATCHES = 6  # an epoch of `module()`; the last is smaller


def test_the_epochs_of_these_tests_are_of_the_length_they_assume():
    data = module()
    data.setup()
    loader = data.train_dataloader()
    assert isinstance(loader, PackedLoader)
    assert len(loader) == BATCHES
    assert len(loader.rows) % 4 != 0


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a single core
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("step", [2, BATCHES - 1, BATCHES, BATCHES + 1, 2 * BATCHES])
def test_a_resumed_run_sees_the_batches_of_the_uninterrupted_one(tmp_path, step, num_workers):
    path = tmp_path / "saved.ckpt"
    whole = fit(Recorder(), module(num_workers), Saver(path, step=step))
    resumed = fit(Recorder(), module(num_workers), resume=path)
    assert len(whole.seen) == 3 * BATCHES
    assert resumed.seen == whole.seen[step:]


@pytest.mark.parametrize("step", [2, 4, 5])
@pytest.mark.parametrize("options", [{"limit_train_batches": 4}, {"max_epochs": -1, "max_steps": 14}])
def test_limits_do_not_disturb_a_resume(tmp_path, step, options):
    path = tmp_path / "saved.ckpt"
    whole = fit(Recorder(), module(), Saver(path, step=step), **options)
    resumed = fit(Recorder(), module(), resume=path, **options)
    assert resumed.seen == whole.seen[step:]


@pytest.mark.parametrize("step", [2, BATCHES])
def test_a_resume_is_exact_where_the_schedule_asks_for_the_number_of_steps(tmp_path, step):
    path = tmp_path / "saved.ckpt"
    whole = fit(Recorder(True), module(), Saver(path, step=step))
    resumed = fit(Recorder(True), module(), resume=path)
    assert resumed.seen == whole.seen[step:]


def test_an_epoch_end_checkpoint_resumes_with_the_next_epoch(tmp_path):
    path = tmp_path / "saved.ckpt"
    whole = fit(Recorder(), module(), Saver(path, epoch=0))
    resumed = fit(Recorder(), module(), resume=path)
    assert resumed.seen == whole.seen[BATCHES:]


def test_every_epoch_has_another_order():
    seen = fit(Recorder(), module()).seen
    assert seen[:BATCHES] != seen[BATCHES : 2 * BATCHES]


@pytest.mark.parametrize("step", [3, 6, 9])
def test_a_checkpoint_of_a_validation_resumes_with_the_next_batch(tmp_path, step):
    path = tmp_path / "saved.ckpt"
    whole = fit(Recorder(), module(), Saver(path, validated_at=step), val_check_interval=3)
    resumed = fit(Recorder(), module(), resume=path, val_check_interval=3)
    assert resumed.seen == whole.seen[step:]


def test_a_resume_with_other_data_is_refused(tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(Recorder(), module(), Saver(path, step=2))
    with pytest.raises(ValueError, match="rows_per_step: 4 then, 8 now"):
        fit(Recorder(), module(batch_size=8), resume=path)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_training_draws_nothing_from_torchs_random_numbers():
    torch.manual_seed(3)
    untouched = torch.get_rng_state()
    data = module(num_workers=2)
    data.setup()
    list(data.train_dataloader())
    assert torch.equal(torch.get_rng_state(), untouched)


def test_overfitting_repeats_the_same_batches():
    seen = fit(Recorder(), module(), overfit_batches=2).seen
    assert len(seen) == 6
    assert seen[:2] == seen[2:4] == seen[4:]


def test_shares_hold_every_document_once_and_each_share_its_own_rows():
    data = module(documents=DocumentOptions(validation=0.2, test=0.2))
    data.setup()
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    tokens = [sorted(real_tokens(batch) for batch in loader) for loader in loaders]
    flat = [token for share in tokens for batch in share for token in batch]
    assert sorted(flat) == [token for document in documents(60) for token in document]
    assert all(tokens)


def real_tokens(batch: PackedBatch) -> list[int]:
    """The tokens that aren't padding, by the segments that the batch itself declares."""
    starts = batch["cu_seqlens"].tolist()
    flat, positions = batch["input_ids"].flatten().tolist(), batch["position_ids"].flatten().tolist()
    return [
        token
        for begin, end in zip(starts, starts[1:], strict=False)
        if positions[begin] == 0
        for token in flat[begin:end]
    ]


def test_validation_repeats_the_same_batches_and_testing_falls_back_on_it():
    data = module()
    data.setup()
    first, again = (list(data.val_dataloader()) for _ in range(2))
    tested = list(data.test_dataloader())
    for one, two, three in zip(first, again, tested, strict=True):
        assert torch.equal(one["input_ids"], two["input_ids"])
        assert torch.equal(one["input_ids"], three["input_ids"])


def test_a_limit_draws_that_many_documents():
    data = module(documents=DocumentOptions(limit=7, validation=0.5))
    data.setup()
    drawn = [*data.train_dataloader(), *data.val_dataloader()]
    assert sum(batch.documents for batch in drawn) == 7


def test_the_worst_batch_is_as_long_as_the_longest_and_one_document_a_row():
    data = module(batch_size=3, packing="none")
    data.setup()
    longest = max(batch.length for batch in [*data.train_dataloader(), *data.val_dataloader()])
    worst = data.worst_batch(5)
    assert (worst.rows, worst.length, worst.documents) == (5, longest, 5)
    assert worst["input_ids"].max() < data.vocabulary_size


def test_the_worst_batch_is_a_whole_context_before_the_documents_are_known():
    assert PackedDataModule("no-file-is-read.txt", context=64).worst_batch(2).length == 64


def test_text_files_become_bytes_between_marks(tmp_path):
    (tmp_path / "poem.txt").write_text("first lines\nof one\n\n\nsecond", encoding="utf-8")
    data = PackedDataModule(str(tmp_path / "poem.txt"), context=64, documents=DocumentOptions(validation=0.0))
    data.setup()
    (batch,) = data.train_dataloader()
    expected = [256, *b"first lines\nof one", 257, 256, *b"second", 257]
    assert real_tokens(batch) == expected
    assert data.vocabulary_size == 259


def test_jsonl_reads_the_named_field(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(json.dumps({"body": text}) for text in ("a", "bc")), encoding="utf-8")
    options = DocumentOptions(text_field="body", validation=0.0)
    data = PackedDataModule(str(path), context=8, documents=options)
    data.setup()
    (batch,) = data.train_dataloader()
    assert sorted(real_tokens(batch)) == sorted([256, *b"a", 257, 256, *b"bc", 257])


def test_a_hugging_face_dataset_is_read_by_its_input_ids():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"input_ids": documents(60), "other": [0] * 60})
    theirs, ours = PackedDataModule(dataset, context=16, documents=SHARES), module()
    theirs.setup()
    ours.setup()
    assert theirs.summary() == ours.summary()


def test_the_summary_counts_what_was_cut(caplog):
    data = PackedDataModule(
        [[1] * 10, [2] * 3],
        context=4,
        long_documents="truncate",
        documents=DocumentOptions(validation=0.0),
    )
    assert "1 truncated (6 tokens dropped)" in (data.setup() or data.summary())


def test_the_summary_begins_with_the_vocabulary(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    of_bytes = PackedDataModule(str(tmp_path), context=64, documents=DocumentOptions(validation=0.0))
    of_bytes.setup()
    assert of_bytes.summary().splitlines()[0] == "vocabulary: 259 token ids"
    of_ids = PackedDataModule([[5, 1200], [7]], context=4, documents=DocumentOptions(validation=0.0))
    of_ids.setup()
    assert of_ids.summary().splitlines()[0] == "vocabulary: 1,201 token ids"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context=0 is below 1"),
        ({"batch_size": 0}, "batch_size=0 is below 1"),
        ({"packing": "ffd"}, "packing='ffd' is unknown"),
        ({"long_documents": "drop"}, "long_documents='drop' is unknown"),
        ({"batches": BatchOptions(num_workers=-1)}, "num_workers=-1 is below 0"),
        ({"batches": {"multiple_of": 0}}, "multiple_of=0 is below 1"),
    ],
)
def test_bad_options_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        module(**options)


def test_a_long_document_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r'^In the share .train.: .*has 12 tokens.*long_documents="split"'):
        module(context=8).setup()


@pytest.mark.parametrize("source", [[], [[], []]])
def test_an_empty_corpus_is_refused(source):
    with pytest.raises(ValueError, match="no token; give at least one"):
        PackedDataModule(source).setup()


def test_a_tokenizer_without_transformers_names_the_package(monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"`pip install transformers`"):
        PackedDataModule(str(tmp_path / "a.txt"), tokenizer="gpt2").setup()


def test_yaml_builds_it_and_refuses_what_it_does_not_know():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PackedDataModule, "data")
    config = parser.parse_object(
        {"data": {"context": 32, "documents": {"seed": 3}, "batches": {"num_workers": 1}}}
    )
    data = parser.instantiate(config)["data"]
    assert (data.context, data.documents.seed, data.batches.num_workers) == (32, 3, 1)
    with pytest.raises(ArgumentError, match="contxt"):
        parser.parse_object({"data": {"contxt": 32}})
    with pytest.raises(ArgumentError, match="ffd"):
        parser.parse_object({"data": {"packing": "ffd"}})


def test_its_repr_builds_the_same():
    data = module()
    again = eval(repr(data))
    assert repr(again) == repr(data)


def test_ranks_see_disjoint_rows_and_equally_many_batches():
    class Rank:
        overfit_batches = 0

        def __init__(self, rank: int) -> None:
            self.distributed_sampler_kwargs = {"num_replicas": 2, "rank": rank}
            self.strategy = SimpleNamespace(root_device=torch.device("cpu"))

    tokens, lengths = [], set()
    for rank in range(2):
        data = module()
        data.setup()
        data.trainer = Rank(rank)  # pyright: ignore[reportAttributeAccessIssue]
        loader = data.train_dataloader()
        lengths.add(len(list(loader)))
        tokens += [token for batch in data.train_dataloader() for token in real_tokens(batch)]
    assert len(lengths) == 1
    assert len(tokens) == len(set(tokens)) > 250


def test_a_packed_document_costs_eight_bytes():
    data = module()
    data.setup()
    loader = data.train_dataloader()
    assert isinstance(loader, PackedLoader)
    packing = loader.rows.packing
    kept = {
        id(base(array)): base(array).nbytes for array in (packing.documents, packing.starts, packing.lengths)
    }
    assert sum(kept.values()) <= 8 * packing.pieces + 64


def base(array: np.ndarray) -> np.ndarray:
    """The array that owns the memory."""
    return array if array.base is None else base(array.base)


DDP_RUN = """
import sys
import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from tests.plugins.test_packed_data import Recorder, Saver, module

path, out, resume, strategy = sys.argv[1:]


class Sharded(Recorder):
    def __init__(self) -> None:
        super().__init__()
        del self.weight

    def configure_model(self) -> None:
        self.linear = torch.nn.Linear(4, 4)
        fully_shard(self.linear, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch):
        self.seen.append(batch["input_ids"].flatten().tolist())
        return self.linear(torch.ones(2, 4)).sum()

    def configure_optimizers(self):
        # Lightning 2.6 can't load a full checkpoint of an optimizer without states.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


model = Recorder() if strategy == "ddp" else Sharded()
trainer = pl.Trainer(
    accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_checkpointing=False,
    strategy="ddp" if strategy == "ddp" else ModelParallelStrategy(2, 1, save_distributed_checkpoint=False),
    callbacks=[Saver(path, step=2)] if not resume else [], enable_progress_bar=False,
)
trainer.fit(model, datamodule=module(batch_size=2), ckpt_path=resume or None)
with open(f"{out}.{trainer.global_rank}", "w") as file:
    file.write(repr(model.seen))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_share_an_epoch_and_resume_alike(tmp_path, strategy):
    script = tmp_path / "run.py"
    script.write_text(DDP_RUN)
    root = Path(__file__).resolve().parents[2]

    def run(out: str, resume: str) -> list[list[list[int]]]:
        arguments = [str(tmp_path / "saved.ckpt"), str(tmp_path / out), resume, strategy]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, str(script), *arguments], env=environment, cwd=tmp_path, check=True, timeout=240
        )
        return [ast.literal_eval((tmp_path / f"{out}.{rank}").read_text()) for rank in range(2)]

    whole = run("whole", "")
    steps = len(whole[0]) // 2
    assert len(whole[1]) == 2 * steps
    shares = [{token for batch in rank[:steps] for token in batch} - {0} for rank in whole]
    assert not shares[0] & shares[1]
    assert run("resumed", str(tmp_path / "saved.ckpt")) == [rank[2:] for rank in whole]


def test_the_standard_library_trains_with_the_defaults():
    data = PackedDataModule(context=256, long_documents="split", documents=replace(SHARES, limit=50))
    data.prepare_data()
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert batch.length <= 256
    assert batch.efficiency > 0.9
    assert "50 documents" not in data.summary()  # they are dealt to two shares


@pytest.mark.parametrize("kept_apart", [True, False])
def test_a_model_that_mixes_documents_is_stopped_unless_it_may(kept_apart, tmp_path):
    class Mixing(pl.LightningModule):
        """A recurrent net reads a row from its first document to its last."""

        def __init__(self):
            super().__init__()
            self.embedding, self.mix = torch.nn.Embedding(64, 8), torch.nn.GRU(8, 8, batch_first=True)
            self.head = torch.nn.Linear(8, 64)

        def training_step(self, batch, batch_idx):
            logits = self.head(self.mix(self.embedding(batch["input_ids"]))[0])
            return torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
            )

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def validation_step(self, batch, batch_idx):
            pass

    tokens = [[index % 64] * 5 for index in range(64)]
    options = DocumentOptions(validation=0.2, kept_apart=kept_apart)
    data = PackedDataModule(tokens, context=16, batch_size=4, documents=options)
    module = Mixing()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    if kept_apart:
        with pytest.raises(ContaminationError, match="mix"):
            trainer.fit(module, data)
        assert trainer.global_step == 0
    else:
        trainer.fit(module, data)
        assert trainer.global_step == 2


class Llama(Recorder):
    """A transformers model whose embedding has so many rows; it is never run."""

    def __init__(self, rows: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=rows, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        self.parts = torch.nn.ModuleList([LlamaForCausalLM(config)])


def test_token_ids_that_the_model_has_no_embedding_for_are_refused(tmp_path):
    (tmp_path / "poem.txt").write_text("\n\n".join("abcdefghij"), encoding="utf-8")
    shares = DocumentOptions(validation=0.4, kept_apart=False)
    data = PackedDataModule(str(tmp_path / "poem.txt"), context=16, documents=shares)
    with pytest.raises(ValueError, match=r"ids up to 258 .*parts\.0 \(LlamaForCausalLM\) has 258 rows.*=259"):
        fit(Llama(258), data)
    assert fit(Llama(259), data).seen
