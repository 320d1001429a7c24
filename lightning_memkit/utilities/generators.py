"""Save and restore random number generators of Python, NumPy and torch, global ones or a user's."""

import random
from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def state_of(generator: Any) -> Any:
    """The state of one of `GENERATORS`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Restore a generator to a state from `state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def torch_states() -> list[Tensor]:
    """The states of torch's global generators."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def same_states(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether nothing was drawn between two calls of `torch_states`."""
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=False))


def held_generators(module: nn.Module, kinds: tuple[type, ...]) -> list[Any]:
    """The generators of these kinds in attributes of modules and of their classes, also within tuples."""
    found: dict[int, Any] = {}
    children = list(module.modules())
    classes = {kind for child in children for kind in type(child).__mro__}
    for owner in (*children, *classes):
        for value in vars(owner).values():
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, kinds):
                    found[id(one)] = one
    return list(found.values())


class Generators:
    """The state of every global random number generator that a step may use: Python, NumPy, torch.

    Args:
        held: torch's generators that a module has besides.
    """

    def __init__(self, held: Iterable[torch.Generator] = ()) -> None:
        self._held = [(generator, generator.get_state()) for generator in held]
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._cpu, *self._cuda = torch_states()

    def drawn_from(self) -> tuple[bool, bool]:
        """Whether numbers were drawn since: from torch, and from Python or NumPy."""
        now = Generators()
        numpys = zip(self._numpy, now._numpy, strict=True)
        elsewhere = self._python != now._python or not all(np.array_equal(a, b) for a, b in numpys)
        held = all(torch.equal(generator.get_state(), state) for generator, state in self._held)
        return not (held and same_states([self._cpu, *self._cuda], [now._cpu, *now._cuda])), elsewhere

    def stand_as_now(self) -> bool:
        """Whether no number was drawn since."""
        return self.drawn_from() == (False, False)

    def restore(self) -> None:
        """Restore all generators."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in self._held:
            generator.set_state(state)


def seed_all(seed: int, held: Iterable[torch.Generator] = ()) -> None:
    """Seed the global random number generators of Python, NumPy and torch, and those that a module has besides."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for generator in held:
        generator.manual_seed(seed)


def another_seed() -> int:
    """A seed whose numbers are others than those that come next: a fixed one may be the user's own."""
    return crc32(torch.get_rng_state().numpy().tobytes())  # draws nothing, so that no dispatch mode sees it
