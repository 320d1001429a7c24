"""Warnings and errors that several parts of memkit raise."""


class NoEffectWarning(UserWarning):
    """A plugin was requested but changed nothing."""


class PredictionError(RuntimeError):
    """A step can't be predicted: the message says which operation prevents it, and the remedy."""


class PlanError(RuntimeError):
    """No configuration fits the budget: the message gives the smallest one, and what it consists of."""


class WeightsError(ValueError):
    """Weights can't be loaded from the given source; the module is unchanged."""


class MissingPackageError(ImportError):
    """What was requested needs an optional package that is not installed."""

    def __init__(self, package: str, needed_for: str, extra: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed; "
            f"install it with `pip install {package}`, or in the folder of memkit's sources with "
            f"`pip install -c constraints.txt -e '.[{extra}]'`.",
            name=package,
        )
