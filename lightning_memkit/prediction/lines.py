"""How the peak grows with the batch, operator by operator, from a few predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_memkit.prediction.result import Prediction


@dataclass(frozen=True, kw_only=True, eq=False)
class PeakLines:
    """The predicted peak for any size (rows of a batch, tokens of a row), from predictions at a few.

    The bytes alive at each operator are a polynomial of the size, of one degree less than the number of
    predicted sizes: two give lines, as for rows; three give parabolas, as for lengths with attention that
    saves its scores. The peak is the maximum over operators, so a different operator may have it at a
    different size.

    Args:
        sizes: the predicted sizes.
        bytes_alive: by operator and size, [operators, sizes].
    """

    sizes: tuple[int, ...]
    bytes_alive: NDArray[np.int64]

    @staticmethod
    def through(predictions: Mapping[int, Prediction]) -> "PeakLines":
        """Fit the predictions of some sizes.

        Raises:
            ValueError: there are fewer than two sizes, or the steps run different operators for different
                sizes.
        """
        if len(predictions) < 2:
            raise ValueError(f"{len(predictions)} size(s) give no line; predict two, or three for a length.")
        counts = {size: len(prediction.timeline) for size, prediction in predictions.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"The steps run other operators for other sizes ({counts} by size), so that nothing can be said of "
                "the sizes between; predict each size by itself."
            )
        sizes = tuple(sorted(predictions))
        alive = np.array([predictions[size].timeline for size in sizes], np.int64).T
        return PeakLines(sizes=sizes, bytes_alive=alive)

    def peak_bytes(self, size: int) -> int:
        """The predicted peak at a size.

        Raises:
            ValueError: the size is below 1.
        """
        if size < 1:
            raise ValueError(f"size={size} is below 1; it is a number of rows, or of tokens.")
        # The sum is an integer except for the weights' rounding errors: don't round those up.
        return int(np.ceil((self.bytes_alive @ self._weights(size)).max() - 1e-3))

    def largest_fitting(self, budget_bytes: int, sizes: Sequence[int]) -> int | None:
        """The largest of some sizes whose peak is within a budget; None if there is none."""
        return max((size for size in sizes if self.peak_bytes(size) <= budget_bytes), default=None)

    def _weights(self, size: int) -> NDArray[np.float64]:
        """Lagrange weights: how much each predicted size contributes at this one."""
        found = np.ones(len(self.sizes))
        for index, own in enumerate(self.sizes):
            for other in self.sizes[:index] + self.sizes[index + 1 :]:
                found[index] *= (size - other) / (own - other)
        return found
