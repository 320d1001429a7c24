"""A resume on another number of ranks: every document once, and every step as the uninterrupted run has it."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memkit.data.loading.batch_options import BatchOptions
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.plugins.data.packed_data import PackedDataModule
from tests.plugins.test_packed_data import documents, real_tokens

COUNT, STEP_ROWS, STEP_TOKENS = 397, 12, 12 * 24
ALL = DocumentOptions(validation=0.0, seed=3)


def stream():
    yield from documents(COUNT)


# Each as it is with so many ranks: a step has the same rows or tokens over all of them.
LAYOUTS = {
    "packed": lambda ranks: {"batch_size": STEP_ROWS // ranks},
    "packed by tokens": lambda ranks: {"batch_tokens": STEP_TOKENS // ranks},
    "a document a row": lambda ranks: {"packing": "none", "batch_size": STEP_ROWS // ranks},
    "buckets of rows": lambda ranks: {
        "packing": "none",
        "padding": "bucket",
        "batch_size": STEP_ROWS // ranks,
    },
    "buckets of tokens": lambda ranks: {
        "packing": "none",
        "padding": "bucket",
        "batch_tokens": STEP_TOKENS // ranks,
    },
    "padded by tokens": lambda ranks: {"packing": "none", "batch_tokens": STEP_TOKENS // ranks},
    "chunks": lambda ranks: {"context": 8, "long_documents": "split", "batch_size": STEP_ROWS // ranks},
    "windows": lambda ranks: {"packing": "stream", "batch_size": STEP_ROWS // ranks},
    "rows of equal order": lambda ranks: {
        "packing": "none",
        "batch_size": STEP_ROWS // ranks,
        "overfit": True,
    },
    "stream": lambda ranks: {"source": stream, "packing": "stream", "batch_size": STEP_ROWS // ranks},
}


def loader(rank: int, ranks: int, state: dict[str, Any] | None, **options: Any) -> Any:
    """The loader of a rank, as Lightning would ask for it."""
    source, overfit = options.pop("source", documents(COUNT)), options.pop("overfit", False)
    data = PackedDataModule(source, **{"context": 16, "documents": ALL, **options})
    data.setup()
    data.trainer = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        distributed_sampler_kwargs={"num_replicas": ranks, "rank": rank},
        overfit_batches=overfit,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    if state is not None:
        data.load_state_dict({"train_loader": state})
    return data.train_dataloader()


def run(
    ranks: int, layout: str, state: Any = None, *, steps: int | None = None, **options: Any
) -> tuple[list[list[int]], Any]:
    """The tokens of each step over all ranks, to the epoch's end or for so many steps; and the state behind them.

    The state has the number of documents, or pieces of one, in the last of these steps, as "documents".
    """
    loaders = [loader(rank, ranks, state, **{**LAYOUTS[layout](ranks), **options}) for rank in range(ranks)]
    taken: list[list[list[int]]] = []
    in_last = 0
    for one in loaders:
        batches = iter(one)
        taken.append([])
        for batch in batches:
            assert batch["input_ids"].numel()
            taken[-1].append(real_tokens(batch))
            if len(taken[-1]) == steps:
                break
        in_last += batch.documents
    states = [one.state_dict() for one in loaders]
    assert all(repr(each) == repr(states[0]) for each in states)
    step_tokens = [sorted(sum(parts, [])) for parts in zip(*taken, strict=True)]
    return step_tokens, {**states[0], "documents": in_last}


EVERY = sorted(token for document in documents(COUNT) for token in document)


# Every layout from two ranks; from other numbers a layout of each kind.
QUICK = {
    (1, "windows"),
    (3, "packed by tokens"),
    (4, "buckets of tokens"),
    *((2, layout) for layout in LAYOUTS),
}
CHANGES = [
    pytest.param(then, layout, marks=() if (then, layout) in QUICK else pytest.mark.slow)
    for then in (1, 2, 3, 4) for layout in LAYOUTS
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("then", "layout"), CHANGES)
def test_steps_are_those_of_the_uninterrupted_run_on_any_number_of_ranks(then: int, layout: str) -> None:
    whole, behind = run(then, layout)
    following, _ = run(then, layout, behind)
    assert sorted(sum(whole, [])) == EVERY
    for done in (1, len(whole) // 2, len(whole) - 2, len(whole) - 1, len(whole)):
        first, state = run(then, layout, steps=None if done == len(whole) else done)
        assert first == whole[:done]
        for now in {1, 2, 3, 4} - {then}:
            if done == len(whole) - 1 and behind["documents"] < now:  # one of them would have none
                with pytest.raises(ValueError, match=f"too few rows for {now}|too few for {now}"):
                    run(now, layout, state)
                continue
            rest, _ = run(now, layout, state)
            expected = whole[done:] or following
            assert sorted(sum(first, []) * (done < len(whole)) + sum(rest, [])) == EVERY
            assert [len(step) > 0 for step in rest] == [True] * len(expected)
            alike = len(expected) - 2  # the last steps may have to be shared otherwise
            assert rest[:alike] == expected[:alike]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_ranks_may_change_again_and_again_over_epochs(layout: str) -> None:
    whole, behind = run(2, layout)
    whole += run(2, layout, behind)[0]
    steps, state, done = [], None, 0
    for ranks, number in ((2, 3), (4, 4), (1, 2), (3, None), (2, 5), (1, None)):
        more, state = run(ranks, layout, state, steps=number)
        steps, done = steps + more, done + len(more)
    assert len(steps) == len(whole)
    half = len(whole) // 2
    assert sorted(sum(steps[:half], [])) == sorted(sum(steps[half:], [])) == EVERY
    assert steps[: half - 2] == whole[: half - 2]
    assert steps[half : 2 * half - 2] == whole[half : 2 * half - 2]


@pytest.mark.parametrize(
    ("then", "now", "options", "message"),
    [
        (4, 2, {"batch_size": 3}, r"rows_per_step: 12 then, 6 now.*3 on each of 4.*set batch_size=6 on 2"),
        (1, 2, {"batch_size": 12}, r"rows_per_step: 12 then, 24 now.*set batch_size=6 on 2 rank"),
        (3, 4, {"batch_size": 4}, r"rows_per_step: 12 then, 16 now.*set batch_size=3 on 4 rank"),
        (1, 5, {"batch_size": 2}, r"rows_per_step: 12 then, 10 now.*that divides 12 \(1, 2, 3, 4, 6, 12"),
        (
            2,
            1,
            {"batch_size": 12, "batch_tokens": 900},
            r"tokens_per_step: 0 then, 900 now.*leave batch_tokens",
        ),
    ],
)
def test_other_rows_a_step_are_refused_with_what_would_be_the_same(
    then: int, now: int, options: dict[str, Any], message: str
) -> None:
    _, state = run(then, "packed", steps=2)
    with pytest.raises(ValueError, match=message):
        run(now, "packed", state, **options)


def test_ranks_that_a_step_can_not_be_shared_by_are_refused() -> None:
    """397 documents, each a row, in steps of 4: on 4 ranks a step would have one row, and on 4 none may be left."""
    _, state = run(1, "a document a row", steps=2, batch_size=4)
    with pytest.raises(ValueError, match=r"A step of 1 rank\(s\).* has 1 rows, too few for 4 ranks"):
        run(4, "a document a row", state, batch_size=1)


def test_rows_of_several_documents_are_cut_where_a_step_has_fewer_than_ranks() -> None:
    whole, _ = run(2, "packed", batch_size=2, context=100)
    for done in (3, len(whole) - 1):
        first, state = run(2, "packed", batch_size=2, context=100, steps=done)
        rest, _ = run(4, "packed", state, batch_size=1, context=100)
        assert first + rest == whole


@pytest.mark.parametrize("layout", ["buckets of tokens", "padded by tokens"])
def test_steps_beyond_the_tokens_of_a_batch_are_told(layout: str) -> None:
    _, state = run(4, layout, steps=2)
    options = LAYOUTS[layout](1)
    resumed = loader(0, 1, state, **options)
    above = [batch["input_ids"].numel() for batch in resumed]
    limit, most = options["batch_tokens"], max(above)
    note = loader(0, 1, state, **options).resumed_on_other_ranks
    if most > limit:
        count = sum(size > limit for size in above)
        assert (
            f"left in this epoch {count} have more than batch_tokens={limit} on a rank, at the most {most}"
            in note
        )
    else:
        assert "batch_tokens" not in note


@pytest.mark.parametrize("layout", ["packed", "buckets of tokens"])
def test_workers_build_what_is_shared_and_cut(layout: str) -> None:
    _, state = run(1, layout, steps=2)
    in_process, _ = run(4, layout, state)
    by_workers, _ = run(4, layout, state, batches=BatchOptions(num_workers=1, host_memory=2000))
    assert by_workers == in_process


SCRIPT = """
import sys
import lightning.pytorch as pl
from lightning_memkit import PackedDataModule
from tests.plugins.test_packed_data import Recorder, Saver, documents
from tests.plugins.test_packed_data_ranks import ALL

path, out, devices, resume = sys.argv[1:]
devices = int(devices)
data = PackedDataModule(documents(150), context=16, batch_size=4 // devices, documents=ALL)
model = Recorder()
trainer = pl.Trainer(
    accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, callbacks=[] if resume else [Saver(path, step=5)],
)
trainer.fit(model, datamodule=data, ckpt_path=resume or None)
with open(f"{out}.{trainer.global_rank}", "w") as file:
    file.write(repr(model.seen))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now"), [(1, 2), (2, 1)])
def test_processes_go_on_with_the_steps_of_others(tmp_path: Path, then: int, now: int) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    root = Path(__file__).resolve().parents[2]

    def fitted(devices: int, resume: str) -> list[list[int]]:
        arguments = [str(tmp_path / "saved.ckpt"), str(tmp_path / f"{devices}"), str(devices), resume]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", str(script), *arguments]
        subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=240)
        ranks = [ast.literal_eval((tmp_path / f"{devices}.{rank}").read_text()) for rank in range(devices)]
        return [sorted(set(sum(parts, [])) - {0}) for parts in zip(*ranks, strict=True)]

    whole = fitted(then, "")
    assert fitted(now, str(tmp_path / "saved.ckpt")) == whole[5:]
