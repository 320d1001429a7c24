"""Under `memkit`, a terminal shows what was asked for and what needs an action; `--debug` shows everything.

What is left out is listed here by who says it and how it begins: that optional packages miss extensions of their own,
deprecations that only those packages can act on, tips for other products, seeds, and devices that are not there.
Libraries say nothing less in a process that is not `memkit`'s.
"""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Loggers and the beginnings of their lines; "" is any logger that has no handler (`logging.lastResort`).
_LINES: dict[str, tuple[str, ...]] = {
    "": (
        "Failed to load ",  # torchao's and bitsandbytes' own extensions, where something imports them on the way
        "Skipping import of cpp extensions",
    ),
    "torch.utils._pytree": ("<enum ",),  # torchao's enums
    "lightning.pytorch.utilities.rank_zero": ("💡 Tip", "GPU available: ", "TPU available: ", "Loading `"),
    "lightning.fabric.utilities.seed": ("Seed set to ",),
}
_WARNINGS = ("Starting from v1.9.0, `tensorboardX`", "No seed found, seed set to ")
# Those whose deprecations no user can act on.
_LIBRARIES = "lightning|torch|torchmetrics|torchao|bitsandbytes|transformers|datasets|trl|jsonargparse"


@contextmanager
def only_what_matters() -> Iterator[None]:
    """A context in which needless lines of other packages are left out."""
    filters = [(_place_of(name), _Without(beginnings)) for name, beginnings in _LINES.items()]
    for place, without in filters:
        place.addFilter(without)
    try:
        # `append`: a user's own filters (`python -W error`) come first.
        with warnings.catch_warnings():
            for beginning in _WARNINGS:
                warnings.filterwarnings("ignore", message=re.escape(beginning), append=True)
            for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
                warnings.filterwarnings("ignore", category=category, module=rf"({_LIBRARIES})\b", append=True)
            yield
    finally:
        for place, without in filters:
            place.removeFilter(without)


class _Without(logging.Filter):
    """Leaves lines out by how they begin."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is printed; errors always are."""
        return record.levelno >= logging.ERROR or not record.getMessage().startswith(self._beginnings)


def _place_of(name: str) -> logging.Filterer:
    if name:
        return logging.getLogger(name)
    return logging.lastResort or logging.getLogger()
