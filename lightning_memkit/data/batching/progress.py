"""What a loader has dealt so far."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What was dealt to all ranks.

    Attributes:
        documents: That began.
        tokens: Without padding.
        room: Tokens with padding.
    """

    documents: int = 0
    tokens: int = 0
    room: int = 0

    def plus(self, more: "Progress") -> "Progress":
        """Both together."""
        return Progress(
            documents=self.documents + more.documents,
            tokens=self.tokens + more.tokens,
            room=self.room + more.room,
        )

    def times(self, number: int) -> "Progress":
        """So many times as much."""
        return Progress(
            documents=self.documents * number, tokens=self.tokens * number, room=self.room * number
        )
