"""Lines of a log beside Lightning's progress bars, which a line written past them would garble."""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.file_proxy import FileProxy
from tqdm.contrib.logging import logging_redirect_tqdm

_LOGGERS = ("lightning.pytorch", None)  # None: the root, whose handlers Lightning's logger prefers


def info(trainer: Trainer, text: str) -> None:
    """Log a line as Lightning does, above the progress bar that is on the screen."""
    with _handlers_above(trainer.progress_bar_callback):
        rank_zero_info(text)


def is_live(bar: Any) -> bool:
    """Whether this is a bar of Rich's that is drawn on a terminal now."""
    progress: Any = bar.progress if isinstance(bar, RichProgressBar) else None
    return progress is not None and progress.live.is_started and progress.console.is_terminal


@contextmanager
def _handlers_above(bar: Any) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    with ExitStack() as undo:
        if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
            # tqdm adds a handler to each logger, whether it has one that writes to the terminal or not.
            shown = [one for one in loggers if any(map(_writes_to_terminal, one.handlers))]
            undo.enter_context(logging_redirect_tqdm(shown, Tqdm))
        elif is_live(bar) and isinstance(above := sys.stderr, FileProxy):
            for handler in (handler for one in loggers for handler in one.handlers):
                # A handler keeps the stream that it found, and Rich has put its own in that one's place.
                if isinstance(handler, logging.StreamHandler) and handler.stream is above.rich_proxied_file:
                    undo.callback(handler.setStream, handler.setStream(above))
        yield


def _writes_to_terminal(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr)
