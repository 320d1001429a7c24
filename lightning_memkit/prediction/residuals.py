"""How far predictions for a device were off in this user's runs: measured over predicted, kept in the cache folder."""

import contextlib
import re
from pathlib import Path
from statistics import median

import torch

import lightning_memkit
from lightning_memkit.utilities.cached_answers import keep, kept_file, recall

_KEPT = 16  # of the latest runs: drivers and models change
_CREDIBLE = (0.5, 2.0)  # outside, something else was measured than was predicted


def residual_of(device: str) -> float:
    """Measured over predicted peaks, the median of the latest runs on a device; 1 where there are none."""
    ratios = _read(device)
    return median(ratios) if ratios else 1.0


def keep_residual(device: str, ratio: float) -> None:
    """Keep what a run has measured, over what was predicted for it; `MEMKIT_TUNING_CACHE=0` keeps nothing.

    A folder that can't be written to keeps nothing, either: the next run is predicted as this one was.
    """
    if _CREDIBLE[0] <= ratio <= _CREDIBLE[1]:
        content = {"versions": _versions(), "ratios": [*_read(device), ratio][-_KEPT:]}
        with contextlib.suppress(OSError):
            keep(_path(device), content)


def _read(device: str) -> list[float]:
    try:
        content = recall(_path(device)) or {}
        kept = [float(ratio) for ratio in content["ratios"]] if content["versions"] == _versions() else []
    except (OSError, ValueError, KeyError, TypeError):  # none, or of another program
        return []
    return [ratio for ratio in kept if _CREDIBLE[0] <= ratio <= _CREDIBLE[1]]


def _path(device: str) -> Path:
    return kept_file("prediction_residuals", re.sub(r"[^A-Za-z0-9.-]+", "_", device))


def _versions() -> dict[str, str]:
    """Of what predicts and of what allocates."""
    return {"torch": torch.__version__, "lightning_memkit": lightning_memkit.__version__}
