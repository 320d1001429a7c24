"""Lightning's progress bars: whether one is on the screen, and lines of the log beside it, which would garble it."""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console
from rich.file_proxy import FileProxy
from tqdm.contrib.logging import logging_redirect_tqdm

from lightning_memkit.utilities.patching import Undo

_LOGGERS = ("lightning.pytorch", None)  # None: the root, whose handlers Lightning's logger prefers


def info(trainer: Trainer, text: str) -> None:
    """Log a line as Lightning does, above the progress bar that is on the screen."""
    with _handlers_above(trainer.progress_bar_callback):
        rank_zero_info(text)


def log_above(trainer: Trainer) -> Undo:
    """Log whatever Lightning logs from now on above its progress bar. Returns the undo."""
    undo = ExitStack()
    bar: Any = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
        undo.enter_context(_handlers_above(bar))
    elif isinstance(bar, RichProgressBar) and bar.is_enabled:  # which takes sys.stderr's place later
        for handler in _handlers():
            if _writes_to(handler, sys.stderr):
                undo.callback(handler.setStream, handler.setStream(_CurrentStderr()))
    return undo.close


def is_live(bar: Any) -> bool:
    """Whether this is a bar of Rich's that is drawn on a terminal now."""
    return _has_started(bar) and bar.progress.console.is_terminal


def is_shown(bar: Any) -> bool:
    """Whether somebody sees this bar: on a terminal, or in a notebook."""
    if isinstance(bar, TQDMProgressBar):
        return bar.is_enabled and (sys.stdout.isatty() or Console().is_jupyter)
    return is_live(bar) or (_has_started(bar) and bar.progress.console.is_jupyter)


def _has_started(bar: Any) -> bool:
    progress: Any = bar.progress if isinstance(bar, RichProgressBar) else None
    return progress is not None and progress.live.is_started


@contextmanager
def _handlers_above(bar: Any) -> Iterator[None]:
    with ExitStack() as undo:
        if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
            # tqdm adds a handler to each logger, whether it has one that writes to the terminal or not.
            shown = [one for one in _loggers() if any(map(_writes_to_terminal, one.handlers))]
            undo.enter_context(logging_redirect_tqdm(shown, Tqdm))
        elif is_live(bar) and isinstance(above := sys.stderr, FileProxy):
            for handler in _handlers():
                # A handler keeps the stream that it found, and Rich has put its own in that one's place.
                if _writes_to(handler, above.rich_proxied_file):
                    undo.callback(handler.setStream, handler.setStream(above))
        yield


class _CurrentStderr:
    """Writes to what `sys.stderr` is then."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _loggers() -> list[logging.Logger]:
    return [logging.getLogger(name) for name in _LOGGERS]


def _handlers() -> Iterator[Any]:
    """All that write to a stream."""
    for logger in _loggers():
        yield from (one for one in logger.handlers if isinstance(one, logging.StreamHandler))


def _writes_to_terminal(handler: logging.Handler) -> bool:
    return _writes_to(handler, sys.stdout) or _writes_to(handler, sys.stderr)


def _writes_to(handler: logging.Handler, stream: Any) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream is stream
