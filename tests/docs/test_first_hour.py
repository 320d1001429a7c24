"""The page of the first hour: its files train as they stand there, and all of its commands in their order."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.processes import ROOT, run_script

PAGE = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^memkit (?:fit|consolidate) .*$", PAGE, re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's files and the data that one of them makes."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    ran(tmp_path, "my_data.py")
    return tmp_path


def ran(folder: Path, script: str, *options: str) -> str:
    """What a script of the folder prints; it is run in a process of its own and has to succeed."""
    settings = {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(folder / "cache")}
    done = run_script(folder / script, *options, env=settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def memkit(folder: Path, *options: str) -> str:
    (folder / "command.py").write_text("import sys; from lightning_memkit.cli import main; sys.exit(main())")
    return ran(folder, "command.py", *options)


@pytest.mark.filterwarnings("default")  # a user's run, in which they are no errors
@pytest.mark.long
def test_the_lean_config_trains_within_its_budget(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_memkit.cli import main

    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    short = ["--trainer.max_steps=2", "--data.batch_size=4", "--data.documents.limit=200"]
    assert main(["fit", "--config", "lean.yaml", "--trainer.limit_val_batches=0", *short]) == 0
    printed = capsys.readouterr()
    assert re.search(r"budget 24\.00 MiB, micro-batch \d", printed.out + printed.err)
    assert (folder / "lightning_logs" / "version_0" / "memory_report.json").exists()


def test_its_configs_are_as_short_as_the_page_says() -> None:
    for name in ("run.yaml", "lean.yaml"):
        assert len(FILES[name].splitlines()) < 40
        assert yaml.safe_load(FILES[name])["model"]["class_path"] == "my_model.CausalLM"


@pytest.mark.slow
def test_every_command_of_the_page_runs_in_its_order(folder: Path) -> None:
    assert [command.split()[1] for command in COMMANDS] == ["fit", "fit", "fit", "fit", "consolidate"]
    printed = [memkit(folder, *command.split()[1:]) for command in COMMANDS]
    plain, within, lean = (
        re.findall(r"^step (\d+)/\d+ \| loss ([\d.]+)", text, re.M) for text in printed[:3]
    )
    assert [step for step, _ in plain] == [str(10 * n) for n in range(1, 10)]
    for (_, whole), (_, parts) in zip(plain[:3], within[:3], strict=True):
        assert float(parts) == pytest.approx(float(whole), abs=2e-4)
    assert float(lean[-1][1]) < float(lean[0][1])
    quoted = re.findall(r"^[a-z ]+ {2,}([\d.]+) MiB +([\d.]+)%$", PAGE, re.MULTILINE)
    assert len(quoted) == 4
    for size, share in quoted:
        assert re.search(rf" {size} MiB +{share}%", printed[0])
    assert "MemoryBudget: micro-batch 4, " in printed[3]  # the resumed run keeps its size
    assert re.search(r"b'.*'", ran(folder, "ask.py"))
