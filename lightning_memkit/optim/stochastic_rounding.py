"""Round float32 to bfloat16 up or down at random, right on average: 0 bytes, and small updates add up.

A value between two neighbouring bfloat16 numbers goes to the upper one with the probability of its distance
to the lower one (Gupta et al., "Deep Learning with Limited Numerical Precision", arXiv:1502.02551).

The noise is a function of (seed, step, stream, element) and of nothing else: it neither reads nor moves torch's
own random state, it is the same on every device and for every bucket size, and two integers resume it. A step
draws one tile of 16-bit numbers; every run of ``TILE`` elements XORs the tile with a 16-bit number of its own.
So each element's noise is uniform, any two elements' are independent, and the drawing costs next to nothing.
"""

import zlib

import torch
from torch import Tensor

from lightning_memkit.optim.blocks import BLOCK_ELEMENTS, flat_views

TILE = BLOCK_ELEMENTS
_MASK64 = (1 << 64) - 1


def _mixed(*numbers: int) -> int:
    """One well-mixed 63-bit number of several (the finalizer of splitmix64)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & _MASK64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
        mixed ^= mixed >> 31
    return mixed >> 1


class StochasticRounding:
    """A repeatable stream of rounding noise.

    Args:
        seed: the same seed gives the same noise.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = 0
        self._tiles: dict[torch.device, Tensor] = {}

    def state_dict(self) -> dict[str, int]:
        """Two integers that resume the stream."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the stream that `state_dict` described."""
        self.seed, self.step = int(state["seed"]), int(state["step"])
        self._tiles.clear()

    def begin_step(self) -> None:
        """Move on to the noise of the next step."""
        self.step += 1
        self._tiles.clear()

    def end_step(self) -> None:
        """Let go of the tile: between steps the stream holds no memory."""
        self._tiles.clear()

    def round_(self, source: Tensor, out: Tensor, stream: tuple[int, str]) -> None:
        """Write float32 ``source``, rounded stochastically, into bfloat16 ``out`` of the same shape.

        Args:
            source: float32, any shape; infinity and NaN stay what they are.
            out: bfloat16, the same shape.
            stream: which noise of this step: the parameter's index and the name of what is rounded.
        """
        flat = flat_views(source, out)
        if flat is None:
            dense = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self.round_(source.contiguous(), dense, stream)
            out.copy_(dense)
            return
        tile = self._tile(source.device)
        runs = -(-source.numel() // TILE)
        generator = torch.Generator().manual_seed(
            _mixed(self.seed, self.step, stream[0], zlib.crc32(stream[1].encode()))
        )
        keys = torch.randint(0, 1 << 16, (runs,), dtype=torch.int32, generator=generator)
        if source.device.type == "cpu":
            pieces = zip(*(tensor.split(TILE) for tensor in flat), strict=True)
            for key, (source_piece, out_piece) in zip(keys.tolist(), pieces, strict=True):
                _round(source_piece, out_piece, tile[: source_piece.numel()].bitwise_xor(key))
        else:
            noise = tile.bitwise_xor(keys.to(source.device).unsqueeze(1)).view(-1)[: source.numel()]
            _round(*flat, noise)

    def _tile(self, device: torch.device) -> Tensor:
        if device not in self._tiles:
            generator = torch.Generator().manual_seed(_mixed(self.seed, self.step))
            tile = torch.randint(0, 1 << 16, (TILE,), dtype=torch.int32, generator=generator)
            self._tiles[device] = tile.to(device)
        return self._tiles[device]


def _round(source: Tensor, out: Tensor, noise: Tensor) -> None:
    """Add 16 bits of noise below bfloat16's last bit, then cut; ``noise`` is used up."""
    noise.add_(source.view(torch.int32)).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(noise)
    out.masked_fill_(source.isnan(), torch.nan)  # the carry may run through a NaN's payload into its sign
