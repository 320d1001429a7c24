"""Verifies on a small twin that a switched model's output on packed documents equals that of each document alone."""

import threading
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.attention.refusals import MAYBE_OWN_MASK, OWN_MASK, OWN_ROWS, PackingRefusedError
from lightning_memkit.attention.twin import tokens_for, twin_of

Switch = Callable[[Any], Callable[[], None]]

# Two rows of 16 tokens without padding; one document has a single token.
_BOUNDS = (0, 5, 6, 16, 23, 32)
_ROWS, _LENGTH = 2, 16
_TOLERANCE = (
    1e-4  # of the largest value, in float32: rounding is a hundredth of this, a leak a hundred times as much
)


def refuse_what_differs(model: Any, switch: Switch) -> None:
    """Raise if packed documents give other results than single ones; costs seven forwards of a small copy.

    It runs in a thread, because devices, dtypes and modes (fake tensors, autocast) under which the model is
    built apply to the caller's thread only. It leaves no trace. A warning is given if no copy could be made,
    so that nothing is known.

    Args:
        model: a transformers model that is not switched yet, on any device or none.
        switch: makes the copy attend within documents.

    Raises:
        ValueError: a token's output depends on other documents or on its position in the row, or a row has
            one output.
    """
    found: list[Exception | None] = []
    thread = threading.Thread(target=lambda: found.append(_answer(model, switch)), name="memkit-twin")
    thread.start()
    thread.join()
    error = found[0] if found else None
    if isinstance(error, ValueError):
        raise error
    if error is not None:
        warnings.warn(
            f"Whether {type(model).__name__} keeps packed documents apart could not be tried on a small copy of it "
            f"({error}). Train with the ContaminationProbe callback, or compare its output with that of documents "
            "alone.",
            stacklevel=4,
        )


def _answer(model: Any, switch: Switch) -> Exception | None:
    dtype, state = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the copy
            return _compared(type(model).__name__, twin_of(model), switch)
    except Exception as error:
        return RuntimeError(f"{type(error).__name__}: {error}")
    finally:
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state)


def _compared(name: str, twin: Any, switch: Switch) -> Exception | None:
    if twin is None:
        return RuntimeError("its class can't be built from a smaller config")
    tokens = tokens_for(twin, _ROWS * _LENGTH)
    alone = [_outputs(twin(tokens[None, begin:end]), 1, end - begin) for begin, end in pairwise(_BOUNDS)]
    if not any(alone):
        return PackingRefusedError(
            f"{name} has no output for every token but one for a row",
            ", and a packed row holds several documents.",
        )
    undo = switch(twin)
    rows, bounds = tokens.view(_ROWS, _LENGTH), torch.tensor(_BOUNDS, dtype=torch.int32)
    try:
        output = twin(rows, cu_seqlens=bounds)
    except PackingRefusedError as error:
        if error.remedy != MAYBE_OWN_MASK:
            return error
        undo()
        remedy = f"{OWN_ROWS} {OWN_MASK}." if _masks_by_itself(twin, rows, alone) else OWN_ROWS
        return PackingRefusedError(error.reason, error.more, remedy)
    except ValueError as error:
        return error
    except Exception as error:
        return PackingRefusedError(f"{name} fails on packed documents", f": {type(error).__name__}: {error}.")
    worst, at = _difference(_outputs(output, _ROWS, _LENGTH), alone)
    if worst != worst:
        return RuntimeError("its outputs are not finite")
    if worst <= _TOLERANCE:
        return None
    return PackingRefusedError(
        f"{name} computes a packed document otherwise than alone",
        f": on a small copy of it the output of tokens {_BOUNDS[at]} to {_BOUNDS[at + 1] - 1} differs by {worst:.1g} "
        "of the largest value. Something beside attention mixes tokens, or counts their places in the row.",
    )


def _masks_by_itself(twin: Any, rows: Tensor, alone: list[dict[str, Tensor]]) -> bool:
    """Whether a model keeps documents apart whose positions it is given, without a cache."""
    sizes = [end - begin for begin, end in pairwise(_BOUNDS)]
    positions = torch.cat([torch.arange(size) for size in sizes]).view(_ROWS, _LENGTH)
    try:
        output = twin(rows, position_ids=positions, use_cache=False)
    except Exception:  # it takes no such argument
        return False
    return _difference(_outputs(output, _ROWS, _LENGTH), alone)[0] <= _TOLERANCE


def _difference(packed: dict[str, Tensor], alone: list[dict[str, Tensor]]) -> tuple[float, int]:
    """How far packed documents are from those alone, relative to the largest value (nan if any is), and which is."""
    worst, at = 0.0, 0
    for number, (begin, end) in enumerate(pairwise(_BOUNDS)):
        for key in packed.keys() & alone[number].keys():
            expected = alone[number][key][0]
            if not bool(expected.isfinite().all()):
                return float("nan"), number
            difference = (packed[key].flatten(0, 1)[begin:end] - expected).abs().max() / expected.abs().max()
            if not float(difference) <= worst:
                worst, at = float(difference), number
    return worst, at


def _outputs(output: Any, rows: int, length: int) -> dict[str, Tensor]:
    """The outputs that have a vector for every token."""
    named: Any = output.items() if isinstance(output, Mapping) else enumerate(output)
    return {
        str(key): value
        for key, value in named
        if isinstance(value, Tensor) and value.dim() >= 3 and value.shape[:2] == (rows, length)
    }
