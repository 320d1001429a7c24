"""The unit of `python -m benchmarks.gpu`: a row that measures one thing, and what its figures must keep to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Values = dict[str, float | int | bool | str]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The range in which a figure must lie; made by `at_most` and `at_least`."""

    at_most: float | None = None
    at_least: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a figure lies within it."""
        return (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )

    def __str__(self) -> str:
        return f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"


def at_most(most: float) -> Limit:
    """A figure must not be larger."""
    return Limit(at_most=most)


def at_least(least: float) -> Limit:
    """A figure must not be smaller."""
    return Limit(at_least=least)


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    """One measurement, which fails, hangs or runs out of memory for itself alone.

    Args:
        what: what it measures, the row's name within its benchmark.
        needs_seconds: the time that it takes, warm-up and compilation included.
        run: measures; flat figures by names that no other row of the benchmark uses. Text is shown beside them and
            is no figure. Raises `SkipRow` where it can't run here.
        limits: by the names of figures, what they must keep to: the command's exit code is 1 otherwise.
    """

    what: str
    needs_seconds: float
    run: Callable[[], Values]
    limits: Mapping[str, Limit] = field(default_factory=dict)

    def missed(self, values: Mapping[str, object]) -> list[str]:
        """The limits that do not hold, each as a sentence."""
        sentences = []
        for name, limit in self.limits.items():
            value = values.get(name)
            if not isinstance(value, bool | int | float):
                sentences.append(f"{name} was not measured; its limit is {limit}")
            elif not limit.holds(value):
                sentences.append(f"{name} is {value:.6g}; its limit is {limit}")
        return sentences


class SkipRow(Exception):
    """A row can't run here; the text says why."""


def needs_cuda(device: torch.device) -> None:
    """Skip the row on the CPU."""
    if device.type == "cpu":
        raise SkipRow("needs a CUDA device")


def needs_package(name: str) -> None:
    """Skip the row where a package is missing or can't be imported."""
    from importlib import import_module

    try:
        import_module(name)
    except Exception as error:  # also what a package without its own parts raises
        raise SkipRow(f"needs {name}: {error}") from error
