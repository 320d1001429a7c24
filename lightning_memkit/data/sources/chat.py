"""Renders conversations as text, with the characters that the model is to learn: the answers, not the questions.

The position of each answer follows from the tokenizer's chat template alone: the text up to and including the
header of an answer, and the text up to the answer's end, are both prefixes of the whole. A template that
rewrites earlier turns has no such prefixes and is refused, unless its ``{% generation %}`` marks show the
answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Span = tuple[int, int]
_ROLES = {  # of ShareGPT's turns
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "assistant": "assistant",
    "tool": "tool", "observation": "tool",
}  # fmt: skip
Render = Callable[[list[Any], bool], str]  # messages, and whether the header of an answer follows


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation, or a prompt and its completion.

    Attributes:
        messages: The turns; empty if prompt and completion are plain text.
        asked: How many of the messages are the prompt; None: every answer among them is learned.
        texts: Prompt and completion as plain text, if there are no messages.
        tools: The tools that are passed to the template.
        mask_prompt: Whether only answers are learned.
    """

    messages: tuple[Any, ...] = ()
    asked: int | None = None
    texts: tuple[str, str] | None = None
    tools: Any = None
    mask_prompt: bool = True


def conversation_of(record: Mapping[str, Any], kind: str, *, mask_prompt: bool = True) -> Conversation:
    """The conversation of a record with ``messages``, or ``prompt`` and ``completion`` (texts, or lists of messages).

    Raises:
        ValueError: prompt and completion are of different kinds, or there is no message or no answer.
    """
    tools = record.get("tools")
    if kind == "messages":
        messages = _messages(record["messages"])
        if mask_prompt and not any(message.get("role") == "assistant" for message in messages):
            roles = sorted({str(message.get("role")) for message in messages})
            raise ValueError(
                f"no message is of the role 'assistant' (roles: {roles}), so nothing is learned of it; leave it out, "
                "or learn all of it with documents.mask_prompt=false."
            )
        return Conversation(messages=messages, tools=tools, mask_prompt=mask_prompt)
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation(texts=(prompt, completion), mask_prompt=mask_prompt)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise ValueError(
            f"'prompt' is {type(prompt).__name__} and 'completion' {type(completion).__name__}; both are texts, or "
            "both are lists of messages."
        )
    messages = _messages([*prompt, *completion])
    return Conversation(messages=messages, asked=len(prompt), tools=tools, mask_prompt=mask_prompt)


def with_messages(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with ``messages`` in the place of other chat formats: ShareGPT's, and Alpaca's instructions.

    Those have ``conversations`` of turns with ``from`` and ``value``, or an ``instruction`` (with an ``input``,
    perhaps), its ``output`` and, before them, a ``history`` of such pairs; both may have a ``system`` text. Other
    records come back as they are.

    Raises:
        ValueError: a turn is of an unknown role, or the history is of another form.
    """
    turns = record.get("conversations")
    if isinstance(turns, list) and turns and all(isinstance(turn, Mapping) for turn in turns):
        messages = [_message(turn) for turn in turns]
    elif isinstance(record.get("instruction"), str) and isinstance(record.get("output"), str):
        asked = [
            part
            for part in (record["instruction"], record.get("input"))
            if isinstance(part, str) and part.strip()
        ]
        pairs = [*_earlier(record.get("history")), ("\n\n".join(asked), record["output"])]
        messages = [
            {"role": role, "content": text}
            for pair in pairs
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    else:
        return record
    system = record.get("system")
    if isinstance(system, str) and system.strip() and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return {**record, "messages": messages}


def made_of(record: Any) -> str:
    """The fields of another chat format that a record's messages were made of; empty if they are its own."""
    if not isinstance(record, Mapping) or "messages" not in record:
        return ""
    without = {name: value for name, value in record.items() if name != "messages"}
    try:
        made = with_messages(without).get("messages")
    except ValueError:
        return ""
    if made != record["messages"]:
        return ""
    return (
        "'conversations' (ShareGPT)" if "conversations" in record else "'instruction' and 'output' (Alpaca)"
    )


def _earlier(history: Any) -> list[tuple[str, str]]:
    """The pairs of question and answer before an instruction."""
    pairs = [tuple(pair) for pair in history or () if isinstance(pair, (list, tuple))]
    texts = [text for pair in pairs for text in pair]
    if (
        len(pairs) < len(history or ())
        or len(texts) != 2 * len(pairs)
        or not all(isinstance(t, str) for t in texts)
    ):
        raise ValueError("its 'history' is no list of pairs of texts; write 'messages' instead.")
    return pairs


def _message(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """A turn as a message; one that has a role already stays as it is."""
    if "role" in turn or "from" not in turn or "value" not in turn:
        return turn
    role = _ROLES.get(str(turn["from"]).lower())
    if role is None:
        known = ", ".join(_ROLES)
        raise ValueError(
            f"a turn is 'from' {turn['from']!r}, which is no known role ({known}); write 'messages' instead."
        )
    return {"role": role, "content": turn["value"]}


def rendered(conversation: Conversation, render: Render) -> tuple[str, list[Span]]:
    """The text of a conversation's messages, and the character ranges that are learned.

    Raises:
        ValueError: the template's text of the first turns is not a prefix of its text of all, or it refuses
            them.
    """
    messages = list(conversation.messages)
    whole = render(messages, False)
    if not conversation.mask_prompt:
        return whole, [(0, len(whole))]
    if conversation.asked is not None:
        return whole, [(_end_of(messages[: conversation.asked], True, whole, render), len(whole))]
    spans = []
    for number, message in enumerate(messages):
        if message.get("role") == "assistant":
            begin = _end_of(messages[:number], True, whole, render)
            is_last = number == len(messages) - 1
            end = len(whole) if is_last else _end_of(messages[: number + 1], False, whole, render)
            spans.append((begin, end))
    return whole, spans


def learned_tokens(places: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Which tokens contain a learned character; a token that crosses the begin of a range counts.

    Args:
        places: The character range of each token; empty ranges are special tokens or white space that the
            tokenizer drops, and belong to the span that contains them.
        spans: The character ranges that are learned.
    """
    return [
        any(begin < last and (end > first or begin == end >= first) for first, last in spans)
        for begin, end in places
    ]


def _messages(messages: list[Any]) -> tuple[Any, ...]:
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(
                f"a message is {type(message).__name__}; each is a mapping with role and content, such as "
                "{'role': 'user', 'content': 'Hello'}."
            )
    return tuple(messages)


def _end_of(turns: list[Any], header: bool, whole: str, render: Render) -> int:
    try:
        beginning = render(turns, header)
    except ValueError:
        if turns:
            raise
        beginning = None
    if beginning is None or (not turns and not whole.startswith(beginning)):
        raise ValueError(
            "the chat template begins otherwise where an answer stands first, so where it begins is not known; "
            "put a message before it, or learn all of it with documents.mask_prompt=false."
        )
    if not whole.startswith(beginning):
        raise ValueError(
            f"the chat template writes the first {len(turns)} messages otherwise where more follow, so where an "
            "answer stands is not known; give a tokenizer whose template marks answers with {% generation %}, split "
            "the record into a prompt and its completion, or learn all of it with documents.mask_prompt=false."
        )
    return len(beginning)
