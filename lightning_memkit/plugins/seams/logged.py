"""Collect, count and restore a loop's logged values; `tests/plugins/test_seam.py` checks private names."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_memkit.utilities.patching import Undo


@contextmanager
def logging_held(trainer: Trainer) -> Iterator[list[dict[str, Any]]]:
    """Collect the calls of `self.log` instead of counting them; each entry has the keywords of one call."""
    with calls_held(trainer.fit_loop.epoch_loop._results) as held:
        yield held


@contextmanager
def logging_of_run_held(trainer: Trainer) -> Iterator[None]:
    """Discard what is logged in the run at hand, of whatever kind it is; in a prediction nothing can be logged."""
    results = trainer._results
    with nullcontext() if results is None else calls_held(results):
        yield


@contextmanager
def calls_held(results: Any) -> Iterator[list[dict[str, Any]]]:
    """Collect what is logged to a loop's results instead of counting it."""
    held: list[dict[str, Any]] = []

    def log(fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if args:  # Lightning 2.6 passes all but three by keyword
            raise TypeError("Lightning calls _ResultCollection.log with new positional arguments.")
        held.append({"fx": fx, "name": name, "value": value, **kwargs})

    vars(results)["log"] = log
    try:
        yield held
    finally:
        vars(results).pop("log", None)


def log_now(trainer: Trainer, entry: dict[str, Any]) -> None:
    """Count one entry that `logging_held` has collected."""
    results: Any = trainer.fit_loop.epoch_loop._results
    results.log(**entry)


@contextmanager
def loggers_silent(trainer: Trainer) -> Iterator[None]:
    """Discard what a module sends to `self.logger` directly."""
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


def keep_results(trainer: Trainer) -> Undo:
    """Return a function that restores the values logged so far."""
    return keep_logged(trainer.fit_loop.epoch_loop._results)


def keep_logged(results: Any) -> Undo:
    """Like `keep_results`, for the results of any loop."""
    # Lightning replaces a metric's values, never changes them in place: references are enough.
    kept = {key: (metric, dict(vars(metric))) for key, metric in results.items()}

    def undo() -> None:
        for key in [key for key in results if key not in kept]:
            del results[key]
        for metric, values in kept.values():
            vars(metric).clear()
            vars(metric).update(values)

    return undo
