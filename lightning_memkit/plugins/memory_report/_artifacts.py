"""A report's files as artifacts of the loggers that store files."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CometLogger, LitLogger, Logger, MLFlowLogger, WandbLogger

FOLDER = "memory_report"  # in which MLflow and Comet show the files; their type at W&B


def store(trainer: Trainer, paths: Sequence[Path]) -> None:
    """Store the files of the first rank with each logger that takes files: W&B, MLflow, Comet, Lightning's own.

    TensorBoard's and CSV's loggers have a folder, where a report lies anyway. If a logger can't store them,
    a warning says so: the files are written, and the run goes on.
    """
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        try:
            _store(logger, paths)
        except Exception as error:  # a service may raise whatever it likes
            kind = type(logger).__name__
            warnings.warn(f"{kind} did not store {paths[0]}, which is on disk: {error}", stacklevel=2)


def _store(logger: Logger, paths: Sequence[Path]) -> None:
    experiment: Any
    match logger:
        case WandbLogger(experiment=experiment):
            from wandb import Artifact

            artifact = Artifact(name=f"{paths[0].stem}-{experiment.id}", type=FOLDER)
            for path in paths:
                artifact.add_file(str(path))
            experiment.log_artifact(artifact)
        case MLFlowLogger(experiment=experiment, run_id=run):
            for path in paths:
                experiment.log_artifact(run, str(path), FOLDER)
        case CometLogger(experiment=experiment):
            for path in paths:
                experiment.log_asset(str(path), f"{FOLDER}/{path.name}")
        case LitLogger():
            for path in paths:
                logger.log_file(str(path))
