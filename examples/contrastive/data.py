"""Pairs of texts that belong together: a JSONL of your own, or docstrings and code of Python's standard library."""

import ast
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, random_split

PAD = 256


class Pairs(LightningDataModule):
    """Batches of pairs, as bytes; the other pairs of a batch are the negatives.

    Args:
        source: a .jsonl file with `query` and `answer` a line; null: what functions of the standard library say they
            do, and their code.
        longest: bytes of a query and of an answer at the most; what is beyond is cut off.
        batch_size: pairs of a step.
        validation: pairs that are held out, in one batch.
    """

    def __init__(
        self,
        source: str | None = None,
        longest: tuple[int, int] = (64, 128),
        batch_size: int = 4096,
        validation: int = 512,
    ) -> None:
        super().__init__()
        self.source, self.longest = source, longest
        self.batch_size, self.validation = batch_size, validation

    def setup(self, stage: str) -> None:
        """Reads and splits, the same way every time."""
        data: Any = list(standard_library() if self.source is None else lines(self.source))
        sizes = [len(data) - self.validation, self.validation]
        self.train, self.held_out = random_split(data, sizes, torch.Generator().manual_seed(0))

    def collate(self, pairs: list[tuple[str, str]]) -> dict[str, Tensor]:
        """Bytes of queries and answers, padded."""
        queries, answers = zip(*pairs, strict=True)
        return {"query": padded(queries, self.longest[0]), "answer": padded(answers, self.longest[1])}

    def train_dataloader(self) -> DataLoader:
        """In a new order every epoch. The last pairs are left out: fewer negatives would be another task."""
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=self.collate, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """The held-out pairs."""
        return DataLoader(self.held_out, self.validation, collate_fn=self.collate)


def padded(texts: tuple[str, ...], longest: int) -> Tensor:
    """The first bytes of each text, [texts, longest]."""
    ids = torch.full((len(texts), longest), PAD)
    for row, text in enumerate(texts):
        found = torch.tensor(list(text.encode()[:longest]))
        ids[row, : len(found)] = found
    return ids


def lines(path: str) -> list[tuple[str, str]]:
    """The pairs of a JSONL."""
    records = map(json.loads, filter(str.strip, Path(path).read_text(encoding="utf-8").splitlines()))
    return [(each["query"], each["answer"]) for each in records]


def standard_library() -> Iterator[tuple[str, str]]:
    """The docstring and the body of every function that has both."""
    for file in sorted(Path(json.__file__).parent.parent.rglob("*.py")):
        if not {"site-packages", "test", "tests", "idlelib"}.isdisjoint(file.parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):  # tests of the parser
            continue
        text = source.splitlines()
        for node in ast.walk(tree):
            says = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if says and isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                body = text[node.body[1].lineno - 1 : node.end_lineno]
                yield says, textwrap.dedent("\n".join(body))
