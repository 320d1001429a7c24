"""States of the random generators on the host: the global ones, and those that a loader's order may come from."""

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

State = dict[str, Any]


class GlobalNumbers:
    """The current states of Python's, NumPy's and torch's global random generators on the host."""

    def __init__(self) -> None:
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        self._numpy: Any = np.random.get_state()

    def restore(self) -> None:
        """Restore the states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)

    @staticmethod
    def seed(seed: int) -> None:
        """Seed all three; the generators of devices stay as they are."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)

    def state_dict(self) -> State:
        """The states as tensors and plain numbers."""
        version, words, gauss = self._python
        state: State = {
            "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
            "torch": self._torch,
        }
        # Otherwise someone replaced NumPy's generator, which is left alone.
        if isinstance(self._numpy, tuple):
            name, key, *rest = self._numpy
            state["numpy"] = [name, torch.from_numpy(np.asarray(key, dtype=np.int64)), *rest]
        return state

    def load_state_dict(self, state: State) -> "GlobalNumbers":
        """Replace the stored states; returns itself."""
        version, words, gauss = state["python"]
        self._python, self._torch = (version, tuple(words.tolist()), gauss), _bytes(state["torch"])
        if "numpy" in state:
            name, key, *rest = state["numpy"]
            self._numpy = (name, key.cpu().numpy().astype(np.uint32), *rest)
        return self


def generators_of(sampler: Any, generator: torch.Generator | None) -> list[torch.Generator]:
    """The torch generators that may determine an order: those of the loader, the sampler and samplers inside."""
    found = [] if generator is None else [generator]
    waiting, seen = deque([sampler]), set()
    while waiting:
        within = waiting.popleft()
        if id(within) in seen:
            continue
        seen.add(id(within))
        values = list(getattr(within, "__dict__", {}).values())
        drawn_from = [value for value in values if isinstance(value, torch.Generator)]
        found += [one for one in drawn_from if all(one is not other for other in found)]
        # Lightning's wrapper of a sampler for several ranks keeps it in a data set.
        waiting += [value for value in values if isinstance(value, Sampler) or hasattr(value, "_sampler")]
    return found


def restore_generators(state: State, sampler: Any, generator: torch.Generator | None) -> None:
    """Restore the states of the generators that `generators_of` finds; other generators are not known."""
    alone = state.get("generator")  # earlier versions saved only the loader's
    states = state.get("generators", [] if alone is None else [alone])
    for one, saved in zip(generators_of(sampler, generator), states, strict=False):
        one.set_state(_bytes(saved))


def _bytes(state: Tensor) -> Tensor:
    return state.cpu().to(torch.uint8)  # a `map_location` may have moved it
