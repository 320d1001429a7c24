"""`memkit fit --budget`: a config that says nothing of memory, planned for a budget and trained as planned."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from jsonargparse import Namespace
from lightning.pytorch.plugins.environments import (
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightning_memkit.memory.measure import check_budget
from lightning_memkit.planning.budget import Budget, Goal
from lightning_memkit.plugins.cli.config_errors import ConfigError, budgets_in
from lightning_memkit.plugins.cli.plan_command import ConfiguredRun
from lightning_memkit.utilities.arguments import SentenceParser

_LAUNCHERS = (SLURMEnvironment, TorchElasticEnvironment, LSFEnvironment, MPIEnvironment)


def planned_words(words: Sequence[str], folder: Path) -> list[str]:
    """Plan for the device that trains, say the plan in a line, and write it as a config; costs `memkit plan`'s time.

    Args:
        words: those after `memkit fit`: `--budget`, and as they wish `--goal` and `--headroom` of `memkit plan`; all
            others are LightningCLI's.
        folder: for the planned config, which has to stay there while the run starts its processes.

    Returns:
        The words after `memkit` that train as planned.

    Raises:
        ConfigError: the budget is refused, the config has one already, or a launcher has started several processes,
            each of which would plan.
        PlanError: nothing fits.
    """
    options, others = _parser().parse_known_args(list(words))
    _refuse_several_processes()
    try:
        check_budget(options.budget)
        cli = ConfiguredRun(["fit", *others])
        budget = Budget(options.budget, _device(cli.trainer_section), options.goal, options.headroom)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    own = budgets_in(cli.trainer_section)
    if own:
        raise ConfigError(
            f"--budget={options.budget} stands beside the {own[0]} of the config, which has a budget, too; leave one "
            "of them out."
        )
    found = cli.plan(budget)
    found.best  # noqa: B018  raises where nothing fits
    planned = folder / "planned.yaml"
    planned.write_text(cli.planned_yaml(found), encoding="utf-8")
    print(f"memkit: {found.answer} (memkit plan shows the others.)", flush=True)
    return ["fit", "--config", str(planned)]


def _parser() -> argparse.ArgumentParser:
    found = SentenceParser(prog="memkit fit", allow_abbrev=False, add_help=False)
    found.add_argument("--budget", required=True, metavar="24GiB")
    found.add_argument("--goal", default="speed", choices=get_args(Goal))
    found.add_argument("--headroom", default=0.05, type=float)
    return found


def _device(trainer: Namespace) -> str:
    return "cpu" if trainer.get("accelerator") == "cpu" else "auto"


def _refuse_several_processes() -> None:
    """The processes of a launcher would each plan, and need not come to the same."""
    if _is_one_of_several():
        raise ConfigError(
            "--budget plans in one process, and this is one of several that a launcher has started; plan once, "
            "`memkit plan --config ... --budget ... --output planned.yaml`, and launch `memkit fit --config "
            "planned.yaml`."
        )


def _is_one_of_several() -> bool:
    """Whether a launcher that Lightning knows has started several processes, or somebody has by hand."""
    for launcher in _LAUNCHERS:
        if launcher.detect():
            return launcher().world_size() > 1
    return os.environ.get("WORLD_SIZE", "2" if "LOCAL_RANK" in os.environ else "1") != "1"
