"""Let each micro-batch draw from Python's and NumPy's generators what the whole batch would draw.

A step may draw a number for its batch (the weight of a mixup, a coin that is tossed) from one of these. If
micro-batches went on drawing, each would have its own. So each begins with the states that the batch began with. That
is right where draws do not depend on rows: then every micro-batch leaves the states that the batch would leave.
Torch's generators are left alone: dropout draws for rows, and each row needs numbers of its own.
"""

import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.shares.foreseen import UnequalDrawsError, UnforeseenLossError
from lightning_memkit.utilities.generators import held_generators, set_state, state_of

_OWN = (random.Random, np.random.Generator, np.random.RandomState)
_UNPROVEN = "numbers of Python's or NumPy's generators, drawn for the first time"

States = list[Any]


class EqualDraws:
    """Restores the generators of Python, of NumPy and of the module's own before each micro-batch but the first.

    Args:
        module: the module whose attributes may be generators.

    Attributes:
        proven: a comparison has shown that micro-batches may draw the same numbers.
        required: draws that are not proven are an error; else each micro-batch draws its own numbers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.proven, self.required = False, True
        self._module = module
        self._own: list[Any] | None = None
        self._of_torch: list[torch.Generator] | None = None
        self._has_warned = False
        self._start: States = []
        self._end: States | None = None  # what the micro-batch before left, if it drew
        self._ran = False  # a micro-batch of this batch

    @property
    def of_torch(self) -> list[torch.Generator]:
        """The module's own generators of torch, which draw for rows as the global one does."""
        if self._of_torch is None:
            self._of_torch = held_generators(self._module, (torch.Generator,))
        return self._of_torch

    def begin(self) -> None:
        """A batch begins."""
        if self._own is None:  # not earlier: a hook of the module's may make them
            self._own = held_generators(self._module, _OWN)
        self._start, self._end, self._ran = self._states(), None, False

    def begin_part(self) -> None:
        """A micro-batch begins."""
        if self._end is not None and self.proven:
            self.restore()

    def end_part(self, *, looks: bool) -> None:
        """A micro-batch has run.

        Args:
            looks: whether to look for draws where none is proven; reading NumPy's state takes 40 µs.

        Raises:
            UnforeseenLossError: it drew numbers, and no comparison has shown that it may.
            UnequalDrawsError: it drew more, or less, than the micro-batches before.
        """
        if not (looks or self.proven):
            return
        drawn = self.drawn()
        if drawn is not None and not self.proven and self.required:
            raise UnforeseenLossError(_UNPROVEN)
        if self.proven and self._ran and not alike(drawn, self._end):
            raise UnequalDrawsError
        if drawn is not None and not self.proven and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "training_step draws from Python's or NumPy's generators, and nothing was compared: each micro-batch "
                "draws numbers of its own, where the whole batch would draw once. Draw a number a row, by torch.",
                stacklevel=2,
            )
        self._end, self._ran = drawn, True

    def drawn(self) -> States | None:
        """The generators' states if numbers were drawn since the batch began, else None."""
        now = self._states()
        python, *others = now
        known, *known_others = self._start
        # Python's has 625 numbers, which are told apart most quickly as they are.
        return None if python == known and alike(others, known_others) else now

    def restore(self) -> None:
        """Put the generators back to where the batch began."""
        assert self._own is not None
        python, numpys, *own = self._start
        random.setstate(python)
        np.random.set_state(numpys)
        for generator, state in zip(self._own, own, strict=True):
            set_state(generator, state)

    def _states(self) -> States:
        return [random.getstate(), np.random.get_state(), *map(state_of, self._own or ())]
