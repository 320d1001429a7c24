"""Which blocks are checkpointed: one frozen class a policy, one parser for their short names."""

import re
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")

POLICIES = '"full" (every block), "every:k" (every k-th block, such as "every:2")'


@dataclass(frozen=True, kw_only=True)
class EveryKthBlock:
    """Checkpoint blocks 0, k, 2k, ...; k = 1 is all of them. The larger k, the more is kept and the less repeated."""

    k: int = 1

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(
                f"k={self.k} is not a policy: k is a whole number of at least 1; k=1 is every block."
            )

    def select(self, blocks: list[_T]) -> list[_T]:
        """The blocks to checkpoint, out of all blocks in order."""
        return blocks[:: self.k]


def parse_policy(policy: str) -> EveryKthBlock:
    """The policy behind a short name.

    Raises:
        ValueError: the name is none of `POLICIES`, or its number is out of range.
    """
    if policy == "full":
        return EveryKthBlock()
    match = re.fullmatch(r"every:(-?\d+)", policy) if isinstance(policy, str) else None
    if match is None:
        raise ValueError(f"policy={policy!r} is unknown; the policies are {POLICIES}.")
    return EveryKthBlock(k=int(match[1]))
