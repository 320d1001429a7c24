"""Every example trains from its own YAML at a tiny size, resumes, and knows nothing of memkit."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_memkit.cli import main
from tests.examples import EXAMPLES, ROOT

FOLDERS = sorted(
    path for path in (ROOT / "examples").iterdir() if path.is_dir() and not path.name.startswith("_")
)
SCRIPTS = sorted((ROOT / "examples").rglob("*.py"))
CONFIGS = sorted((ROOT / "examples").rglob("*.yaml"))
PRETRAIN = ROOT / "examples" / "pretrain_causal_lm"
TINY = [
    "--model.width=32",
    "--model.layers=2",
    "--model.heads=2",
    "--data.context=64",
    "--data.batch_size=8",
    "--trainer.limit_val_batches=1",
    "--trainer.val_check_interval=10",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.log_every_n_steps=1",
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_is_ordinary_code_without_memkit(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    assert not {name for name in imported if name.startswith("lightning_memkit")}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_example_is_a_script_and_configs(folder: Path) -> None:
    configs = list(folder.glob("*.yaml"))
    assert configs
    scripts = re.findall(r"examples\.(\w+)\.\w+\.", "".join(path.read_text() for path in configs))
    assert list(folder.glob("*.py")) or any(list((EXAMPLES / name).glob("*.py")) for name in scripts)
    assert (folder / "README.md").is_file()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(EXAMPLES)))
@pytest.mark.usefixtures("at_root")
def test_config_parses_as_its_first_lines_say(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = configs_with(path)
    assert configs[-1] == path
    assert main(["fit", *(f"--config={each}" for each in configs), "--print_config"]) == 0, (
        capsys.readouterr().err
    )


def configs_with(path: Path) -> list[Path]:
    """A config behind the one that it overrides: `after NAME.yaml` in its comments."""
    comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    after = re.search(r"[Aa]fter (\w+\.yaml)", " ".join(comments))
    return [*configs_with(path.with_name(after[1])), path] if after else [path]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A hundred short functions of the standard library's kind: the whole corpus would take seconds to read."""
    path = tmp_path / "corpus.jsonl"
    body = "    return sorted(value for value in values if value != {})\n"
    texts = [f"def pick_{i}(values):\n" + body.format(i) * (1 + i % 4) for i in range(100)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def train(folder: Path, corpus: Path, *arguments: str) -> dict:
    """Run the demo's two configs at a tiny size; return the last checkpoint."""
    code = main(
        [
            "fit",
            *(f"--config={PRETRAIN / name}" for name in ("budget.yaml", "demo.yaml")),
            *TINY,
            f"--data.source={corpus}",
            f"--trainer.default_root_dir={folder}",
            "--trainer.accelerator=cpu",
            "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
            f"--trainer.logger.save_dir={folder}",
            "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
            f"--trainer.callbacks.dirpath={folder / 'checkpoints'}",
            "--trainer.callbacks.filename=last",
            "--trainer.callbacks.every_n_train_steps=1",
            *arguments,
        ]
    )
    assert code == 0
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.mark.usefixtures("at_root")
def test_demo_trains_within_its_budget_and_reports(tmp_path: Path, corpus: Path, capsys) -> None:
    checkpoint = train(tmp_path, corpus, "--trainer.max_steps=12", "--model.warmup_steps=2")
    printed = capsys.readouterr().out
    assert checkpoint["global_step"] == 12
    weights = [value for key, value in checkpoint["state_dict"].items() if key.endswith("weight")]
    assert {value.dtype for value in weights} == {torch.bfloat16}
    losses = [float(found) for found in re.findall(r"loss[ =:]+([\d.]+)", printed)]
    assert losses[-1] < losses[0] - 0.3, printed
    for category in ("weights", "optimizer states"):
        assert category in printed
    (report,) = tmp_path.rglob("memory_report.json")
    assert json.loads(report.read_text())["largest"]["gradients"] > 0


@pytest.fixture
def deterministic() -> Iterator[None]:
    """What `Trainer(deterministic=True)` sets is put back."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("at_root", "deterministic")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_demo_interrupted_and_resumed_ends_with_the_same_weights(tmp_path: Path, corpus: Path) -> None:
    steps = [
        "--model.warmup_steps=2",
        "--trainer.check_val_every_n_epoch=null",
        "--trainer.val_check_interval=100",
        "--trainer.deterministic=true",  # the clock is not to choose how batches are split
    ]
    # The schedule depends on max_steps, so the interruption must not change it.
    stop = "--trainer.callbacks+=tests.test_examples.StopAfter"
    steps.append("--trainer.max_steps=6")
    straight = train(tmp_path / "straight", corpus, *steps)
    begun = train(tmp_path / "half", corpus, *steps, stop, "--trainer.callbacks.steps=3")
    last = tmp_path / "half" / "checkpoints" / "last.ckpt"
    resumed = train(tmp_path / "half", corpus, *steps, f"--ckpt_path={last}")
    assert (begun["global_step"], resumed["global_step"], straight["global_step"]) == (3, 6, 6)
    for key, value in straight["state_dict"].items():
        assert torch.equal(resumed["state_dict"][key], value), key


class StopAfter(pl.Callback):
    """Ends a run early, as an interruption would.

    Args:
        steps: Optimizer steps to let pass.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        trainer.should_stop = trainer.global_step >= self.steps


def test_readme_and_make_name_the_configs_that_exist() -> None:
    for text in (ROOT / "README.md", ROOT / "Makefile"):
        named = re.findall(r"examples/[\w/]+\.yaml", text.read_text(encoding="utf-8"))
        assert named
        assert all((ROOT / name).is_file() for name in named), named


MIXTURE = ROOT / "examples" / "mixture_of_experts"


@pytest.mark.usefixtures("at_root")
def test_a_mixture_of_experts_trains_within_its_budget(tmp_path: Path, corpus: Path, capsys) -> None:
    configs = [f"--config={MIXTURE / name}" for name in ("moe.yaml", "demo.yaml")]
    tiny = [option for option in TINY if "log_every" not in option]
    steps = ["--trainer.max_steps=12", "--model.warmup_steps=2", "--trainer.log_every_n_steps=4"]
    folder = [f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false", "--trainer.accelerator=cpu"]
    assert main(["fit", *configs, *tiny, *steps, f"--data.source={corpus}", *folder]) == 0
    printed = capsys.readouterr().out
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0]
    assert "experts: 2 layers of 8, 2 for a token" in printed


def test_mixtral_shares_its_experts_between_two_ranks(tmp_path: Path, corpus: Path) -> None:
    words = [
        "fit", f"--config={MIXTURE / 'mixtral_two_ranks.yaml'}", f"--data.source={corpus}", "--data.context=32",
        "--trainer.max_steps=4", "--trainer.log_every_n_steps=1", f"--trainer.default_root_dir={tmp_path}",
        "--trainer.accelerator=cpu",
    ]  # fmt: skip
    run = "import sys; from lightning_memkit.cli import main; sys.exit(main(sys.argv[1:]))"
    script = tmp_path / "run.py"  # started again for the second rank
    script.write_text(run)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *words],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
    resident, held = re.search(
        r"([\d.]+) MiB are resident experts, ([\d.]+) MiB of them on this rank", done.stdout
    ).groups()  # pyright: ignore
    assert float(held) == pytest.approx(float(resident) / 2, rel=0.01)
