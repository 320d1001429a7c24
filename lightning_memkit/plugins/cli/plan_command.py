"""`memkit plan`: read a config as `memkit fit` does, plan for its model and first batch, write the result."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule

from lightning_memkit.initialization.building import build_on
from lightning_memkit.micro_batching import batch_size, split_batch
from lightning_memkit.planning.budget import Budget, Goal
from lightning_memkit.planning.explained import beside_prediction, bytes_a_parameter
from lightning_memkit.planning.plan import Plan
from lightning_memkit.planning.problem import Row
from lightning_memkit.plugins.cli._build_target import target_dtype
from lightning_memkit.plugins.cli.memkit_cli import MemkitCLI
from lightning_memkit.plugins.planning._first_batch import first_batch
from lightning_memkit.plugins.planning.planning import OptimizerStates, plan
from lightning_memkit.prediction.devices import DEVICES, described
from lightning_memkit.utilities.arguments import SentenceParser
from lightning_memkit.utilities.errors import PlanError

_DESCRIPTION = (
    "The fastest configuration of a config's model that fits a budget, and all others with the reason against them. "
    "Nothing is allocated, and the device need not be here. What the config says is kept. Further options are those "
    "of `memkit fit`."
)


def parser() -> argparse.ArgumentParser:
    """The parser of the command's own options; all others belong to `memkit fit`."""
    found = SentenceParser(prog="memkit plan", description=_DESCRIPTION, allow_abbrev=False)
    found.add_argument(
        "--config", action="append", default=[], metavar="FILE.yaml", help="as for `memkit fit`; required"
    )
    found.add_argument(
        "--budget", default="auto", help='such as 24GiB, 0.9 or 90%%; "auto": all that the device has'
    )
    found.add_argument("--device", default="auto", help=f"auto, cpu, cuda, {', '.join(DEVICES)}")
    found.add_argument(
        "--memory",
        metavar="SIZE",
        help="the device's memory, such as 24GiB; an unknown device has the rates of a known one with bfloat16, whose "
        "memory is nearest",
    )
    found.add_argument("--goal", default="speed", choices=get_args(Goal), help="what to be best at")
    found.add_argument(
        "--headroom", default=0.05, type=float, help="the fraction of the budget to leave free"
    )
    found.add_argument(
        "--optimizer-states",
        default="given",
        choices=get_args(OptimizerStates),
        help="open: in 8 bits, too, by PureBF16Precision or bitsandbytes' optimizer; changes numbers",
    )
    found.add_argument(
        "--explain",
        action="store_true",
        help="each rejected one with its reason; the first by hand, term by term, beside its prediction",
    )
    found.add_argument(
        "--output", metavar="FILE.yaml", help="write the planned config, which `memkit fit` runs"
    )
    return found


def run(words: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0, or 2 if the budget, the device or the output is refused.

    Raises:
        PlanError: nothing fits.
    """
    options, further = parser().parse_known_args(list(words))
    try:
        device = described(options.device, options.memory)
        budget = Budget(options.budget, device, options.goal, options.headroom)
        _check_config(options.config, further)
        _check_output(options.output, options.config)
    except ValueError as error:
        print(f"memkit: error: {error}", file=sys.stderr)
        return 2
    configs = [word for name in options.config for word in ("--config", name)]
    cli = ConfiguredRun(["fit", *configs, *further])
    found = cli.plan(budget, options.optimizer_states)
    print(found if found.fitting else found.beside_answer())  # the error will say the answer
    if options.explain:
        print(f"\n{found.reasons()}\n\n{bytes_a_parameter()}\n")
        row = next((row for row in found.rows if row.prediction is not None), None)
        if row is not None:
            print(f"{row.words}, by hand and as predicted:\n")
            print(cli.beside_prediction(row, found.given))
    if not found.fitting:
        raise PlanError(found.refusal)
    if options.output:
        Path(options.output).write_text(cli.planned_yaml(found))
        print(f"\nWritten: {options.output}; run it with `memkit fit --config {options.output}`.")
    else:
        print("\n--output FILE.yaml writes the first as a config that `memkit fit` runs.")
    return 0


def _check_config(configs: Sequence[str], further: Sequence[str]) -> None:
    if configs:
        return
    bare = next(
        (word for word in further if not word.startswith("-") and word.endswith((".yaml", ".yml"))), None
    )
    if bare is not None:
        raise ValueError(f"{bare} is given without its option: write `memkit plan --config {bare}`.")
    raise ValueError(
        "memkit plan needs the config of a model and its data: write `memkit plan --config FILE.yaml --budget 24GiB`; "
        "`memkit plan --help` explains the others."
    )


def _check_output(output: str | None, configs: Sequence[str]) -> None:
    if output is None:
        return
    if not Path(output).absolute().parent.is_dir():
        raise ValueError(f"--output {output} is in a folder that does not exist; make it first.")
    read = next((config for config in configs if Path(config).resolve() == Path(output).resolve()), None)
    if read is not None:
        raise ValueError(
            f"--output {output} would overwrite the config that is read, {read}: name another file."
        )


class ConfiguredRun(MemkitCLI):
    """Reads a config, but builds each part only when it is needed."""

    def __init__(self, words: list[str]) -> None:
        self._batch: Any = None
        previous, sys.argv = sys.argv, ["memkit", *words]  # LightningCLI reads sys.argv
        try:
            super().__init__(save_config_callback=None)
        finally:
            sys.argv = previous

    def instantiate_classes(self) -> None:
        """Build nothing yet."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Do not fit: `run` only plans."""

    def plan(self, budget: Budget, optimizer_states: OptimizerStates = "given") -> Plan:
        """Plan for the model and the first batch of the training data."""
        given = {
            name: value for name, value in self._built("model").trainer.items() if self._says(name, value)
        }
        return plan(
            self.build_model,
            self.first_batch(),
            budget,
            trainer=given,
            optimizer_states=optimizer_states,
        )

    def _add_instantiators(self) -> None:
        super(MemkitCLI, self)._add_instantiators()  # without MemkitCLI's: they allocate on a device

    def build_model(self) -> LightningModule:
        """Build the model at the config's dtype on the current default device, with its optimizer."""
        dtype = target_dtype(self.trainer_section)
        with nullcontext() if dtype is None else build_on(None, dtype):
            built = self._built("data", "trainer")
        self.config_init = Namespace({str(self.subcommand): built})
        self.model = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        return self.model

    def first_batch(self) -> Any:
        """The first batch of the config's data, or of the model's own loader if the config has no data."""
        if self._batch is None:
            self._batch = self._read_batch()
        return self._batch

    def _read_batch(self) -> Any:
        source = self._built("model").get("data")
        if source is None:
            with torch.device("meta"):  # the model is needed only for its loader
                source = self.build_model()
        return first_batch(source)

    def beside_prediction(self, row: Row, given: Mapping[str, Any]) -> str:
        """A configuration computed by hand, next to its prediction."""
        batch, size = self.first_batch(), row.micro_batch_size
        rows = batch_size(batch)
        part = batch if size >= rows else split_batch(batch, [size, rows - size])[0]
        with torch.device("meta"):
            return beside_prediction(row, self.build_model(), part, given)

    @property
    def trainer_section(self) -> Namespace:
        """The config's `trainer`."""
        return self._section.get("trainer", Namespace())

    def planned_yaml(self, found: Plan) -> str:
        """The config, completed with the plan's best configuration."""
        text = self._subparser.dump(self._section, skip_none=True, skip_validation=True)
        return yaml.safe_dump(_without_nothing(found.config(yaml.safe_load(text))), sort_keys=False)

    @property
    def _section(self) -> Namespace:
        return self.config[str(self.subcommand)]

    @property
    def _subparser(self) -> Any:
        return self._parser(self.subcommand)

    def _built(self, *without: str) -> Namespace:
        """Instantiate the config, except for the sections `without`."""
        section = self._section.clone()
        for name in without:
            section.pop(name, None)
        return self._subparser.instantiate(section)

    def _says(self, name: str, value: Any) -> bool:
        """Whether the config sets an argument of the Trainer to anything but its default."""
        return value is not None and value != self._subparser.get_default(f"trainer.{name}")


def _without_nothing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop null values, and the `config` key, which `memkit fit` does not accept."""
    return {name: value for name, value in config.items() if value is not None and name != "config"}
