"""Small results kept between runs as JSON in the user's cache folder; `MEMKIT_TUNING_CACHE=0` disables it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from lightning_memkit.utilities.atomic_write import write_whole

SWITCH = "MEMKIT_TUNING_CACHE"


def cache_folder() -> Path:
    """The folder of caches: ``lightning_memkit`` in ``$XDG_CACHE_HOME``, else where the platform has it."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        base = Path(named)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path.home() / ".cache"
    return base / "lightning_memkit"


def kept_file(kind: str, name: str) -> Path:
    """The path of a cached result, which need not exist."""
    return cache_folder() / kind / f"{name}.json"


def recall(path: Path) -> dict[str, Any] | None:
    """The content of a cache file; None if there is none, or caching is disabled.

    Raises:
        OSError: the file can't be read.
        ValueError: it holds no JSON object.
    """
    if _is_off():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, no JSON object.")
    return content


def keep(path: Path, content: dict[str, Any]) -> None:
    """Write a result atomically, even if several processes write it; does nothing if caching is disabled.

    Raises:
        OSError: the folder can't be written to.
    """
    if _is_off():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")


def _is_off() -> bool:
    return os.environ.get(SWITCH, "1") == "0"
