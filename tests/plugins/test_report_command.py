"""`memkit report`: what it prints of one run and of two, what it writes, and how it fails."""

import io
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_memkit import MemoryReport
from lightning_memkit.cli import main
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.memory.words import difference
from tests.plugins.toys import loader, trained


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, the second with a larger batch."""
    folder = tmp_path_factory.mktemp("runs")
    for name, size in (("small", 4), ("large", 16)):
        path = str(folder / name / "version_0" / "memory_report.json")
        trained(MemoryReport(live=False, path=path), data=loader(size), max_steps=2)
    return folder


def test_a_run_is_printed_and_its_page_named(runs: Path, capsys: Any) -> None:
    assert main(["report", str(runs / "small")]) == 0
    printed = capsys.readouterr().out
    found = StepReport.from_json(runs / "small" / "version_0" / "memory_report.json")
    for words in (
        f"Peak {format_bytes(found.anatomy.peak_bytes)} in the", "saved activations", "By kind of operator",
        "Modules that saved most", "memory_report.html",
    ):  # fmt: skip
        assert words in printed


def test_a_terminal_that_lacks_characters_gets_others(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "ran naïve 走"
    shutil.copytree(runs / "small", there)
    for encoding in ("latin-1", "ascii", "cp1252"):
        printed = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding, write_through=True))
        assert main(["report", str(there), str(runs / "large")]) == 0
        text = printed.getvalue().decode(encoding)
        assert "peak" in text
        assert "?" in text


def test_two_runs_are_compared_by_category(runs: Path, capsys: Any, tmp_path: Path) -> None:
    html = tmp_path / "both.html"
    assert main(["report", str(runs / "small"), str(runs / "large"), "--html", str(html)]) == 0
    printed = capsys.readouterr().out
    small, large = (
        StepReport.from_json(runs / name / "version_0" / "memory_report.json").anatomy
        for name in ("small", "large")
    )
    cells = {
        row.split("│")[1].strip(): [cell.strip() for cell in row.split("│")[2:5]]
        for row in printed.splitlines()
        if row.count("│") == 5
    }
    for category in ("weights", "saved_activations", "inputs"):
        before, after = small.at_peak[category], large.at_peak[category]
        assert cells[category.replace("_", " ")] == [
            format_bytes(before),
            format_bytes(after),
            difference(before, after),
        ]
    before, after = small.peak_bytes, large.peak_bytes
    assert cells["peak"] == [format_bytes(before), format_bytes(after), difference(before, after)]
    assert "small" in printed
    text = html.read_text()
    assert text.count('class="plot"') == 2
    assert difference(before, after) in text


def test_files_are_found_by_any_name_of_a_run(
    runs: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = runs / "large" / "version_0"
    said = set()
    for given in (runs / "large", inner, inner / "memory_report.json", inner / "memory_report.html"):
        assert main(["report", str(given)]) == 0
        said.add(capsys.readouterr().out)
    assert len(said) == 1
    newest = runs / "small" / "version_0" / "memory_report.json"
    os.utime(newest, (2e9, 2e9))
    assert main(["report", str(runs)]) == 0
    found = StepReport.from_json(newest).anatomy.peak_bytes
    assert f"Peak {format_bytes(found)}" in capsys.readouterr().out


def test_errors_are_a_line(runs: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMKIT_DEBUG", raising=False)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "oom").mkdir()
    (tmp_path / "oom" / "memory_report_oom.json").write_text("{}")
    one = str(runs / "small")
    for words, said in (
        ([str(tmp_path / "nothing")], "does not exist; give a memory_report.json"),
        ([str(broken)], "is no JSON"),
        ([str(tmp_path / "empty")], "Is it the folder of the run?"),
        ([str(tmp_path / "oom")], "add --oom"),
        ([one, "--oom"], "leave --oom out"),
        ([one, "--html", str(tmp_path / "no" / "x.html")], "No such file"),
    ):
        assert main(["report", *words]) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith("memkit: error: ")
        assert printed.err.count("\n") == 1
        assert said in printed.err
        assert "Traceback" not in printed.out + printed.err
    with pytest.raises(SystemExit, match="2"):
        main(["report"])
    said = "memkit report needs RUN: write `memkit report RUN`; `memkit report --help` explains the others."
    assert capsys.readouterr().err == f"memkit: error: {said}\n"
    with pytest.raises(SystemExit, match="0"):
        main(["report", "--help"])
    helped = capsys.readouterr().out
    assert "examples:" in helped
    assert "exit codes" in helped


def test_the_failed_step_of_a_folder_is_printed(runs: Path, tmp_path: Path, capsys: Any) -> None:
    found = StepReport.from_json(runs / "small" / "version_0" / "memory_report.json")
    replace(found, failure="OutOfMemoryError: no").to_json(tmp_path / "memory_report_oom.json")
    assert main(["report", "--oom", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Out of memory in the" in printed
    assert "--html FILE writes the page" in printed


def test_advice_and_findings_of_the_run_are_printed(runs: Path, tmp_path: Path, capsys: Any) -> None:
    saved = json.loads((runs / "small" / "version_0" / "memory_report.json").read_text())
    saved["advice"] = [
        {"change": "chunked loss", "saved_bytes": 3 * 2**30, "time_share": 0.01, "how": "ChunkedLoss()"}
    ]
    saved["findings"] = [
        {
            "kind": "dense_mask",
            "what": "A mask",
            "size_bytes": 1024,
            "where": "a.py:1",
            "remedy": "none at all",
        }
    ]
    path = tmp_path / "memory_report.json"
    path.write_text(json.dumps(saved))
    assert main(["report", str(path)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "chunked loss",
        "-3.00 GiB",
        "+1%",
        "ChunkedLoss()",
        "A mask: 1.00 KiB, a.py:1; none at all",
    ):
        assert words in printed
