"""The README's picture: drawn from two reports, at one scale, in the colours of the report's page."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import step_picture
from lightning_memkit import MemoryReport
from lightning_memkit.memory.units import format_bytes
from tests.plugins.toys import TokenTagger, loader, trainer

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def reports(tmp_path: Path) -> list[Path]:
    """Of a batch of 16 rows, and of one row."""
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, rows in zip(paths, (16, 1), strict=True):
        report = MemoryReport(path=str(path), measured_step=0)
        trainer(report, max_steps=1).fit(TokenTagger(), loader(batch_size=rows, count=16))
    return paths


def test_both_steps_are_drawn_at_one_scale(reports: list[Path], tmp_path: Path, capsys) -> None:
    assert step_picture.main(["--reports", *map(str, reports), "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    before, after = (step_picture.StepReport.from_json(path) for path in reports)
    peaks = [max(one.step.timeline.totals) for one in (before, after)]
    assert all(format_bytes(peak) in said for peak in peaks)
    for theme in step_picture.THEMES:
        drawn = ElementTree.fromstring((tmp_path / f"step-{theme}.svg").read_text())
        left, right = drawn.findall(f"{SVG}g")
        heights = [_height(panel) for panel in (left, right)]
        assert heights[1] / heights[0] == pytest.approx(peaks[1] / peaks[0], abs=0.01)
        assert [one.get("fill") for one in drawn.iter(f"{SVG}rect")][0] == step_picture.colours_of(theme)[
            "page"
        ]


def test_each_theme_has_a_colour_for_each_category() -> None:
    light, dark = map(step_picture.colours_of, step_picture.THEMES)
    assert light["page"] != dark["page"]
    assert {*step_picture.STACK} <= light.keys() & dark.keys()


def test_the_committed_pictures_are_those_of_the_table() -> None:
    """Peaks in the picture and in the README's table are of the same runs."""
    rows = re.findall(
        r"^\| [^|]+ \| (\d+) \| [\d.]+ % \|$", (step_picture.ROOT / "README.md").read_text(), re.MULTILINE
    )
    for theme in step_picture.THEMES:
        title = ElementTree.parse(step_picture.FOLDER / f"step-{theme}.svg").getroot().findtext(f"{SVG}title")
        shown = [_mib(*found) for found in re.findall(r"([\d.]+) (GiB|MiB)", title or "")]
        assert shown == pytest.approx([int(rows[0]), int(rows[-1])], rel=0.01)


def _mib(number: str, unit: str) -> float:
    return float(number) * {"GiB": 1024, "MiB": 1}[unit]


def _height(panel: ElementTree.Element) -> float:
    """How far a panel's areas reach above its lower edge, of 1000."""
    tops = []
    for area in panel.findall(f"{SVG}path"):
        outline = area.get("d") or ""
        level = int(re.match(r"M0 (\d+)", outline)[1])  # pyright: ignore[reportOptionalSubscript]
        tops.append(level)
        for move in re.findall(r"v(-?\d+)", outline.partition("V")[0]):
            level += int(move)
            tops.append(level)
    return 1000 - min(tops)
