"""Remember the sizes that ran out of memory, and when a larger one is tried again."""

from collections.abc import Mapping
from typing import Any

_CALM_STEPS = 32  # without an OOM, before a larger size is tried again; twice as many after each failure


class FailedSizes:
    """Sizes of micro-batches, or of chunks, that ran out of memory; one at a time is tried again after calm steps.

    Attributes:
        patience: steps without an OOM before the next trial.
    """

    def __init__(self) -> None:
        self.patience = _CALM_STEPS
        self._larger: list[int] = []  # the smallest last
        self._calm = 0
        self._grown = False  # a larger size is tried again

    def state_dict(self) -> dict[str, Any]:
        """What decides when a larger size is tried again."""
        return {"larger": list(self._larger), "calm": self._calm, "patience": self.patience}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the saved run would have."""
        self._larger = [int(size) for size in state.get("larger", ())]
        self._calm = int(state.get("calm", 0))
        self.patience = int(state.get("patience", _CALM_STEPS))

    def forget_above(self, size: int) -> None:
        """Don't try sizes above this one again: they are slower."""
        self._larger = [larger for larger in self._larger if larger <= size]

    def ended(self, *, calm: bool) -> None:
        """Count a step, with or without an OOM."""
        self._calm = self._calm + 1 if calm else 0

    def add(self, size: int) -> None:
        """This size ran out of memory."""
        self.patience = 2 * self.patience if self._grown else _CALM_STEPS
        self._grown = False
        if not self._larger or self._larger[-1] > size:
            self._larger.append(size)

    def due(self, now: int) -> int | None:
        """The size to try again, where enough steps were calm and it is larger than the one in use; else None."""
        if not self._larger or self._calm < self.patience:
            return None
        self._calm, self._grown = 0, self._larger[-1] > now
        if self._grown:
            return self._larger[-1]
        self._larger.pop()
        return None
