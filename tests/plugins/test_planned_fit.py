"""`memkit fit --budget`: a config without a word of memory is planned for a budget, and trained as planned."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_memkit import MemoryBudget
from lightning_memkit.cli import main
from lightning_memkit.plugins.cli.planned_fit import _is_one_of_several
from tests import cli_models
from tests.plugins.noise import NOISE

pytestmark = [*NOISE, pytest.mark.filterwarnings("ignore:.*jsonargparse")]
SHORT = {
    "max_steps": 3,
    "accelerator": "cpu",
    "precision": "32-true",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    def written(**trainer: Any) -> str:
        path = tmp_path / "given.yaml"
        entries = {
            "seed_everything": 1,
            "model": {"class_path": "tests.cli_models.Early"},
            "trainer": {**SHORT, "default_root_dir": str(tmp_path), **trainer},
            "optimizer": ADAMW,
        }
        path.write_text(yaml.safe_dump(entries))
        cli_models.BUILT.clear()
        return str(path)

    return written


def test_it_trains_as_the_written_plan_does(config: Callable[..., str], tmp_path: Path, capsys: Any) -> None:
    path, planned = config(), tmp_path / "planned.yaml"
    words = ["--config", path, "--budget=1MiB", "--goal", "exact"]
    assert main(["fit", *words]) == 0
    at_once: Any = cli_models.BUILT[-1]
    said = capsys.readouterr().out
    assert at_once.change() > 0
    (budget,) = (one for one in at_once.trainer.callbacks if isinstance(one, MemoryBudget))
    assert budget.budget == "1MiB"
    (line,) = (line for line in said.splitlines() if line.startswith("memkit: "))
    assert re.search(r"(at once|at a time): [\d.]+ KiB of the ", line)
    assert " leaves of 1.00 MiB on the CPU." in line

    assert main(["plan", *words, "--device", "cpu", "--output", str(planned)]) == 0
    assert main(["fit", "--config", str(planned)]) == 0
    in_two: Any = cli_models.BUILT[-1]
    for one, other in zip(at_once.parameters(), in_two.parameters(), strict=True):
        assert one.equal(other)
    assert list(map(type, at_once.trainer.callbacks)) == list(map(type, in_two.trainer.callbacks))


@pytest.mark.parametrize(
    ("options", "trainer", "environ", "said"),
    [
        (["--budget=-1GiB"], {}, {}, "budget='-1GiB' is no positive size"),
        (["--budget=1MiB", "--headroom=5"], {}, {}, "headroom=5.0 is outside [0, 1)"),
        (
            ["--budget=1MiB"],
            {"callbacks": [{"class_path": "lightning_memkit.MemoryBudget"}]},
            {},
            "--budget=1MiB stands beside the lightning_memkit.MemoryBudget of the config",
        ),
        (["--budget=1MiB"], {}, {"WORLD_SIZE": "2"}, "a launcher has started; plan once, `memkit plan"),
    ],
)
def test_what_can_not_be_planned_is_refused_before_anything_is_built(
    config: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    options: list[str],
    trainer: dict[str, Any],
    environ: dict[str, str],
    said: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["fit", "--config", config(**trainer), *options]) == 2
    assert said in capsys.readouterr().err
    assert cli_models.BUILT == []


def test_a_budget_without_its_value_is_told_what_to_write(config: Callable[..., str], capsys: Any) -> None:
    assert main(["fit", "--config", config(), "--budget"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("memkit: error: --budget stands without its value: write `--budget 24GiB`")
    assert said.count("\n") == 1


def test_where_nothing_fits_it_does_not_train(config: Callable[..., str], capsys: Any) -> None:
    assert main(["fit", "--config", config(), "--budget", "64KiB"]) == 1
    assert "Nothing fits 64.00 KiB on the CPU" in capsys.readouterr().err


SLURM = {"SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "several"),
    [
        ({}, False),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, False),
        ({**TORCHRUN, "WORLD_SIZE": "4"}, True),
        ({**SLURM, "SLURM_NTASKS": "1"}, False),
        ({**SLURM, "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "8"}, True),
        ({"SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "8"}, False),
        ({"LOCAL_RANK": "0"}, True),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, False),
    ],
)
def test_the_processes_of_a_launcher_are_known(
    environ: dict[str, str], several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert _is_one_of_several() is several


@pytest.mark.long
@pytest.mark.usefixtures("at_root")
def test_ranks_that_a_strategy_starts_train_as_planned(config: Callable[..., str]) -> None:
    path = config(devices=2, strategy="ddp", max_steps=1)
    command = [sys.executable, "-W", "ignore", "-m", "lightning_memkit.cli"]
    done = subprocess.run(
        [*command, "fit", "--config", path, "--budget", "16MiB"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("memkit: as given") == 1
    assert "`Trainer.fit` stopped: `max_steps=1` reached." in done.stderr + done.stdout
