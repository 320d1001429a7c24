"""Texts with labels: a JSONL of your own, or functions of Python's standard library, by package."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, random_split

PACKAGES = ("asyncio", "email", "json", "unittest")


class Texts(LightningDataModule):
    """Batches of texts, each padded to its longest text only.

    Args:
        source: a .jsonl file with `text` and `label` (an integer from 0, or one of `names`) a line; null: files of the
            standard library in pieces of some lines, to be told by their package.
        names: what the labels are called, where they are texts.
        tokenizer: folder or hub name; "bytes" takes each byte for a token (vocabulary 257).
        longest: tokens of a text at the most; what is beyond is cut off.
        batch_size: the effective batch of a step.
        validation: the share of texts that is held out.
    """

    def __init__(
        self,
        source: str | None = None,
        names: list[str] | None = None,
        tokenizer: str = "bytes",
        longest: int = 512,
        batch_size: int = 64,
        validation: float = 0.1,
    ) -> None:
        super().__init__()
        self.source, self.names, self.longest = source, names, longest
        self.batch_size, self.validation = batch_size, validation
        self.encode, self.pad = encoder(tokenizer, longest)

    def setup(self, stage: str) -> None:
        """Reads, tokenises and splits, the same way every time."""
        records: list[Any] = standard_library() if self.source is None else lines(self.source)
        numbers = {name: number for number, name in enumerate(self.names or PACKAGES)}
        data: Any = [
            {"input_ids": self.encode(each["text"]), "labels": numbers.get(each["label"], each["label"])}
            for each in records
        ]
        shares = [1 - self.validation, self.validation]
        self.train, self.held_out = random_split(data, shares, torch.Generator().manual_seed(0))

    def collate(self, records: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch, padded to its longest text; the mask says where."""
        length = max(len(each["input_ids"]) for each in records)
        ids = torch.full((len(records), length), self.pad)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(records):
            ids[row, : len(each["input_ids"])] = torch.tensor(each["input_ids"])
            mask[row, : len(each["input_ids"])] = 1
        labels = torch.tensor([each["labels"] for each in records])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def train_dataloader(self) -> DataLoader:
        """In a new order every epoch."""
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader:
        """The held-out texts."""
        return DataLoader(self.held_out, self.batch_size, collate_fn=self.collate)


def encoder(name: str, longest: int) -> tuple[Any, int]:
    """From a text to token ids, and the id that pads."""
    if name == "bytes":
        return lambda text: list(text.encode()[:longest]), 256
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    return lambda text: tokenizer(text, truncation=True, max_length=longest)[
        "input_ids"
    ], tokenizer.pad_token_id


def lines(path: str) -> list[Any]:
    """The records of a JSONL."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def standard_library() -> list[dict[str, str]]:
    """Pieces of 3 to 20 lines of some packages' files."""
    records = []
    for package in PACKAGES:
        for file in sorted((Path(json.__file__).parent.parent / package).glob("*.py")):
            text = file.read_text(encoding="utf-8").splitlines(keepends=True)
            begin = 0
            while begin < len(text):
                size = 3 + len(records) % 18
                records.append({"text": "".join(text[begin : begin + size]), "label": package})
                begin += size
    return [each for each in records if each["text"].strip()]
