"""What training_step returns beside its loss, as if the whole batch had returned it."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_memkit.joining import Joining
from lightning_memkit.joining_rules import Counts, JoinError
from lightning_memkit.micro_batching import joined

Returned = Mapping[str, Any]


class ReturnedValues:
    """Puts returned values together: rows by their place, the rest by rules that the probe has shown to be right."""

    def __init__(self) -> None:
        self._joinings: dict[str, Joining] = {}
        self._wrong: set[str] = set()
        self._named: set[str] = set()

    def compare(self, whole: Returned, parts: Sequence[Returned], counts: Counts, allowed: float) -> None:
        """Learn from a small batch, run whole and in parts.

        Args:
            whole: what it returned as a whole.
            parts: what each of its parts returned.
            counts: ways of weighing, and what each part counts by them.
            allowed: the relative error that is rounding.
        """
        for name, value in whole.items():
            own = [part[name] for part in parts if name in part]
            try:
                if len(own) != len(parts):
                    raise JoinError(f"{name} is not returned for every part")
                self._joinings.setdefault(name, Joining(allowed)).compare(value, own, counts)
            except JoinError:
                self._wrong.add(name)

    def merged(
        self,
        returned: Sequence[dict[str, Any]],
        shares: Sequence[float],
        sizes: Sequence[int],
        rows: Sequence[int] | None,
    ) -> dict[str, Any]:
        """One value for each that the parts returned.

        Args:
            returned: what each part returned.
            shares: what each weighs.
            sizes: the rows of each.
            rows: which of the batch's rows they held, where they are out of order.
        """
        doubtful: list[str] = []
        whole = joined(returned, shares, sizes, rows, doubtful=doubtful)
        counts = {"loss": list(shares), "samples": [float(size) for size in sizes]}
        for name in whole:
            is_doubtful = any(f"{one}.".startswith(f"{name}.") for one in doubtful)
            if len(returned) == 1 or (rows is not None and not is_doubtful):
                continue
            try:
                if name in self._wrong or name not in self._joinings:
                    raise JoinError(f"no rule gives {name}")
                whole[name] = self._joinings[name].join([part[name] for part in returned], counts)
            except JoinError:
                if is_doubtful:
                    self._warn(name)
        return whole

    def _warn(self, name: str) -> None:
        """Once for each name."""
        if name in self._named:
            return
        self._named.add(name)
        warnings.warn(
            f"What training_step returns as {name!r} can't be made from a batch's parts: it is the last part's. "
            "Return tensors or lists of one entry a row, means, or sums.",
            stacklevel=2,
        )
