"""Rounds float32 to bfloat16 up or down at random, unbiased: 0 bytes, and small updates accumulate.

A value between two neighbouring bfloat16 numbers goes to the upper one with a probability proportional to its
distance from the lower one (Gupta et al., "Deep Learning with Limited Numerical Precision",
arXiv:1502.02551).

The noise is a function of (seed, step, stream, element, kind of device) and of nothing else: it neither reads
nor changes torch's own random state, it is the same for every bucket size and, on CPUs, for every sharding by
rows, and two integers resume it. Drawing it is the slow part on a CPU. So a step there draws one tile of
16-bit numbers, and every run of ``TILE`` elements reads the tile from another offset and XORs it with a
16-bit key of its own: each element's noise is uniform, any two elements' are independent, and drawing costs
next to nothing.
"""

import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lightning_memkit.optim import native
from lightning_memkit.optim.blocks import BLOCK_ELEMENTS, flat_views, surely_finite

TILE = BLOCK_ELEMENTS
_MANY_STREAMS = 8  # arrays are quicker from here on: a released gradient is often stepped alone
_MASK64 = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mixed(*numbers: int) -> int:
    """Mix several numbers into one 63-bit number (the finalizer of splitmix64)."""
    return _spread(*numbers) >> 1


def _spread(*numbers: int) -> int:
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + _GOLDEN) & _MASK64
        mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK64
        mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK64
        mixed ^= mixed >> 31
    return mixed


def _rounds(mixed: np.ndarray) -> np.ndarray:
    """One round of `_spread` on many numbers at once; uint64 wraps around."""
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return mixed ^ (mixed >> np.uint64(31))


class StochasticRounding:
    """A reproducible stream of rounding noise.

    Args:
        seed: the same seed gives the same noise.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = 0
        self._current_tile: Tensor | None = None
        self._current_int16: Tensor | None = None

    def state_dict(self) -> dict[str, int]:
        """Two integers that resume the stream."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the stream that `state_dict` described."""
        self.seed, self.step = int(state["seed"]), int(state["step"])
        self.end_step()

    def begin_step(self) -> None:
        """Advance to the noise of the next step."""
        self.step += 1
        self.end_step()

    def end_step(self) -> None:
        """Free the tile: between steps the stream keeps no memory."""
        self._current_tile = self._current_int16 = None

    def round_(self, source: Tensor, out: Tensor, stream: tuple[int, str, int]) -> None:
        """Write float32 ``source``, rounded stochastically, into bfloat16 ``out`` of the same shape.

        Args:
            source: float32, any shape; infinity and NaN are preserved.
            out: bfloat16, the same shape.
            stream: selects the noise of this step: the parameter's index, the name of the state that is
                rounded, and the offset of ``source`` in the whole parameter.
        """
        flat = flat_views(source, out)
        if flat is None:
            dense = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self.round_(source.contiguous(), dense, stream)
            out.copy_(dense)
            return
        index, name, start = stream
        if draws_itself(source):
            _round(flat[0], flat[1], self.noise(flat[0], stream))
            return
        own = self.stream(index, name)
        if native.available():
            native.narrow_("stochastic", flat[0], flat[1], None, (self.tile_int16(), own, start))
            torch.autograd.graph.increment_version(out)
            return
        tile = self.tile()
        for begin, end in runs(start, source.numel()):
            place, key = place_and_key(own, (start + begin) // TILE)
            place += (start + begin) % TILE
            _round(flat[0][begin:end], flat[1][begin:end], tile[place : place + end - begin].bitwise_xor(key))

    def noise(self, like: Tensor, stream: tuple[int, str, int]) -> Tensor:
        """16 random bits for each element of ``like``, as a new int32 tensor of its shape; `round_` has the stream."""
        index, name, start = stream
        own = self.stream(index, name)
        if draws_itself(like):
            generator = torch.Generator(like.device).manual_seed(_mixed(own, start))
            noise = torch.empty(like.shape, dtype=torch.int32, device=like.device)
            return noise.random_(0, 1 << 16, generator=generator)
        tile, noise = self.tile(), torch.empty(like.numel(), dtype=torch.int32)
        for begin, end in runs(start, like.numel()):
            place, key = place_and_key(own, (start + begin) // TILE)
            place += (start + begin) % TILE
            torch.bitwise_xor(tile[place : place + end - begin], key, out=noise[begin:end])
        return noise.view(like.shape)

    def stream(self, index: int, name: str) -> int:
        """The 63-bit number that identifies the noise of one state of one parameter in this step."""
        return _mixed(self.seed, self.step, index, zlib.crc32(name.encode()))

    def streams(self, indices: np.ndarray, name: str) -> np.ndarray:
        """`stream` of many parameters at once: uint64, from uint64 indices."""
        if len(indices) < _MANY_STREAMS:
            return np.array([self.stream(index, name) for index in indices.tolist()], np.uint64)
        begun = np.uint64((_spread(self.seed, self.step) + _GOLDEN) & _MASK64)
        mixed = _rounds(indices + begun)
        return _rounds(mixed + np.uint64((zlib.crc32(name.encode()) + _GOLDEN) & _MASK64)) >> np.uint64(1)

    def tile(self) -> Tensor:
        """This step's ``2 * TILE`` 16-bit numbers, as int32 on the CPU."""
        if self._current_tile is None:
            generator = torch.Generator().manual_seed(_mixed(self.seed, self.step))
            self._current_tile = torch.randint(
                0, 1 << 16, (2 * TILE,), dtype=torch.int32, generator=generator
            )
        return self._current_tile

    def tile_int16(self) -> Tensor:
        """The same numbers as int16, as the kernels read them."""
        if self._current_int16 is None:
            self._current_int16 = self.tile().to(torch.int16)
        return self._current_int16


def draws_itself(tensor: Tensor) -> bool:
    """Whether the tensor's device draws its noise itself; a CPU reads it from a tile."""
    return tensor.device.type != "cpu"


def runs(start: int, count: int) -> Iterator[tuple[int, int]]:
    """Split ``count`` elements, the first of which has offset ``start`` in the whole, where runs of ``TILE`` end."""
    begin = 0
    while begin < count:
        end = min(begin + TILE - (start + begin) % TILE, count)
        yield begin, end
        begin = end


def place_and_key(stream: int, run: int) -> tuple[int, int]:
    """The offset in the tile of the noise for a run of ``TILE`` elements, and the key it is XORed with."""
    mixed = _mixed(stream, run)
    return mixed & (TILE - 1), mixed >> 40 & 0xFFFF


def _round(source: Tensor, out: Tensor, noise: Tensor) -> None:
    """Add 16 bits of noise below bfloat16's last bit, then truncate; overwrites ``noise``."""
    noise.add_(source.view(torch.int32)).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(noise)
    if not surely_finite(source):  # a carry may run through a NaN's payload into its sign bit
        out.masked_fill_(source.isnan(), torch.nan)
