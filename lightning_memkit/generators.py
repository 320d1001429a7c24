"""Generators of random numbers that a user holds, of Python, NumPy and torch: where each stands, and back there."""

import random
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def state_of(generator: Any) -> Any:
    """Where one of `GENERATORS` stands."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Let a generator go on from where `state_of` has found it."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
