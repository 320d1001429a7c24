"""Converts records to token ids: texts, conversations, prompts with completions, or existing ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from lightning_memkit.data.sources.chat import conversation_of
from lightning_memkit.data.sources.source import Numbered, Source, SourcePart
from lightning_memkit.data.sources.store import TokenStore, joined
from lightning_memkit.data.sources.token_records import (
    Column,
    mixed,
    shown,
    store_of_columns,
    store_of_records,
)
from lightning_memkit.data.sources.tokenizers import Tokenizer

RecordKind = Literal["auto", "text", "messages", "prompt", "input_ids"]
_ID_COLUMNS = ("input_ids", "attention_mask", "labels", "completion_mask", "assistant_masks")
_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """How a record is read.

    Attributes:
        text_field: The field that holds a text.
        kind: Which fields form the document; ``auto`` detects it.
        mask_prompt: Gives no labels to what the model is asked.
    """

    text_field: str = "text"
    kind: RecordKind = "auto"
    mask_prompt: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(RecordKind):
            raise ValueError(f"kind={self.kind!r} is unknown; choose one of {get_args(RecordKind)}.")


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Converts parts of a source to token stores.

    Attributes:
        source: The source.
        tokenizer: None if all records are token ids.
        options: How a record is read.
    """

    source: Source
    tokenizer: Tokenizer | None
    options: RecordOptions

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that the tokens depend on."""
        tokenizer = self.tokenizer.key if self.tokenizer else None
        return {"source": self.source.identity, "tokenizer": tokenizer, **asdict(self.options)}

    def __call__(self, part: SourcePart) -> TokenStore:
        """The documents of a part, without blank ones.

        Raises:
            ValueError: a record is of no kind, or of more than one.
        """
        if self.options.kind in ("auto", "input_ids") and (table := self.source.columns(part)) is not None:
            return self._of_columns(table, part)
        groups = groupby(self.source.records(part), key=lambda numbered: self._kind(part, *numbered))
        return joined(self._encoded(kind, part, list(group)) for kind, group in groups)

    def _encoded(self, kind: str, part: SourcePart, group: list[Numbered]) -> TokenStore:
        first, records = group[0][0], [record for _, record in group]
        if kind == "input_ids":
            if self.tokenizer is not None:
                raise ValueError(f"{self.source.where(part, first)} {mixed('token ids', 'texts')}")
            return self._each(lambda some, at: store_of_records(some, at), part, group, records)
        if self.tokenizer is None:
            raise ValueError(f"{self.source.where(part, first)} {mixed('no token ids', 'token ids')}")
        tokenizer = self.tokenizer
        if kind == "text":
            texts = (
                record if isinstance(record, str) else record[self.options.text_field] for record in records
            )
            return tokenizer.tokenize([text for text in texts if text.strip()])
        conversations = self._each(
            lambda some, _: [
                conversation_of(record, kind, mask_prompt=self.options.mask_prompt) for record in some
            ],
            part,
            group,
            records,
        )
        return self._each(lambda some, _: tokenizer.tokenize_conversations(some), part, group, conversations)

    def _each(
        self,
        make: Callable[[list[Any], int], _Made],
        part: SourcePart,
        group: list[Numbered],
        items: list[Any],
    ) -> _Made:
        """The result for all items at once; if that fails, the error of the first item that fails by itself."""
        try:
            return make(items, group[0][0])
        except ValueError as of_all:
            for (number, _), item in zip(group, items, strict=True):
                try:
                    make([item], number)
                except ValueError as error:
                    raise ValueError(f"{self.source.where(part, number)}: {error}") from None
            raise ValueError(f"{part.file or self.source.name}: {of_all}") from None

    def _of_columns(self, table: Any, part: SourcePart) -> TokenStore:
        names = [name for name in _ID_COLUMNS if name in table.column_names]
        return store_of_columns(
            {name: self._flat(name, table.column(name), part) for name in names}, part.first
        )

    def _flat(self, name: str, column: Any, part: SourcePart) -> Column:
        lists = column.combine_chunks()
        lists = lists.chunk(0) if hasattr(lists, "chunk") else lists
        counts = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        values = lists.flatten()
        missing = np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False))
        if not len(missing) and values.null_count:
            at = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
            missing = np.searchsorted(np.cumsum(counts), at, "right")
        if len(missing):
            where = self.source.where(part, part.first + int(missing[0]))
            raise ValueError(
                f"{where} has null in {name!r} ({len(missing):,} such here); it is one "
                "row of integers, and an empty one is no document. Fill it in, or leave the record out; of records "
                "that have texts instead, tokenise all or none."
            )
        return values.to_numpy(zero_copy_only=False), counts

    def _kind(self, part: SourcePart, number: int, record: Any) -> str:
        kinds = kinds_of(record, self.options.text_field)
        wanted = self.options.kind
        if wanted != "auto":
            if wanted in kinds:
                return wanted
        elif len(kinds) == 1 or "input_ids" in kinds:  # records with tokens don't need their other fields
            return kinds[0]
        where = self.source.where(part, number)
        field = self.options.text_field
        if len(kinds) > 1 and wanted == "auto":
            raise ValueError(
                f"{where} could be read as any of {kinds}; say which with documents.kind, in Python "
                f"with DocumentOptions(kind={kinds[0]!r})."
            )
        rules = {
            field: ("text", "a text is a string (an empty one is no document)"),
            "messages": ("messages", "messages are a list"),
        }
        for name, (what, rule) in rules.items():
            if isinstance(record, Mapping) and name in record and wanted in ("auto", what):
                raise ValueError(
                    f"{where} has no {what}: its {name!r} is {shown(record[name])}, and {rule}; write "
                    "it so, or leave the record out."
                )
        found = sorted(record) if isinstance(record, Mapping) else shown(record)
        rule = (
            f"no text under {field!r}" if wanted in ("auto", "text") else f"nothing to be read as {wanted!r}"
        )
        raise ValueError(
            f"{where} has {rule} (found: {found}); a document is a text, 'messages', a 'prompt' with "
            "its 'completion', or 'input_ids'. Name another field of texts with documents.text_field, in Python with "
            "DocumentOptions(text_field=...)."
        )


def kinds_of(record: Any, text_field: str = "text") -> list[str]:
    """The kinds as which a record can be read."""
    if isinstance(record, str):
        return ["text"]
    if isinstance(record, (bytes, bytearray)):
        return []
    if not hasattr(record, "keys"):
        return ["input_ids"] if isinstance(record, Sequence) or hasattr(record, "__array__") else []
    holds = {
        "input_ids": "input_ids" in record,
        "text": isinstance(record.get(text_field), str),
        "messages": isinstance(record.get("messages"), list),
        "prompt": "prompt" in record and "completion" in record,
    }
    return [kind for kind, is_there in holds.items() if is_there]
