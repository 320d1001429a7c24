"""The warnings and errors that more than one part of memkit raises."""


class NoEffectWarning(UserWarning):
    """A plugin was asked for and changed nothing."""


class PredictionError(RuntimeError):
    """A step can't be predicted: the message says what it does, and what to do instead."""


class PlanError(RuntimeError):
    """Nothing that may be chosen fits the budget: the message says the least that there is, and its parts."""


class WeightsError(ValueError):
    """Weights can't be taken from where they were said to be; the module is as it was."""


class MissingPackageError(ImportError):
    """An optional package is needed for what was asked."""

    def __init__(self, package: str, needed_for: str, extra: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed; "
            f"install it with `pip install {package}`, or in the folder of memkit's sources with "
            f"`pip install -c constraints.txt -e '.[{extra}]'`.",
            name=package,
        )
