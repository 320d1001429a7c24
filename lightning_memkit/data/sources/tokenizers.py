"""Converts texts to token ids: bytes without a vocabulary file, or a Hugging Face tokenizer by name."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from lightning_memkit.data.sources.chat import Conversation, Span, learned_tokens, rendered
from lightning_memkit.data.sources.store import TokenStore, offsets_of, token_type
from lightning_memkit.utilities.errors import MissingPackageError
from lightning_memkit.utilities.given import shortened

_TEXTS_AT_ONCE = 1000
_MOST_SHOWN, _MOST_CHARACTERS = 8, 300  # entries of a folder, and of transformers' reason, in an error
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Tokenizer(Protocol):
    """The interface that memkit needs of a tokenizer.

    Attributes:
        key: Identifies the tokenizer and its vocabulary; part of a cache's name.
        vocabulary_size: An upper bound (exclusive) of the token ids.
        pad_id: The token that fills the end of a row.
    """

    key: str
    vocabulary_size: int
    pad_id: int

    def tokenize(self, texts: Sequence[str]) -> TokenStore:
        """Token ids of every text."""
        ...

    def tokenize_conversations(self, conversations: Sequence[Conversation]) -> TokenStore:
        """Token ids of every conversation, and which of them are learned."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """The text of token ids."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, between a begin (256) and an end token (257); 258 is padding: 259 in all.

    It can represent any text and loads nothing, at 3 to 5 times the tokens of a trained vocabulary.
    """

    key = "bytes"
    bos_id, eos_id, pad_id = 256, 257, 258
    vocabulary_size = 259

    def tokenize(self, texts: Sequence[str]) -> TokenStore:
        """Token ids of every text."""
        return self._marked([_utf8(text) for text in texts])

    def tokenize_conversations(self, conversations: Sequence[Conversation]) -> TokenStore:
        """Token ids of every prompt with its completion; the completion and the end token are learned.

        Raises:
            ValueError: there are messages, which need a chat template.
        """
        texts, learned = [], []
        for conversation in conversations:
            if conversation.texts is None:
                raise ValueError(
                    'tokenizer="bytes" has no chat template, which messages need; give the name or the folder of a '
                    "Hugging Face tokenizer that has one, or write a 'prompt' and its 'completion', which need none."
                )
            prompt, completion = map(_utf8, conversation.texts)
            texts.append(prompt + completion)
            learned.append(np.arange(len(texts[-1]) + 2) > (len(prompt) if conversation.mask_prompt else -1))
        store = self._marked(texts)
        return TokenStore(tokens=store.tokens, offsets=store.offsets, learned=_flat(learned))

    def decode(self, ids: ArrayLike) -> str:
        """The text of token ids, without begin, end and padding."""
        values = np.asarray(ids)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def _marked(self, texts: Sequence[bytes]) -> TokenStore:
        offsets = offsets_of(np.fromiter(map(len, texts), np.int64, len(texts)) + 2)
        tokens = np.empty(int(offsets[-1]), np.uint16)
        is_byte = np.ones(len(tokens), bool)
        is_byte[offsets[:-1]] = is_byte[offsets[1:] - 1] = False
        tokens[offsets[:-1]], tokens[offsets[1:] - 1] = self.bos_id, self.eos_id
        tokens[is_byte] = np.frombuffer(b"".join(texts), np.uint8)
        return TokenStore(tokens=tokens, offsets=offsets)


class HuggingFaceTokenizer:
    """A tokenizer of the ``transformers`` package, by name or path; every document ends with an end token.

    Raises:
        MissingPackageError: ``transformers`` is not installed.
        ValueError: there is no such tokenizer.
    """

    def __init__(self, name: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise MissingPackageError("transformers", f"tokenizer={name!r}", "hf") from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"tokenizer={name!r} can't be loaded; give the name or the folder of a Hugging Face tokenizer, "
                f'or "bytes", which needs none. {_what_is_there(name, error)}'
            ) from error
        self.vocabulary_size = len(self._tokenizer)
        self.eos_id: int | None = self._tokenizer.eos_token_id
        pad_id = self._tokenizer.pad_token_id
        self.pad_id = pad_id if pad_id is not None else self.eos_id or 0
        vocabulary = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        described = backend.to_str() if backend is not None else repr(vocabulary)
        template = getattr(self._tokenizer, "chat_template", None)
        self.key = f"hf-{hashlib.sha256(f'{described}{self.eos_id}{template}'.encode()).hexdigest()[:16]}"

    def tokenize(self, texts: Sequence[str]) -> TokenStore:
        """Token ids of every text."""
        pieces, lengths = [], []
        kind = token_type(self.vocabulary_size)
        for first in range(0, len(texts), _TEXTS_AT_ONCE):
            # The tokenizers package refuses half a surrogate pair, which JSON may contain.
            batch = [_utf8(text).decode() for text in texts[first : first + _TEXTS_AT_ONCE]]
            for ids in self._tokenizer(batch, verbose=False)["input_ids"]:
                if self.eos_id is not None and (not ids or ids[-1] != self.eos_id):
                    ids = [*ids, self.eos_id]
                pieces.append(np.asarray(ids, dtype=kind))
                lengths.append(len(ids))
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, kind)
        return TokenStore(tokens=tokens, offsets=offsets_of(np.array(lengths, np.int64)))

    def tokenize_conversations(self, conversations: Sequence[Conversation]) -> TokenStore:
        """Token ids of every conversation by the chat template, and which of them are learned.

        Raises:
            ValueError: the tokenizer has no chat template, or can't map tokens to characters.
        """
        documents = [self._conversation(conversation) for conversation in conversations]
        kind = token_type(self.vocabulary_size)
        lengths = np.array([len(ids) for ids, _ in documents], np.int64)
        tokens = (
            np.concatenate([np.asarray(ids, kind) for ids, _ in documents])
            if documents
            else np.zeros(0, kind)
        )
        learned = _flat([np.asarray(learned, np.bool_) for _, learned in documents])
        return TokenStore(tokens=tokens, offsets=offsets_of(lengths), learned=learned)

    def _conversation(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        if conversation.texts is not None:
            prompt, completion = conversation.texts
            first = len(prompt) if conversation.mask_prompt else 0
            return self._with_spans(
                prompt + completion, [(first, len(prompt + completion))], is_templated=False
            )
        template = self._template()
        if conversation.mask_prompt and conversation.asked is None and _MARKS_ANSWERS.search(template):
            encoded = self._templated(
                list(conversation.messages),
                tools=conversation.tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            return encoded["input_ids"], [bool(mask) for mask in encoded["assistant_masks"]]
        text, spans = rendered(
            conversation,
            lambda messages, header: self._templated(
                messages, tools=conversation.tools, tokenize=False, add_generation_prompt=header
            ),
        )
        return self._with_spans(text, spans, is_templated=True)

    def _templated(self, messages: list[Any], **options: Any) -> Any:
        import jinja2

        try:
            if (
                not messages and not options["tokenize"]
            ):  # the header of an answer alone: an empty conversation is allowed only in a batch
                return self._tokenizer.apply_chat_template([[]], **options)[0]
            return self._tokenizer.apply_chat_template(messages, **options)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    def _with_spans(
        self, text: str, spans: list[Span], *, is_templated: bool
    ) -> tuple[list[int], list[bool]]:
        if not self._tokenizer.is_fast:
            raise ValueError(
                "This tokenizer is written in Python and can't tell which characters a token stands for, so what is a "
                "prompt is not known; take a fast one (a folder with tokenizer.json)."
            )
        encoded = self._tokenizer(
            text, add_special_tokens=not is_templated, return_offsets_mapping=True, verbose=False
        )
        ids, learned = list(encoded["input_ids"]), learned_tokens(encoded["offset_mapping"], spans)
        if not is_templated and self.eos_id is not None:
            if not ids or ids[-1] != self.eos_id:
                ids.append(self.eos_id)
                learned.append(True)
            learned[-1] = True
        return ids, learned

    def _template(self) -> str:
        try:
            return self._tokenizer.get_chat_template()
        except ValueError as error:
            raise ValueError(
                f"The tokenizer has no chat template, which messages need; give one that has. transformers says: "
                f"{error}"
            ) from None

    def decode(self, ids: ArrayLike) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(np.asarray(ids).tolist())


def _what_is_there(name: str, error: Exception) -> str:
    """What lies where a tokenizer was looked for, and transformers' reason, on one line."""
    folder, said = Path(name).expanduser(), " ".join(str(error).split())[:_MOST_CHARACTERS]
    if folder.is_file():
        return "It is a file: name the folder that holds it."
    if folder.is_dir():
        held = ", ".join(sorted(entry.name for entry in folder.iterdir())[:_MOST_SHOWN]) or "nothing"
        lacks = "" if (folder / "tokenizer.json").exists() else "no tokenizer.json, but "
        return f"The folder holds {lacks}{held}; transformers says: {said}"
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:  # the hub has "owner/name"
        there = sorted(entry.name for entry in folder.parent.iterdir()) if folder.parent.is_dir() else []
        beside = f"; in {folder.parent} are {', '.join(there[:_MOST_SHOWN])}" if there else ""
        return f"There is no such folder{beside}."
    return f"There is no such folder here, and transformers says: {said}"


def name_of_tokenizer(given: Any) -> str:
    """The name or path of a tokenizer, as a text.

    Raises:
        ValueError: it is neither, such as a tokenizer itself.
    """
    if isinstance(given, (str, Path)) and str(given).strip():
        return str(given)
    own_name = getattr(given, "name_or_path", None)
    if isinstance(own_name, str) and own_name:
        remedy = f"write tokenizer={own_name!r}, or the folder to which you save it"
    elif isinstance(given, int):
        remedy = f"the argument after the source is the tokenizer: name the others, as in context={given}"
    else:
        remedy = (
            'write "bytes", or the name or folder of a Hugging Face tokenizer; to use another one, give the '
            "token ids that it makes as the source, with any tokenizer here"
        )
    raise ValueError(f"tokenizer={shortened(given)} is no name of a tokenizer; {remedy}.")


def load_tokenizer(name: str) -> Tokenizer:
    """``"bytes"``, or the name or path of a Hugging Face tokenizer."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def _flat(learned: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(learned) if learned else np.zeros(0, np.bool_)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")
