"""Which logged and returned values are the loss: runs of several unlike rows tell, as one row does not.

In a micro-batch of one row the loss of a group, the largest and the median, a sum and an unweighted mean all equal it.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from torch import Tensor


class LossNames:
    """Remembers which values have equalled the loss in trials, and which have not."""

    def __init__(self) -> None:
        self._equal, self._other = set[Hashable](), set[Hashable]()
        self._is_told = False  # some trial has been seen

    def note(
        self, loss: Tensor, losses_apart: Sequence[Tensor], values: Iterable[tuple[Hashable, Any]]
    ) -> None:
        """Take what rows gave that were run as one.

        Args:
            loss: their loss.
            losses_apart: those of their micro-batches; if all are alike, the rows tell nothing.
            values: the names of values, and these.
        """
        is_unlike = bool(loss.isfinite()) and not all(same_number(loss, one) for one in losses_apart)
        self._is_told = self._is_told or is_unlike
        for name, value in values:
            if not same_number(loss, value):
                self._other.add(name)
            elif is_unlike:
                self._equal.add(name)

    def trusts(self, name: Hashable, sizes: Sequence[int]) -> bool:
        """Whether a value that equals the loss in all micro-batches, of these sizes, is the loss.

        Without any trial (ranks that communicate in every micro-batch) the micro-batches are all that is known.
        """
        if name in self._other:
            return False
        return name in self._equal or not self._is_told or max(sizes, default=1) > 1


def same_number(loss: Tensor, value: Any) -> bool:
    """Whether a value equals the loss; nan (a mean over nothing) equals nan."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        return False
    number = value.to(loss.device)
    return bool(number == loss) or bool(number.isnan() & loss.isnan())
