"""Mistakes that people make with configs, data, checkpoints and code, and what the message of each has to name."""

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_memkit.checkpoints import atomic

MEMKIT = "lightning_memkit."
BUDGET = {"class_path": f"{MEMKIT}MemoryBudget", "init_args": {"budget": "1GiB"}}
STEPS = {"class_path": "benchmarks._contact_models.Steps"}
CORPUS = "my.jsonl"
LINES = b"".join(b'{"text": "document %d ends"}\n' % i for i in range(64))
CHECKPOINT = "last.ckpt"
JOB: dict[str, Any] = {
    "seed_everything": 1,
    "model": {"class_path": "benchmarks._contact_models.Words"},
    "data": {
        "class_path": f"{MEMKIT}PackedDataModule",
        "init_args": {"source": CORPUS, "context": 64, "batch_size": 4},
    },
    "trainer": {
        "max_steps": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [BUDGET, STEPS],
    },
}


@dataclass(frozen=True)
class Mistake:
    """A command or a line of code that can't work.

    Attributes:
        what: the mistake, in a few words.
        names: what the message must have: the value, and what to do.
        words: the command; the config is appended where ``changes`` is not None.
        changes: of `JOB`, by dotted keys.
        files: of the folder, by name.
        code: Python in place of a command.
        earlier: changes of `JOB` in a run before, which leaves `CHECKPOINT`; None without one.
        spoil: what happens to the folder just before.
        late: whether it shows after a step only.
    """

    what: str
    names: tuple[str, ...]
    words: tuple[str, ...] = ("fit",)
    changes: Mapping[str, Any] | None = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    code: str = ""
    earlier: Mapping[str, Any] | None = None
    spoil: Callable[[], object] | None = None
    late: bool = False


def callbacks(*given: object) -> dict[str, Any]:
    """The change that puts these before the one that notes steps."""
    return {"trainer.callbacks": [*given, STEPS]}


def one(name: str, **options: object) -> dict[str, Any]:
    """A class of the package in a config."""
    return {"class_path": f"{MEMKIT}{name}", "init_args": options}


def data(**options: object) -> dict[str, Any]:
    """The change of the data module's options."""
    return {f"data.init_args.{name}": value for name, value in options.items()}


def _cut_off() -> None:
    path = Path(CHECKPOINT)
    path.write_bytes(path.read_bytes()[:1000])


def _weights_alone() -> None:
    torch.save({"layer.weight": torch.zeros(3)}, CHECKPOINT)


def _flip() -> None:
    path = Path(CHECKPOINT)
    stored = bytearray(path.read_bytes())
    stored[len(stored) // 2] ^= 1
    path.write_bytes(stored)


def _full() -> None:
    """No byte can be written any more by who writes checkpoints."""

    def fails(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    atomic.os.fsync = fails


STREAMED = {"trainer.plugins": [one("StreamingCheckpointIO")], "trainer.max_steps": 4}
RESUMED = ("fit", "--ckpt_path", CHECKPOINT)
_NO_TEXT = b'{"question": "one?", "reply": "two"}\n'
OF_CONFIGS = (
    Mistake("an empty config", ("model", "--print_config"), changes=None, words=("fit", "--config", "empty.yaml"),
            files={"empty.yaml": b""}),
    Mistake("a config that is not there", ("jobb.yaml", "does not exist"), words=("fit", "--config", "jobb.yaml"),
            changes=None),
    Mistake("a config that is no YAML", ("broken.yaml", "line 2"), words=("fit", "--config", "broken.yaml"),
            changes=None,
            files={"broken.yaml": b"trainer:\n\tmax_steps: [1\n"}),
    Mistake("a misspelt key of the trainer", ("max_step", "max_steps"), changes={"trainer.max_step": 3}),
    Mistake("a misspelt option of a callback", ("bugdet", "budget"),
            changes=callbacks(one("MemoryBudget", bugdet="1GiB"))),
    Mistake("a misspelt class", ("MemoryBugdet", "MemoryBudget"), changes=callbacks(one("MemoryBugdet"))),
    Mistake("a precision among the callbacks", ("PureBF16Precision", "trainer.plugins"),
            changes=callbacks(one("PureBF16Precision"))),
    Mistake("a callback among the plugins", ("MemoryReport", "trainer.callbacks"),
            changes={"trainer.plugins": [one("MemoryReport")]}),
    Mistake("a strategy among the callbacks", ("OnDeviceStrategy", "trainer.strategy"),
            changes=callbacks(one("OnDeviceStrategy"))),
    Mistake("a class's name as a key", ("MemoryBudget.budget", "class_path"),
            changes={"trainer.callbacks": {"MemoryBudget": {"budget": "1GiB"}}}),
    Mistake("options beside a class_path", ("class_path", "init_args"),
            changes=callbacks({"class_path": f"{MEMKIT}MemoryBudget", "budget": "1GiB"})),
    Mistake("two budgets", ("MemoryBudget", "one"), changes=callbacks(BUDGET, BUDGET)),
    Mistake("an unknown strategy", ("memkit_fsdp", "memkit_fsdp2"), changes={"trainer.strategy": "memkit_fsdp"}),
    Mistake("two precisions", ("bf16-mixed", "PureBF16Precision"),
            changes={"trainer.precision": "bf16-mixed", "trainer.plugins": [one("PureBF16Precision")]}),
    Mistake("an unknown model class", ("Wordz", "Words"),
            changes={"model.class_path": "benchmarks._contact_models.Wordz"}),
    Mistake("a module that is not there", ("my_modell", "in the folder that memkit is started in"),
            changes={"model.class_path": "my_modell.Model"}),
    Mistake("an unknown command", ("trian", "fit"), words=("trian",), changes=None),
    Mistake("a plan for an unknown card", ("h1000", "--help", "--memory"), words=("plan", "--device", "h1000")),
    Mistake("a plan for a laptop's card", ("4090 laptop", "--memory"), words=("plan", "--device", "rtx 4090 laptop")),
    Mistake("a plan for two cards by name", ("8xh100", "devices"), words=("plan", "--device", "8xh100")),
    Mistake("a plan above the card's memory", ("30GiB", "23.99"),
            words=("plan", "--device", "4090", "--budget", "30GiB")),
    Mistake("a plan over its own config", ("job.yaml", "another"), words=("plan", "--output", "job.yaml")),
    Mistake("a plan without --config", ("job.yaml", "--config"), words=("plan", "job.yaml"), changes=None,
            files={"job.yaml": b"model: {}"}),
    Mistake("a report of a folder without one", ("MemoryReport", "folder of the run"), words=("report", "."),
            changes=None),
    Mistake("consolidating a file that is no checkpoint", (CORPUS, "Load another"),
            words=("consolidate", CORPUS, "--output", "out.ckpt"), changes=None),
)  # fmt: skip
OF_OPTIONS = (
    Mistake("a budget in words", ("lots", "GiB"), changes=callbacks(one("MemoryBudget", budget="lots"))),
    Mistake("a budget that is no number", ("nan", "22GiB"),
            changes=callbacks(one("MemoryBudget", budget=float("nan")))),
    Mistake("a negative budget", ("-1GiB", "22GiB"), changes=callbacks(one("MemoryBudget", budget="-1GiB"))),
    Mistake("a share above all", ("150%", "90%"), changes=callbacks(one("MemoryBudget", budget="150%"))),
    Mistake("a budget below the weights", ("1KiB", "budget"), changes=callbacks(one("MemoryBudget", budget="1KiB"))),
    Mistake("a micro-batch of no row", ("micro_batch_size=0", "1 or more"),
            changes=callbacks(one("MemoryBudget", micro_batch_size=0))),
    Mistake("a headroom of more than all", ("headroom=1.5", "write 0.05"),
            changes=callbacks(one("MemoryBudget", headroom=1.5))),
    Mistake("an unknown policy", ("selectiv", "selective"),
            changes=callbacks(BUDGET, one("ActivationCheckpointing", policy="selectiv"))),
    Mistake("a share of checkpointing above one", ("budget:1.5", "full"),
            changes=callbacks(BUDGET, one("ActivationCheckpointing", policy="budget:1.5"))),
    Mistake("every block of none", ("k=0", "at least 1"),
            changes=callbacks(BUDGET, one("ActivationCheckpointing", policy="every:0"))),
    Mistake("an unknown compensation", ("kahn", "kahan"),
            changes={"trainer.plugins": [one("PureBF16Precision", compensation="kahn")]}),
    Mistake("unknown states", ("8bit", "8-bit"),
            changes={"trainer.plugins": [one("PureBF16Precision", states="8bit")]}),
    Mistake("released gradients that accumulate", ("accumulate_grad_batches=2", "set it to 1"),
            changes={"trainer.accumulate_grad_batches": 2, **callbacks(one("GradientRelease"))}),
    Mistake("released gradients of an optimizer with closures", ("LBFGS", "AdamW"),
            changes={"model.init_args.optimizer": "LBFGS", **callbacks(one("GradientRelease"))}),
    Mistake("a loss without logits where no head is found", ("heads=", "linear_cross_entropy"),
            changes=callbacks(BUDGET, one("ChunkedLoss"))),
)  # fmt: skip
OF_DATA = (
    Mistake("a corpus that is not there", ("texts.jsonl", "a source is"), changes=data(source="texts.jsonl")),
    Mistake("an empty corpus", (CORPUS, "at least one"), files={CORPUS: b""}),
    Mistake("a broken line", (f"{CORPUS}, line 2", "leave it out"), files={CORPUS: b'{"text": "a"}\n{"text": "b\n'}),
    Mistake("records without a text", (CORPUS, "text"), files={CORPUS: _NO_TEXT * 4}),
    Mistake("NUL bytes", (f"{CORPUS}, line 65", "NUL", "leave the line out"), files={CORPUS: LINES + b"\0" * 64}),
    Mistake("UTF-16", (f"{CORPUS}, line 1", "iconv -f UTF-16"), files={CORPUS: LINES.decode().encode("utf-16")}),
    Mistake("Latin-1", (f"{CORPUS}, line 1", "iconv -f LATIN1"),
            files={CORPUS: '{"text": "\xe4\xf6\xfc"}\n'.encode("latin-1")}),
    Mistake("a compressed corpus under another name", (CORPUS, "compress"),
            files={CORPUS: b"\x1f\x8b\x08\0" + bytes(64)}),
    Mistake("a tokenizer that is not there", ("my-tokenizer", "bytes"), changes=data(tokenizer="./my-tokenizer")),
    Mistake("a vocabulary smaller than the tokenizer's", ("40", "259"), changes={"model.init_args.vocabulary": 40}),
    Mistake("the same of an own class around a transformers model", ("40", "embedding"),
            changes={"model.class_path": "benchmarks._contact_models.Wrapped", "model.init_args.vocabulary": 40}),
    Mistake("the same of a table that is no module", ("40", "259"),
            changes={"model.class_path": "benchmarks._contact_models.Tabled", "model.init_args": {"vocabulary": 40}}),
    Mistake("a table of commas as a corpus", ("my.csv", ".jsonl"), changes=data(source="my.csv"),
            files={"my.csv": b"text,label\nhello,1\n"}),
    Mistake("files beside texts", (CORPUS, "texts"), changes=data(source=[CORPUS, "a text"])),
    Mistake("a file in the place of options", (CORPUS, "validation"), changes=data(documents=CORPUS)),
    Mistake("a batch size in quotes", ("'4'", "batch_size"),
            code="from lightning_memkit import PackedDataModule as D; D('my.jsonl', context=64, batch_size='4')"),
    Mistake("documents longer than the context", ("context", "long_documents"), changes=data(context=8)),
    Mistake("a context of no token", ("context=0", "below 1"), changes=data(context=0)),
    Mistake("packed rows whose documents see each other", ("packed_attention", "block.outer", "packing="),
            changes={"model.init_args.attention": "plain"}),
)  # fmt: skip
OF_RUNS = (
    Mistake("a checkpoint that is not there", ("last.ckpt", "give the path"), words=RESUMED),
    Mistake("weights alone as a checkpoint", (CHECKPOINT, "InitialWeights"), words=RESUMED, spoil=_weights_alone),
    Mistake("a corpus as a checkpoint", (CORPUS, "no checkpoint"), words=("fit", "--ckpt_path", CORPUS)),
    Mistake("a truncated checkpoint", (CHECKPOINT, "1,000"), words=RESUMED, earlier={}, spoil=_cut_off),
    Mistake("a flipped bit", (CHECKPOINT, "checksum", "Load another"), words=RESUMED, earlier=STREAMED,
            changes=STREAMED, spoil=_flip),
    Mistake("a truncated streamed checkpoint", (CHECKPOINT, "cut off", "Load another"), words=RESUMED,
            earlier=STREAMED,
            changes=STREAMED, spoil=_cut_off),
    Mistake("a disk that is full", ("full", "save_top_k"), spoil=_full, late=True,
            changes={**STREAMED, "trainer.enable_checkpointing": True}),
    Mistake("resumed with another optimizer", ("SGD", "AdamW"), words=RESUMED, earlier={},
            changes={"model.init_args.optimizer": "SGD", "trainer.max_steps": 4}),
    Mistake("resumed with other data", ("41 now", "weights alone"), words=RESUMED, earlier={},
            files={CORPUS: LINES * 2}, changes={"trainer.max_steps": 4}),
    Mistake("resumed with another context", ("context", "64", "32"), words=RESUMED, earlier={},
            changes={**data(context=32, long_documents="split"), "trainer.max_steps": 4}),
)  # fmt: skip
_TINY = "import torch; from torch import nn; import lightning_memkit as m; p = nn.Linear(4, 4); "
OF_CODE = (
    Mistake("compensating twice", ("SGD", ".undo()"),
            code=_TINY + "o = torch.optim.SGD(p.bfloat16().parameters(), lr=1); m.compensate(o); m.compensate(o)"),
    Mistake("chunks of no row", ("rows=0", "from 1"), code=_TINY + "m.checkpoint_chunks(p, rows=0)"),
    Mistake("a token longer than a row", ("context=64", "long_documents"), code=_TINY + "m.pack([5, 70], 64)"),
    Mistake("a loss of other shapes", ("labels (5,)", "hidden (7, 4)"),
            code=_TINY + "m.linear_cross_entropy(torch.ones(7, 4), torch.ones(9, 4), torch.zeros(5).long())"),
    Mistake("a budget for an unknown goal", ("fast", "memory"), code=_TINY + "m.Budget('1GiB', goal='fast')"),
)  # fmt: skip
MISTAKES = (*OF_CONFIGS, *OF_OPTIONS, *OF_DATA, *OF_RUNS, *OF_CODE)
