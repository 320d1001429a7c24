"""Converts records to token ids: texts, conversations, prompts with completions, or existing ids."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal, TypeVar, get_args

from lightning_memkit.data.sources.chat import conversation_of, made_of, with_messages
from lightning_memkit.data.sources.columns import flat_column
from lightning_memkit.data.sources.source import Numbered, Source, SourcePart
from lightning_memkit.data.sources.store import TokenStore, joined
from lightning_memkit.data.sources.surrogates import holds_half, without_halves
from lightning_memkit.data.sources.token_records import (
    mixed,
    shown,
    store_of_columns,
    store_of_records,
)
from lightning_memkit.data.sources.tokenizers import Tokenizer
from lightning_memkit.utilities.given import shortened

RecordKind = Literal["auto", "text", "messages", "prompt", "input_ids"]
_ID_COLUMNS = ("input_ids", "attention_mask", "labels", "completion_mask", "assistant_masks")
_TEXT_FIELDS = ("messages", "prompt", "completion", "tools")
_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """How a record is read.

    Attributes:
        text_field: The field that holds a text.
        kind: Which fields form the document; ``auto`` detects it. ``messages`` may also be `conversations`
            (ShareGPT), or `instruction` and `output` (Alpaca).
        mask_prompt: Gives no labels to what the model is asked.
    """

    text_field: str = "text"
    kind: RecordKind = "auto"
    mask_prompt: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.text_field, str):
            raise ValueError(
                f"text_field={shortened(self.text_field)} is no name; give that of the field that holds the text."
            )
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
    _told: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

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
        groups = groupby(self._records(part), key=lambda numbered: self._kind(part, *numbered))
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
            for (number, record), item in zip(group, items, strict=True):
                try:
                    make([item], number)
                except ValueError as error:
                    where, fields = self.source.where(part, number), made_of(record)
                    read_as = f", read as messages for its {fields}" if fields else ""
                    raise ValueError(f"{where}{read_as}: {error}") from None
            raise ValueError(f"{part.file or self.source.name}: {of_all}") from None

    def _of_columns(self, table: Any, part: SourcePart) -> TokenStore:
        names = [name for name in _ID_COLUMNS if name in table.column_names]

        def where(row: int) -> str:
            return self.source.where(part, part.first + row)

        columns = {name: flat_column(name, table.column(name), where) for name in names}
        try:
            return store_of_columns(columns, part.first)
        except ValueError as error:
            raise ValueError(f"{part.file or self.source.name}: {error}") from None

    def _records(self, part: SourcePart) -> Iterator[Numbered]:
        """The records of a part; halves of surrogate pairs in their texts, if any, are reported and replaced."""
        fields = (self.options.text_field, *_TEXT_FIELDS)
        for number, record in self.source.records(part):
            if isinstance(record, Mapping):
                record = self._in_messages(record, part, number)
                broken = [name for name in fields if name in record and holds_half(record[name])]
                if broken:
                    self._tell_of_halves(part, number, f"its {broken[0]!r}")
                    record = {**record, **{name: without_halves(record[name]) for name in broken}}
            elif isinstance(record, str) and holds_half(record):
                self._tell_of_halves(part, number, "it")
                record = without_halves(record)
            yield number, record

    def _in_messages(self, record: Mapping[str, Any], part: SourcePart, number: int) -> Mapping[str, Any]:
        """The record, whose chat format becomes messages where nothing else in it is the document."""
        if "conversations" not in record and "instruction" not in record:
            return record
        kinds, wanted = kinds_of(record, self.options.text_field), self.options.kind
        if "messages" in kinds or (kinds if wanted == "auto" else wanted != "messages"):
            return record
        try:
            return with_messages(record)
        except ValueError as error:
            raise ValueError(f"{self.source.where(part, number)}: {error}") from None

    def _tell_of_halves(self, part: SourcePart, number: int, what: str) -> None:
        if self._told:  # each process tells of its first
            return
        self._told.append(number)
        warnings.warn(
            f"{self.source.where(part, number)}: {what} holds half of a surrogate pair, which is no character and is "
            "read as '?', here and in the documents that follow; it comes of a text that was cut within an emoji, "
            "say. Mend the text, or leave the record out.",
            stacklevel=2,
        )

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
            "its 'completion', or 'input_ids'. Another field of texts: documents.text_field, or "
            "DocumentOptions(text_field=)."
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
