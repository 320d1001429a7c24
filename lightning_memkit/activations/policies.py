"""What is saved of a forward: a frozen class for each policy, and one parser for their short names."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from lightning_memkit.activations.operators import is_attention, is_matmul
from lightning_memkit.memory.units import parse_bytes, parse_fraction

_T = TypeVar("_T")

POLICIES = (
    '"full", "every:k" (every k-th block), "selective" or "selective:attention,matmul/2" (operators to save), '
    '"budget:0.5" or "budget:2GiB" (of saved activations), "auto:22GiB" (of a step), "compile:0.5" (blocks compiled)'
)
_GROUPS: dict[str, Callable[[str], bool]] = {"attention": is_attention, "matmul": is_matmul}


@dataclass(frozen=True, kw_only=True)
class EveryKthBlock:
    """Checkpoint blocks 0, k, 2k, ...; k = 1 is all of them. A larger k saves more and recomputes less."""

    k: int = 1

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(
                f"k={self.k} is not a policy: k is a whole number of at least 1; k=1 is every block."
            )

    def select(self, blocks: list[_T]) -> list[_T]:
        """The blocks to checkpoint, out of all blocks in order."""
        return blocks[:: self.k]


@dataclass(frozen=True, kw_only=True)
class SavedOperators:
    """Save the outputs of these operators and recompute all others.

    Args:
        save: (pattern, k): every k-th operator of a block that matches the pattern. A pattern is `attention`,
            `matmul` or a glob over operators' names (`silu`, `_softmax*`).
    """

    save: tuple[tuple[str, int], ...] = (("attention", 1), ("matmul", 2))

    def __post_init__(self) -> None:
        for pattern, every in self.save:
            if not pattern or every < 1:
                raise ValueError(
                    f'policy="selective:{pattern}/{every}" names no operator to save: write name or name/k with k of '
                    'at least 1, such as "selective:attention,matmul/2".'
                )

    def chooser(self) -> Callable[[str], bool]:
        """A function for one forward of one block: called for each operator, it tells whether to save its output."""
        seen: Counter[str] = Counter()

        def chosen(name: str) -> bool:
            saved = False
            for pattern, every in self.save:
                if matches(name, pattern):
                    saved |= seen[pattern] % every == 0
                    seen[pattern] += 1
            return saved

        return chosen


@dataclass(frozen=True, kw_only=True)
class SavedBytesLimit:
    """Save at most this many bytes, with the least recomputation that measuring finds.

    Args:
        fraction: a fraction of what the model saves without checkpointing, in (0, 1]; or
        size_bytes: the bytes themselves.
        whole_step: `size_bytes` bounds a whole step: weights, gradients, AdamW's states and the backward's
            temporaries (estimated as what is saved outside of the blocks, plus the largest block) count, too.
    """

    fraction: float | None = None
    size_bytes: int | None = None
    whole_step: bool = False

    def __post_init__(self) -> None:
        if self.fraction is not None and not 0 < self.fraction <= 1:
            hint = (
                f"; for {self.fraction:g} % write {self.fraction / 100:g}" if 1 < self.fraction <= 100 else ""
            )
            raise ValueError(
                f'policy="budget:{self.fraction:g}" is outside (0, 1]: it is the fraction of the saved activations '
                f'to keep, or a size such as "budget:2GiB"{hint}; for the least of all write "full".'
            )

    def bytes_of(self, total_bytes: int) -> int:
        """The budget, if `total_bytes` would be saved without it."""
        return self.size_bytes if self.size_bytes is not None else int((self.fraction or 0) * total_bytes)


@dataclass(frozen=True, kw_only=True)
class CompiledBlocks:
    """Compile each block; torch's partitioner saves at most this fraction of what it would save by itself."""

    budget: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            raise ValueError(
                f'policy="compile:{self.budget:g}" is outside [0, 1]: 1 saves what torch.compile saves by itself, '
                "0 the blocks' inputs only; write for example compile:0.5."
            )


Policy = EveryKthBlock | SavedOperators | SavedBytesLimit | CompiledBlocks


def parse_policy(policy: str) -> Policy:
    """The policy of a short name.

    Raises:
        ValueError: the name is none of `POLICIES`, or its number is out of range.
    """
    name, colon, rest = policy.partition(":") if isinstance(policy, str) else ("", "", "")
    if policy == "full":
        return EveryKthBlock()
    if policy == "selective":
        return SavedOperators()
    if name == "every" and re.fullmatch(r"-?\d+", rest):
        return EveryKthBlock(k=int(rest))
    if name == "selective" and rest:
        return SavedOperators(save=tuple(_operator(part, policy) for part in rest.split(",")))
    if name == "budget" and rest:
        number = _number(rest)
        if number is not None and number <= 100:  # larger numbers are counts of bytes
            return SavedBytesLimit(fraction=number)
        return SavedBytesLimit(size_bytes=_size(rest, policy))
    if policy == "auto":
        raise ValueError(
            'policy="auto" needs the bytes of a step: write a size, such as "auto:22GiB"; in Lightning put a '
            "MemoryBudget beside it."
        )
    if name == "auto" and rest:
        return SavedBytesLimit(size_bytes=_size(rest, policy), whole_step=True)
    if name == "compile" and (number := _number(rest)) is not None:
        return CompiledBlocks(budget=number)
    raise ValueError(f"policy={policy!r} is unknown; the policies are {POLICIES}.")


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of `SavedOperators` matches an operator's name."""
    return _GROUPS[pattern](name) if pattern in _GROUPS else fnmatchcase(name, pattern.removeprefix("aten."))


def _operator(part: str, policy: str) -> tuple[str, int]:
    match = re.fullmatch(r"\s*([\w.*?\[\]]+)\s*(?:/\s*(\d+))?\s*", part)
    if match is None:
        raise ValueError(
            f"policy={policy!r}: {part!r} names no operator to save; write names with commas between, each with /k "
            'for every k-th of them, such as "selective:attention,matmul/2,silu".'
        )
    return match[1], int(match[2] or 1)


def _size(text: str, policy: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"policy={policy!r} is no budget: {error}") from None


def _number(text: str) -> float | None:
    if text.endswith("%"):
        return parse_fraction(text)
    try:
        return float(text)
    except ValueError:
        return None
