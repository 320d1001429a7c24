"""Configs that an older version understood (commit a224f13) are still understood: classes, options, values."""

import sys
from pathlib import Path

import pytest

from lightning_memkit.cli import main
from tests.data.a224f13.copy_yaml import TO as FOLDER
from tests.docs.test_pages import ROOT, modules_in, parse_config
from tests.test_examples import configs_with

pytestmark = pytest.mark.usefixtures("at_root")

FILES = sorted(path for path in FOLDER.rglob("*.yaml") if path.relative_to(FOLDER).parts[0] != "docs")
FENCES = sorted((FOLDER / "docs").rglob("*.yaml"))
# The page named a module beneath the public names, `lightning_memkit.plugins.contamination`, and these have moved.
MOVED = {"docs/techniques/packed_attention-137.yaml"}


def named(path: Path) -> str:
    return str(path.relative_to(FOLDER))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_an_older_config_is_understood(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--config={each}" for each in configs_with(path)]
    assert main(["fit", *words, "--print_config"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", [path for path in FENCES if named(path) not in MOVED], ids=named)
def test_a_config_in_an_older_page_is_understood(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    page = ROOT / path.relative_to(FOLDER).with_name(f"{path.stem.rpartition('-')[0]}.md")
    for name, code in modules_in(page).items():  # the user's own model, which some configs of the page name
        (tmp_path / name).write_text(code, encoding="utf-8")
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    assert parse_config(path.read_text(encoding="utf-8"), tmp_path) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", MOVED)
def test_a_class_that_was_not_named_by_its_public_name_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert parse_config(text, tmp_path) == 2
    assert "write lightning_memkit.ContaminationProbe" in capsys.readouterr().err
    assert parse_config(text.replace("plugins.contamination.", ""), tmp_path) == 0, capsys.readouterr().err


def test_there_are_configs_of_both_kinds() -> None:
    assert len(FILES) == 20 + 2  # the examples', and two of the benchmarks
    assert len(FENCES) == 26
