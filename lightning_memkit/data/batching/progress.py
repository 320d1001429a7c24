"""Counts what a loader has delivered so far."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What was delivered to all ranks.

    Attributes:
        documents: Documents that began.
        tokens: Tokens without padding.
        room: Tokens with padding.
    """

    documents: int = 0
    tokens: int = 0
    room: int = 0

    def plus(self, more: "Progress") -> "Progress":
        """The sum of both."""
        return Progress(
            documents=self.documents + more.documents,
            tokens=self.tokens + more.tokens,
            room=self.room + more.room,
        )

    def times(self, number: int) -> "Progress":
        """This progress, multiplied by a number."""
        return Progress(
            documents=self.documents * number, tokens=self.tokens * number, room=self.room * number
        )
