"""Moments in 8 bits: 1.02 bytes a value, in blocks of 128 values of one row with a bfloat16 scale each.

A first moment is the sign and the root of its share of the block's largest value, rounded stochastically so that its
mean is exact. A second moment v is the eighth root of its share. Its noise makes the mean of ``1 / sqrt(v)``, by which
an update is divided, too large by 3/8 of its relative variance; rounding that is unbiased in ``v ** (1/4)`` makes v
itself as much too large as makes up for it, and rounding the code, the eighth root, comes within a fifth of that. Such
codes reach over nineteen orders of magnitude within a block, and a second moment that isn't zero never becomes zero: a
zero under a first moment that isn't would be an update of any size.

A block never crosses a row (an index of the first dimension), so that a rare row of an embedding has its own scales,
and shards by rows have whole blocks. A scale stays as it is while the largest value is near it.

Blocks with a scale are Dettmers et al.'s (arXiv:2110.02861), whose codes come from a table and are rounded to nearest;
FlashOptim has 8-bit moments with fused steps, too (github.com/databricks/flashoptim).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_memkit.optim.blocks import flat_views, is_sharded, local_part
from lightning_memkit.optim.state_dtypes import RUNNING_MAXIMA

BLOCK = 128  # values that share a scale
SHORTEST_ROW = 32  # below it the scales cost too much, and moments stay bfloat16
FIRST = frozenset({"exp_avg", "momentum_buffer"})
SECOND = frozenset({"exp_avg_sq", "square_avg"})
# States beside which a second moment keeps 16 bits. Noise would make its difference from the square of the mean
# negative (RMSprop, centered), and only ever push its running maximum up (amsgrad).
_COMPANIONS = frozenset({"grad_avg"}) | RUNNING_MAXIMA
CODES, SCALES = "_8bit", "_scales"  # what follows a state's name in the optimizer's state

_LEVELS_FIRST, _LEVELS_SECOND = 127.0, 255.0
_STAYS = 0.875  # a scale is kept down to this share of it: a new one rounds the whole block once more
_SMALLEST_SCALE = 2.0**-126  # its inverse is finite
# Values whose float32 temporaries, some five of them, are alive at once; a row at least.
_AT_ONCE_CPU, _AT_ONCE_ACCELERATOR = 1 << 16, 1 << 22
_LARGEST_BITS, _INFINITE_BITS = 0x7F7F0000, 0x7F800000


def is_quantised_name(name: str) -> bool:
    """Whether a state's name is that of codes or scales."""
    return plain_name(name) is not None or (name.endswith(SCALES) and name[: -len(SCALES)] in FIRST | SECOND)


def is_quantisable(name: str, state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state may have 8 bits: a running mean of gradients, or, by itself, of their squares."""
    return name in FIRST or (name in SECOND and not _COMPANIONS & state.keys())


def plain_name(name: str) -> str | None:
    """The name of the state whose codes these are; None if they are no codes."""
    plain = name.removesuffix(CODES)
    return plain if plain != name and plain in FIRST | SECOND else None


def row_length(parameter: Tensor) -> int | None:
    """The values of a row on this process, if a parameter's moments may have 8 bits; else None.

    They may if it has two dimensions or more, rows of at least `SHORTEST_ROW` values that lie one after the other in
    memory, and is sharded by rows or not at all.
    """
    if parameter.dim() < 2:
        return None
    if is_sharded(parameter):
        placements = cast(Any, parameter).placements
        if not all(one.is_replicate() or one.is_shard(0) for one in placements):
            return None
    length = math.prod(parameter.shape[1:])
    if length < SHORTEST_ROW or parameter.stride(0) != length:
        return None
    return length if local_part(parameter).numel() % length == 0 else None


def blocks_of(length: int) -> int:
    """How many blocks a row of so many values has."""
    return -(-length // BLOCK)


def codes_dtype(name: str) -> torch.dtype:
    """The dtype of a state's codes: only first moments have a sign."""
    return torch.uint8 if name in SECOND else torch.int8


def made_for(parameter: Tensor, name: str, length: int) -> dict[str, Tensor]:
    """The zeros of a state: codes of the parameter's shape and layout, and bfloat16 scales [rows, blocks]."""
    codes = torch.zeros_like(parameter.detach(), dtype=codes_dtype(name))
    local = local_part(parameter)
    rows, blocks = local.numel() // length, blocks_of(length)
    scales = torch.zeros(rows, blocks, dtype=torch.bfloat16, device=local.device)
    if is_sharded(parameter):
        from torch.distributed.tensor import DTensor

        sharded: Any = parameter
        shape = torch.Size((parameter.shape[0], blocks))
        scales = DTensor.from_local(
            scales,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=shape,
            stride=(blocks, 1),
        )
    return {name + CODES: codes, name + SCALES: scales}


def room_in(state: Mapping[str, Any], parameter: Tensor, name: str, length: int) -> dict[str, Tensor]:
    """A state's codes and scales, to be written to; made anew where it has none."""
    kept = {one: state[one] for one in (name + CODES, name + SCALES) if one in state}
    return kept if len(kept) == 2 else made_for(parameter, name, length)


def encode_(name: str, values: Tensor, codes: Tensor, scales: Tensor, noise: Tensor) -> None:
    """Write moments into codes and scales, rounded stochastically; a block with infinity or NaN becomes NaN.

    Args:
        name: of the state, which decides the code.
        values: float32, flat: whole rows.
        codes: int8 for first, uint8 for second moments, flat, as many.
        scales: bfloat16 [rows, blocks].
        noise: int32, flat, as many, from 0 to 65,535.
    """
    for rows, of_scales in _runs(values, scales):
        _encode_rows(name, values[rows], codes[rows], of_scales, noise[rows])


def _encode_rows(name: str, values: Tensor, codes: Tensor, scales: Tensor, noise: Tensor) -> None:
    length = values.numel() // len(scales)
    shares = _by_block(values, length)
    largest, before = shares.abs().amax(1).clamp_min_(_SMALLEST_SCALE), scales.view(-1).float()
    bits = largest.view(torch.int32)
    scale = ((bits + 0xFFFF) & ~0xFFFF).clamp_max_(_LARGEST_BITS).view(torch.float32)
    scale = torch.where((largest <= before) & (largest > before * _STAYS), before, scale)
    scale.masked_fill_((bits >= _INFINITE_BITS) | largest.isnan(), torch.nan)
    scales.view(-1).copy_(scale)
    shares = shares * scale.reciprocal().unsqueeze(1)
    below = _by_block(noise.float().add_(0.5).mul_(2.0**-16), length)
    encode = _second_codes if name in SECOND else _first_codes
    codes.copy_(_by_row(encode(shares, below), length))


def decode_(name: str, codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the float32 moments of flat codes and their scales into flat ``out``; shapes as for `encode_`."""
    for rows, of_scales in _runs(codes, scales):
        _decode_rows(name, codes[rows], of_scales, out[rows])


def _decode_rows(name: str, codes: Tensor, scales: Tensor, out: Tensor) -> None:
    length = codes.numel() // len(scales)
    wide = codes.float()
    scale = scales.float().view(-1, 1)
    if name in SECOND:
        root = wide.mul_(1 / _LEVELS_SECOND)
        root = root * root
        root = root * root
        share = root * root
    else:
        share = wide * wide.abs()
        scale = scale * (1 / _LEVELS_FIRST**2)
    out.copy_(_by_row(_by_block(share, length) * scale, length))


def decoded_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with float32 moments instead of codes and scales; other entries as they are."""
    plain: dict[str, Any] = {}
    for name, value in state.items():
        of = plain_name(name)
        if of is not None:
            plain[of] = decoded(of, value, state[of + SCALES])
        elif not is_quantised_name(name):
            plain[name] = value
    return plain


def decoded(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 moments of a state's codes and scales, in the codes' layout; sharded if they are."""
    wide = torch.empty_like(codes.detach(), dtype=torch.float32)
    flat = flat_views(local_part(codes), local_part(wide))
    assert flat is not None
    decode_(name, flat[0], local_part(scales), flat[1])
    return wide


def _first_codes(shares: Tensor, below: Tensor) -> Tensor:
    """The signed root of each share, up with the probability that makes its square exact in the mean."""
    squares = shares.abs() * _LEVELS_FIRST**2
    low = squares.sqrt().floor_().clamp_(max=_LEVELS_FIRST - 1)
    code = low + (below * (low + low + 1) < squares - low * low)
    return torch.where(shares < 0, -code, code).nan_to_num_(0.0).to(torch.int8)


def _second_codes(shares: Tensor, below: Tensor) -> Tensor:
    """The eighth root of each share, rounded stochastically, and at least 1 where the share is not zero."""
    roots = shares.sqrt().sqrt_().sqrt_() * _LEVELS_SECOND
    code = (roots + below).floor_().clamp_(max=_LEVELS_SECOND)
    return torch.maximum(code, (shares > 0).float()).nan_to_num_(0.0).to(torch.uint8)


def _runs(values: Tensor, scales: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows that are coded at once, as a slice of flat values, and their scales; none of a shard without rows."""
    length = values.numel() // max(1, len(scales))
    most = max(1, (_AT_ONCE_CPU if values.is_cpu else _AT_ONCE_ACCELERATOR) // max(1, length))
    for start in range(0, len(scales), most):
        of_scales = scales[start : start + most]
        yield slice(start * length, (start + len(of_scales)) * length), of_scales


def _by_block(values: Tensor, length: int) -> Tensor:
    """Flat rows as [blocks, BLOCK], each row filled up with zeros."""
    missing = -length % BLOCK
    rows = values.view(-1, length)
    return (pad(rows, (0, missing)) if missing else rows).reshape(-1, BLOCK)


def _by_row(by_block: Tensor, length: int) -> Tensor:
    """The inverse of `_by_block`."""
    whole = blocks_of(length) * BLOCK
    return by_block.reshape(-1, whole)[:, :length].reshape(-1)
