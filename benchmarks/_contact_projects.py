"""Three projects as their users have them, and what these change to train them within a budget."""

import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_NETWORK = """import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Net(LightningModule):
    def __init__(self, width: int = 256):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layers(batch["x"]), batch["y"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(LightningDataModule):
    def train_dataloader(self):
        rows = [{"x": torch.randn(64), "y": torch.tensor(i % 10)} for i in range(256)]
        return DataLoader(rows, batch_size=64)
"""
_PLAIN = f"""{_NETWORK}

if __name__ == "__main__":
    trainer = Trainer(max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Net(), datamodule=Data())
"""
_BUDGETED = _PLAIN.replace(
    "from torch.nn import", "from lightning_memkit import MemoryBudget\nfrom torch.nn import", 1
).replace("enable_checkpointing=False)", 'enable_checkpointing=False, callbacks=[MemoryBudget("1GiB")])')
_CLI = f"""from lightning.pytorch.cli import LightningCLI
{_NETWORK.replace("LightningDataModule, LightningModule, Trainer", "LightningDataModule, LightningModule")}

if __name__ == "__main__":
    LightningCLI(Net, Data)
"""
_YAML = """seed_everything: 1
trainer:
  max_steps: 4
  accelerator: cpu
  logger: false
  enable_checkpointing: false
"""
_BUDGETED_YAML = f"""{_YAML}  callbacks:
    class_path: lightning_memkit.MemoryBudget
    init_args: {{budget: 1GiB}}
"""
_PACKED_DATA = 'PackedDataModule("my.jsonl", context=128, batch_size=8)'
_IMPORTS = "\nimport torch\n"
_TRANSFORMERS = """import json

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


class Language(LightningModule):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=259, **sizes))

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def padded(texts):
    ids = pad_sequence([torch.tensor(list(text.encode())) for text in texts], batch_first=True, padding_value=0)
    return {"input_ids": ids, "labels": ids.where(ids > 0, -100), "attention_mask": (ids > 0).long()}


if __name__ == "__main__":
    texts = [json.loads(line)["text"] for line in open("my.jsonl")]
    data = DataLoader(texts, batch_size=8, collate_fn=padded)
    trainer = Trainer(max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Language(), data)
"""
_PACKED = (
    _TRANSFORMERS.replace(_IMPORTS, f"{_IMPORTS}from lightning_memkit import MemoryBudget, PackedDataModule\n")
    .replace("DataLoader(texts, batch_size=8, collate_fn=padded)", _PACKED_DATA)
    .replace("enable_checkpointing=False)", 'enable_checkpointing=False, callbacks=[MemoryBudget("1GiB")])')
)  # fmt: skip
_LIGHTNING = "/lightning/pytorch/"  # a warning of Lightning's own begins with its file
_BAR = "\u2501"  # of Lightning's bar, whose length depends on its times
_CORPUS = "".join(f'{{"text": "document {i} says a word or two"}}\n' for i in range(256))

# What memkit prints in these projects: each line begins with one of these.
KINDS = {
    "the budget": r"MemoryBudget: micro-batch ",
    "the corpus": r"(vocabulary|train|validation|test|predict): ",
    "packed attention": r"PackedDataModule: ",
}


@dataclass(frozen=True)
class Project:
    """A project before and after.

    Attributes:
        name: what it is.
        before: its files.
        after: those that are changed.
        words: what Python runs.
    """

    name: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    words: tuple[str, ...]

    @property
    def lines_changed(self) -> int:
        """Lines of the user's that are new or others."""
        changed = 0
        for name, text in self.after.items():
            lines = difflib.ndiff(self.before.get(name, "").splitlines(), text.splitlines())
            changed += sum(line.startswith("+ ") for line in lines)
        return changed

    def printed(self) -> tuple[list[str], list[str]]:
        """What its terminal shows before and after.

        Raises:
            RuntimeError: it does not run.
        """
        return _printed(self.before, self.words), _printed({**self.before, **self.after}, self.words)


PROJECTS = (
    Project("a LightningModule", {"train.py": _PLAIN}, {"train.py": _BUDGETED}, ("train.py",)),
    Project(
        "a transformers model on a JSONL",
        {"train.py": _TRANSFORMERS, "my.jsonl": _CORPUS},
        {"train.py": _PACKED},
        ("train.py",),
    ),
    Project(
        "a LightningCLI project",
        {"main.py": _CLI, "train.yaml": _YAML},
        {"train.yaml": _BUDGETED_YAML},
        ("main.py", "fit", "--config", "train.yaml"),
    ),
)


def _printed(files: Mapping[str, str], words: tuple[str, ...]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text)
        return run_python(words, folder)


def run_python(words: tuple[str, ...], folder: str) -> list[str]:
    """The lines that a terminal of 80 columns shows of a run.

    Raises:
        RuntimeError: it does not end well.
    """
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    shown = re.sub(r"[^\n]*\r", "", done.stdout)  # a bar is written over itself
    return [line for line in shown.splitlines() if line.strip()]


def ours(before: list[str], after: list[str]) -> list[str]:
    """The lines that a run prints since memkit takes part."""
    known = {_without_numbers(line) for line in before}
    return [
        line
        for line in after
        if _without_numbers(line) not in known and _BAR not in line and _LIGHTNING not in line
    ]


def kind_of(line: str) -> str | None:
    """Which of `KINDS` a line is of."""
    return next((kind for kind, begins in KINDS.items() if re.match(begins, line)), None)


def _without_numbers(line: str) -> str:
    return re.sub(r"[\d.,:]+", "#", line)
