"""How far predictions for a device were off in this user's runs: measured over predicted, kept in the cache folder."""

import contextlib
import json
import os
import re
import tempfile
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from lightning_memkit.data.cache import cache_folder

SWITCH = "MEMKIT_TUNING_CACHE"  # one switch for all that is kept of runs
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
    if os.environ.get(SWITCH, "1") == "0" or not _CREDIBLE[0] <= ratio <= _CREDIBLE[1]:
        return
    content = {"versions": _versions(), "ratios": [*_read(device), ratio][-_KEPT:]}
    path = _path(device)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, path)


def _read(device: str) -> list[float]:
    if os.environ.get(SWITCH, "1") == "0":
        return []
    try:
        content: dict[str, Any] = json.loads(_path(device).read_text(encoding="utf-8"))
        kept = [float(ratio) for ratio in content["ratios"]] if content["versions"] == _versions() else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or of another program
        return []
    return [ratio for ratio in kept if _CREDIBLE[0] <= ratio <= _CREDIBLE[1]]


def _path(device: str) -> Path:
    return cache_folder() / "prediction_residuals" / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', device)}.json"


def _versions() -> dict[str, str]:
    """Of what predicts and of what allocates."""
    return {name: metadata.version(name) for name in ("torch", "lightning_memkit")}
