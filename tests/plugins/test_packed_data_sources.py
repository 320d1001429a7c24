"""What PackedDataModule reads, how it batches, and what it logs, in Lightning's own loop."""

import json
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_memkit.data.loading.batch_options import BatchOptions
from lightning_memkit.data.packing.pack import WorkLimit
from lightning_memkit.data.sources import token_file
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.plugins.data.packed_data import PackedDataModule
from tests.plugins.test_packed_data import Recorder, Saver, documents, fit, real_tokens

CONTEXT = 16


class Documents(Dataset):
    """A data set that has a length and numbers, and no end of its own."""

    def __init__(self, records: list) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> dict:
        return {"input_ids": torch.tensor(self.records[number % len(self.records)])}


class Endless(IterableDataset):
    """A data set that only knows what comes next."""

    def __iter__(self):
        yield from ({"input_ids": record} for record in documents(300))


class OwnData(pl.LightningDataModule):
    """A user's datamodule, as users write them."""

    def __init__(self, several: bool = False) -> None:
        super().__init__()
        self.several = several
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        self.records = documents(60)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Documents(self.records[:40]), batch_size=3, shuffle=True)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        loader = DataLoader(Documents(self.records[40:]), batch_size=3)
        return [loader, loader] if self.several else loader


def tokens_of(loader) -> list[int]:
    return sorted(token for batch in loader for token in real_tokens(batch))


def flat(records) -> list[int]:
    return sorted(token for record in records for token in record)


def test_another_datamodules_own_data_sets_are_packed(tmp_path):
    own = OwnData()
    data = PackedDataModule(own, context=CONTEXT, batch_size=4)
    fit(Recorder(), data, max_epochs=1, default_root_dir=tmp_path)
    assert own.calls == ["prepare_data", "fit"]
    assert own.trainer is data.trainer
    assert tokens_of(data.train_dataloader()) == flat(documents(60)[:40])
    assert tokens_of(data.val_dataloader()) == flat(documents(60)[40:])


def test_several_loaders_of_a_datamodule_are_refused():
    with pytest.raises(ValueError, match=r"OwnData.val_dataloader\(\) gives list.*source={'train'"):
        PackedDataModule(OwnData(several=True), context=CONTEXT).setup("fit")


def test_a_mapping_gives_every_share_its_documents():
    records = documents(80)
    data = PackedDataModule(
        {
            "train": records[:50],
            "validation": records[50:60],
            "test": records[60:70],
            "predict": np.array(records[70:], object).tolist(),
        },
        context=CONTEXT,
    )
    data.setup()
    loaders = (data.train_dataloader, data.val_dataloader, data.test_dataloader, data.predict_dataloader)
    cuts = [0, 50, 60, 70, 80]
    for loader, begin, end in zip(loaders, cuts, cuts[1:], strict=False):
        assert tokens_of(loader()) == flat(records[begin:end])
    assert data.vocabulary_size == max(flat(records)) + 1


def test_prompts_have_no_labels_in_the_batches(tmp_path):
    path = tmp_path / "a.jsonl"
    pairs = [("ask", "answer"), ("who", "me"), ("why", "")]
    path.write_text("\n".join(json.dumps({"prompt": a, "completion": b}) for a, b in pairs))
    data = PackedDataModule(str(path), context=64, documents=DocumentOptions(validation=0.0))
    data.setup()
    (batch,) = data.train_dataloader()
    kept = batch["labels"][batch["labels"] != -100]
    assert sorted(kept.tolist()) == sorted([*b"answerme", 257, 257, 257])
    assert batch.weight() == len(kept)


@pytest.mark.parametrize("options", [{"padding": "bucket", "packing": "none"}, {"packing": "none"}, {}])
@pytest.mark.parametrize("step", [2, 7])
def test_a_budget_of_tokens_holds_and_resumes(tmp_path, options, step):
    def module():
        return PackedDataModule(documents(150), context=CONTEXT, batch_tokens=50, **options)

    path = tmp_path / "saved.ckpt"
    whole = fit(Recorder(), module(), Saver(path, step=step), max_epochs=2)
    assert max(map(len, whole.seen)) <= 50
    assert len(set(map(len, whole.seen))) > 1 or not options
    assert fit(Recorder(), module(), resume=path, max_epochs=2).seen == whole.seen[step:]
    half = len(whole.seen) // 2
    assert flat(whole.seen[:half]) != []
    assert set(flat(whole.seen[:half])) == set(flat(whole.seen[half:]))


@pytest.mark.parametrize("packing", ["bfd", "stream"])
def test_a_limit_of_work_holds_where_tokens_would_leave_room(packing):
    of_four = [list(range(4 * number, 4 * number + 4)) for number in range(60)]
    source = of_four if packing == "bfd" else lambda: iter(of_four)
    given = {"context": CONTEXT, "batch_size": 5, "packing": packing}
    shares = {"documents": DocumentOptions(validation=0.0), "work_limit": WorkLimit(most=3 * 4**2)}
    data = PackedDataModule(source, **given, **shares)
    data.setup()
    assert {batch.documents / batch.rows for batch in data.train_dataloader()} == {3}  # four would fit
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PackedDataModule, "data")
    config = parser.parse_object({"data": {"work_limit": {"most": 48, "linear": 2}}})
    assert parser.instantiate(config)["data"].work_limit == WorkLimit(most=48, linear=2)


STREAMS = {"function": lambda: (list(record) for record in documents(300)), "dataset": Endless()}


@pytest.mark.parametrize("step", [1, 5, "last", None])
@pytest.mark.parametrize("source", STREAMS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_trains_and_resumes_with_the_next_batch(tmp_path, source, step, num_workers):
    def module():
        return PackedDataModule(
            STREAMS[source],
            context=CONTEXT,
            batch_size=6,
            packing="stream",
            batches=BatchOptions(num_workers=num_workers),
        )

    path = tmp_path / "saved.ckpt"
    if step == "last":
        step = len(fit(Recorder(), module(), max_epochs=1).seen)
    saver = Saver(path, step=step, epoch=0 if step is None else None)
    whole = fit(Recorder(), module(), saver, max_epochs=2)
    resumed = fit(Recorder(), module(), resume=path, max_epochs=2)
    begin = len(whole.seen) // 2 if step is None else step
    assert resumed.seen == whole.seen[begin:]
    data = module()
    data.setup()
    held_out = tokens_of(data.val_dataloader())
    assert sorted(set(flat(whole.seen)) | set(held_out) | {0}) == sorted({0, *flat(documents(300))})
    assert not set(flat(whole.seen)) & set(held_out) - {0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, 'packing=.bfd. needs all documents at once; take packing="stream"'),
        ({"packing": "stream", "documents": DocumentOptions(limit=3)}, "limit=3 draws among all documents"),
    ],
)
def test_what_a_stream_can_not_do_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PackedDataModule(STREAMS["function"], context=CONTEXT, **options).setup()
    with pytest.raises(ValueError, match="can be read only once"):
        PackedDataModule(iter(documents(3)), context=CONTEXT, packing="stream").setup()


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (documents(90), {"batch_tokens": 5}, "batch_tokens=5 is less than the longest row's"),
        (documents(90), {"batch_tokens": 5, "padding": "bucket"}, "batch_tokens=5 is less than"),
        (
            STREAMS["function"],
            {"packing": "stream", "batch_tokens": 5},
            "batch_tokens=5 is less than context",
        ),
        (STREAMS["function"], {"packing": "stream", "padding": "bucket"}, "padding='bucket' sorts rows"),
        (lambda: iter(()), {"packing": "stream"}, "source gives no document; give at least one"),
    ],
)
def test_options_that_do_not_fit_the_documents_are_refused_at_setup(source, options, message):
    with pytest.raises(ValueError, match=message):
        PackedDataModule(source, context=CONTEXT, **options).setup()


def test_a_share_that_is_not_given_is_named():
    data = PackedDataModule({"validation": documents(9)}, context=CONTEXT)
    data.setup()
    assert tokens_of(data.val_dataloader()) == flat(documents(9))
    with pytest.raises(
        ValueError, match=r"no documents to train on \(found: \['validation'\]\); give 'train'"
    ):
        data.train_dataloader()


def test_packing_as_a_stream_of_known_documents_keeps_every_token():
    data = PackedDataModule(
        documents(200), context=CONTEXT, packing="stream", documents=DocumentOptions(validation=0.0)
    )
    data.setup()
    assert tokens_of(data.train_dataloader()) == flat(documents(200))


def logged(folder) -> dict[int, dict[str, float]]:
    (path,) = folder.rglob("metrics.csv")
    names, *rows = [line.split(",") for line in path.read_text().splitlines()]
    table = [dict(zip(names, row, strict=True)) for row in rows]
    return {
        int(row["step"]): {name: float(row[name]) for name in names if name.startswith("packing/")}
        for row in table
        if row["packing/tokens"]
    }


@pytest.mark.parametrize("packing", ["bfd", "none"])
def test_fullness_documents_and_tokens_are_logged(tmp_path, packing):
    data = PackedDataModule(
        documents(60), context=10, batch_size=4, packing=packing, long_documents="truncate"
    )
    seen: list[tuple[int, int, int]] = []

    class Watcher(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append((batch.documents, batch.real_tokens, batch["input_ids"].numel()))

    logger = CSVLogger(tmp_path)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=logger,
        callbacks=[Watcher()],
        log_every_n_steps=4,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Recorder(), datamodule=data)
    rows = logged(tmp_path)
    steps = [step for step in range(len(seen)) if (step + 1) % 4 == 0 or step == len(seen) - 1]
    assert sorted(rows) == steps
    before = -1
    for step in steps:
        until, since = np.sum(seen[: step + 1], axis=0), np.sum(seen[before + 1 : step + 1], axis=0)
        assert (rows[step]["packing/documents"], rows[step]["packing/tokens"]) == (until[0], until[1])
        assert rows[step]["packing/efficiency"] == pytest.approx(since[1] / since[2])
        cut = data.train_dataloader().rows.packing  # pyright: ignore[reportAttributeAccessIssue]
        assert rows[step]["packing/truncated_tokens"] == cut.truncated_tokens > 0
        assert rows[step]["packing/truncated_documents"] == cut.truncated_documents
        before = step
    assert not any("PackingLog" in type(callback).__name__ for callback in trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]


def test_counts_go_on_after_a_resume_and_where_loaders_are_made_anew(tmp_path):
    def run(folder, **options):
        data = PackedDataModule(documents(60), context=CONTEXT, batch_size=4)
        fit(
            Recorder(),
            data,
            *options.pop("callbacks", ()),
            max_epochs=3,
            log_every_n_steps=1,
            logger=CSVLogger(folder),
            **options,
        )
        return logged(folder)

    saved = tmp_path / "saved.ckpt"
    whole = run(tmp_path / "whole", callbacks=[Saver(saved, step=4)])
    resumed = run(tmp_path / "resumed", resume=saved)
    anew = run(tmp_path / "anew", reload_dataloaders_every_n_epochs=1)
    assert resumed == {step: row for step, row in whole.items() if step >= 4}
    assert anew == whole


def test_a_second_fit_counts_from_zero(tmp_path):
    data = PackedDataModule(documents(60), context=CONTEXT, batch_size=4)
    tables = []
    for name in ("first", "second"):
        fit(Recorder(), data, max_epochs=1, log_every_n_steps=1, logger=CSVLogger(tmp_path / name))
        tables.append(logged(tmp_path / name))
    assert tables[0] == tables[1]


def test_a_cache_is_compared_with_its_checksums_once_a_run(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("\n\n".join(f"document {number}" for number in range(60)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = PackedDataModule(str(tmp_path / "a.txt"), context=64, batch_size=4)
    data.prepare_data()
    asked = []
    read = token_file.read_store
    monkeypatch.setattr(
        "lightning_memkit.data.sources.cache.read_store",
        lambda path, verify: asked.append(verify) or read(path, verify=verify),
    )
    PackedDataModule(str(tmp_path / "a.txt"), context=64, batch_size=4).setup()
    fit(Recorder(), PackedDataModule(str(tmp_path / "a.txt"), context=64, batch_size=4), max_epochs=1)
    assert asked == [True, True, False]


def test_loaders_made_anew_go_on_with_the_next_epochs_order():
    anew = fit(
        Recorder(), PackedDataModule(documents(60), context=CONTEXT), reload_dataloaders_every_n_epochs=1
    )
    plain = fit(Recorder(), PackedDataModule(documents(60), context=CONTEXT))
    assert anew.seen == plain.seen


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a single core
def test_host_memory_above_the_limit_changes_no_batch():
    def batches(**options):
        data = PackedDataModule(
            documents(200), context=CONTEXT, batch_size=8, batches=BatchOptions(**options)
        )
        data.setup()
        return [batch["input_ids"].tolist() for batch in data.train_dataloader()]

    assert batches(num_workers=2, host_memory="1KiB", prefetch=3) == batches()


def test_yaml_builds_its_options(tmp_path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PackedDataModule, "data")
    config = parser.parse_object(
        {
            "data": {
                "source": {"train": "a.jsonl", "validation": "b.jsonl"},
                "packing": "none",
                "padding": "bucket",
                "batch_tokens": 4096,
                "documents": {"kind": "messages", "mask_prompt": False, "processes": 2},
                "batches": {"prefetch": 4, "host_memory": "2GiB"},
            }
        }
    )
    data = parser.instantiate(config)["data"]
    assert data.source == {"train": "a.jsonl", "validation": "b.jsonl"}
    assert (data.batch_tokens, data.batch_size, data.padding) == (4096, None, "bucket")
    assert (data.documents.kind, data.documents.mask_prompt, data.batches.prefetch) == ("messages", False, 4)
    wrapped = parser.parse_object(
        {"data": {"source": {"class_path": f"{__name__}.OwnData", "init_args": {"several": True}}}}
    )
    assert parser.instantiate(wrapped)["data"].source.several


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_tokens": 0}, "batch_tokens=0 is below 1"),
        ({"padding": "most"}, "padding='most' is unknown"),
        ({"batches": BatchOptions(prefetch=0)}, "prefetch=0 is below 1"),
        ({"batches": {"host_memory": "lots"}}, "host_memory: 'lots' is not a size"),
    ],
)
def test_bad_options_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        PackedDataModule([[1]], **options)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kind": "chat"}, "kind='chat' is unknown"),
        ({"processes": 0}, "processes=0 is below 1"),
    ]
    for wrong, text in cases:
        with pytest.raises(ValueError, match=text):
            DocumentOptions(**wrong)


# Every token exactly once, over ranks and workers, killed and resumed anywhere.

MODES = {
    "packed": {},
    "budget": {"batch_tokens": 40},
    "padded": {"packing": "none"},
    "bucket": {"packing": "none", "padding": "bucket", "batch_tokens": 40},
    "mixed": {"packing": "none", "batch_tokens": 40},
}


def loader_of_rank(mode: str, rank: int, ranks: int, num_workers: int = 0, count: int = 230):
    data = PackedDataModule(
        documents(count),
        context=CONTEXT,
        documents=DocumentOptions(validation=0.0),
        batches=BatchOptions(num_workers=num_workers),
        **{"batch_size": None if "batch_tokens" in MODES[mode] else 3, **MODES[mode]},
    )
    data.setup()
    data.trainer = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        distributed_sampler_kwargs={"num_replicas": ranks, "rank": rank},
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        overfit_batches=0,
        num_devices=ranks,
    )
    return data.train_dataloader()


def points(mode: str, ranks: int, number: int, count: int, *seed: int) -> list[int]:
    """Random places within an epoch, each another one."""
    steps = len(loader_of_rank(mode, 0, ranks, count=count))  # pyright: ignore[reportArgumentType]
    return (1 + np.random.default_rng((ranks, *seed)).permutation(steps - 1)[:number]).tolist()


def check_every_token_once(
    mode: str, ranks: int, workers: tuple[int, int], kill_after: int, count: int = 230
) -> None:
    """An epoch in which every rank dies after so many batches and goes on with another number of workers."""

    def loader(rank: int, num_workers: int):
        return loader_of_rank(mode, rank, ranks, num_workers, count)

    seen, batches = [], set()
    for rank in range(ranks):
        first = loader(rank, workers[0])
        iterator, number = iter(first), 0
        for _ in range(min(kill_after, len(first))):  # pyright: ignore[reportArgumentType]
            seen += real_tokens(next(iterator))
            number += 1
        state = json.loads(json.dumps(first.state_dict()))
        del iterator
        if number < len(first):  # pyright: ignore[reportArgumentType]
            second = loader(rank, workers[1])
            second.load_state_dict(state)
            for batch in second:
                seen += real_tokens(batch)
                number += 1
        batches.add(number)
    assert len(batches) == 1
    assert sorted(seen) == flat(documents(count))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_token_once_whoever_dies(mode, ranks):
    for kill_after in (0, *points(mode, ranks, 3, 230), 1000):
        check_every_token_once(mode, ranks, (0, 0), kill_after)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [(0, 2), (2, 0)])
def test_every_token_once_with_another_number_of_workers(workers):
    check_every_token_once("bucket", 2, workers, 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("workers", [(0, 0), (0, 2), (2, 0), (2, 2)])
def test_every_token_once_at_twenty_random_kills(mode, ranks, workers):
    kills = points(mode, ranks, 20, 600, *workers)
    assert len(set(kills)) == 20
    for kill_after in kills:
        check_every_token_once(mode, ranks, workers, kill_after, 600)


def test_rows_that_no_rank_gets_are_said(caplog):
    data = PackedDataModule(
        [[1], [2], [3]], context=4, packing="none", batch_size=1, documents=DocumentOptions(validation=0.0)
    )
    data.setup()
    data.trainer = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        distributed_sampler_kwargs={"num_replicas": 2, "rank": 0},
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        overfit_batches=0,
        num_devices=2,
    )
    with caplog.at_level("INFO"):
        data.train_dataloader()
    assert "train: 1 of 3 rows can't be shared by 2 ranks" in caplog.text
