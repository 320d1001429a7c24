"""The ratios of measured to predicted peaks in this user's runs on a device, kept in the cache folder."""

import contextlib
import re
from pathlib import Path
from statistics import median

import torch

import lightning_memkit
from lightning_memkit.utilities.cached_answers import keep, kept_file, recall

_KEPT = 16  # the latest runs only: drivers and models change
_CREDIBLE = (0.5, 2.0)  # other ratios mean that something else was measured than predicted


def residual_of(device: str) -> float:
    """The median ratio of measured to predicted peaks in the latest runs on a device; 1 if there are none."""
    ratios = _read(device)
    return median(ratios) if ratios else 1.0


def keep_residual(device: str, ratio: float) -> None:
    """Save the ratio of measured to predicted peak of a run; nothing with `MEMKIT_TUNING_CACHE=0`.

    If the folder can't be written, nothing is saved either: the next run is predicted without it.
    """
    if _CREDIBLE[0] <= ratio <= _CREDIBLE[1]:
        content = {"versions": _versions(), "ratios": [*_read(device), ratio][-_KEPT:]}
        with contextlib.suppress(OSError):
            keep(_path(device), content)


def _read(device: str) -> list[float]:
    try:
        content = recall(_path(device)) or {}
        kept = [float(ratio) for ratio in content["ratios"]] if content["versions"] == _versions() else []
    except (OSError, ValueError, KeyError, TypeError):  # no file, or one in another format
        return []
    return [ratio for ratio in kept if _CREDIBLE[0] <= ratio <= _CREDIBLE[1]]


def _path(device: str) -> Path:
    return kept_file("prediction_residuals", re.sub(r"[^A-Za-z0-9.-]+", "_", device))


def _versions() -> dict[str, str]:
    """The versions of what predicts and what allocates."""
    return {"torch": torch.__version__, "lightning_memkit": lightning_memkit.__version__}
