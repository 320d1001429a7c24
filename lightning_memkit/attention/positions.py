"""Positions of packed documents in transformers models: where they begin, and what else depends on them."""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memkit.attention.documents import numbers_of

_FROM_TOKENS = "create_position_ids_from_input_ids"


def first_position(model: Any) -> int:
    """A model's first position: in RoBERTa and its relatives the one after the padding's, otherwise 0.

    These models compute positions from the tokens that are not padding, in a method or a function of their
    file.
    """
    for module in model.modules():
        file = sys.modules.get(type(module).__module__)
        counts = hasattr(module, _FROM_TOKENS) or hasattr(file, _FROM_TOKENS)
        if counts and isinstance(getattr(module, "padding_idx", None), int) and _has_positions(module):
            return int(module.padding_idx) + 1
    return 0


def _has_positions(module: nn.Module) -> bool:
    """Whether a module looks absolute positions up in its own table."""
    return any(
        isinstance(child, nn.Embedding) and "position" in name for name, child in module.named_children()
    )


def cache_given(given: dict[str, Any]) -> bool:
    """Whether a forward's arguments hold a cache, under transformers' earlier name for it or that of 5.24."""
    return any(given.get(name) is not None for name in ("past_key_values", "cache"))


def restarts(given: dict[str, Any]) -> bool:
    """Whether positions restart within a row."""
    positions = given.get("position_ids")
    return (
        isinstance(positions, Tensor)
        and positions.dim() == 2
        and given.get("attention_mask") is None
        and not cache_given(given)
        and bool((positions.diff() != 1).any())
    )


def bounds_of(positions: Tensor, rows: int, length: int) -> Tensor:
    """`cu_seqlens` from positions that restart with every document."""
    positions = positions.expand(rows, length)
    begins = nn.functional.pad(positions.diff() != 1, (1, 0), value=True).flatten()
    end = torch.full((1,), rows * length, device=positions.device)
    return torch.cat((begins.nonzero().flatten(), end)).int()


def positions_of(bounds: Any, rows: int, length: int) -> Tensor:
    """Positions that start at 0 with every document."""
    numbers = numbers_of(bounds, rows, length)
    places = torch.arange(rows * length, device=bounds.device).view(rows, length)
    return places - bounds.to(places)[numbers]


class PlacesInRows:
    """Detects models in which something depends on a token's position in the row, or on the batch's longest document.

    Args:
        model: a model of the transformers package.
    """

    def __init__(self, model: Any) -> None:
        # Llama 4 scales queries by their position in the row; the scale is constant below `floor_scale`.
        tuned = [one for one in model.modules() if getattr(one, "attn_temperature_tuning", False)]
        scales = [int(one.floor_scale) for one in tuned if not getattr(one, "use_rope", True)]
        self._temperature = min(scales, default=None)
        self._frequencies = min(_rope_limits(model), default=None)

    def check(self, name: str, length: int, longest: int | None) -> None:
        """Refuse rows in which positions matter, and warn once if the longest document does.

        Raises:
            ValueError: queries would be scaled by their position in the row.
        """
        if self._temperature is not None and length >= self._temperature:
            raise ValueError(
                f"{name} scales queries by their place in the row from token {self._temperature} on "
                f"(attn_temperature_tuning, floor_scale), and rows have {length} tokens: documents would be scaled as "
                "if they were one. Pack rows that are shorter, set attn_temperature_tuning=False if the model was "
                'trained so, or give each document its own row: packing="none".'
            )
        if self._frequencies is None or (length if longest is None else longest) <= self._frequencies:
            return
        warnings.warn(
            f"{name} chooses its rotary frequencies by the longest document of the batch (rope_type longrope or "
            f"dynamic), and one may exceed {self._frequencies} tokens: shorter ones in the batch are computed "
            f"differently from alone, as in a padded batch. Keep documents to {self._frequencies} tokens "
            "(max_length), or batches of long ones apart.",
            stacklevel=2,
        )
        self._frequencies = None  # warn only once


def _rope_limits(model: Any) -> list[int]:
    """The lengths above which rotary frequencies change for the whole batch."""
    limits = []
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        parameters: Any = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            own = parameters if layer_type is None else parameters.get(layer_type) or {}
            if kind == "longrope":
                limits.append(own.get("original_max_position_embeddings"))
            elif isinstance(kind, str) and "dynamic" in kind:
                limits.append(getattr(module, "original_max_seq_len", None))
    return [int(one) for one in limits if one]
