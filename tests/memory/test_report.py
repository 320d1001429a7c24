"""A report as JSON and page: nothing is lost, nothing from the network, and the drawing is of the bytes."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from lightning_memkit.memory.chart import STACK, height_of, ticks_up_to
from lightning_memkit.memory.findings import Finding
from lightning_memkit.memory.kinds import SavedBytes, alike
from lightning_memkit.memory.page import comparison_page, page
from lightning_memkit.memory.report import Advice, PredictedStep, RunFacts, StepReport
from lightning_memkit.memory.timeline import Timeline
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.memory.words import difference, flops_words, time_share
from tests.memory.test_step_meter import ROWS, Model, metered

NASTY = "</script><b>&"
VOID = {"meta", "br", "path"}


@pytest.fixture(scope="module")
def report() -> StepReport:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step, meter = metered(model, optimizer, parts=2)
    peak = step.anatomy.peak_bytes
    finding = Finding(kind="dense_mask", what="A mask", size_bytes=4096, where="train.py:3", remedy="none")
    found = StepReport(
        step=step,
        run=RunFacts(
            name="Model", step=1, device="cpu", precision="32-true", parameters=9, budget_bytes=peak + 999
        ),
        flops=meter.flops.total(samples=ROWS),
        rates={"samples_per_second": 12.5, "loader_stall": 0.0},
        predicted=PredictedStep(peak_bytes=peak - 100, at_peak=dict(step.anatomy.at_peak)),
        advice=(Advice(change="chunked loss", saved_bytes=2048, time_share=0.012, how="ChunkedLoss()"),),
        advised=True,
    )
    return found.with_findings((finding,))


class Parsed(HTMLParser):
    """The tags of a page, which have to be closed in order, and what they hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.inside: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.inside.setdefault(self.open[-1], []).append(data)

    @property
    def text(self) -> str:
        return " ".join(
            " ".join(found) for tag, found in self.inside.items() if tag not in ("script", "style")
        )


def heights(path: str, count: int) -> list[int]:
    """The upper edge of an area, moment by moment, of a thousand."""
    found = re.match(r"M0 (\d+)((?:[hv]-?\d+)+)V", path)
    assert found is not None
    level, edge = int(found[1]), []
    for kind, number in re.findall(r"([hv])(-?\d+)", found[2]):
        if kind == "h":
            edge += [level] * int(number)
        else:
            level += int(number)
    assert len(edge) == count
    return [1000 - one for one in edge]


def test_json_keeps_all_of_a_report(report: StepReport, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report.to_json(path)
    assert StepReport.from_json(path) == report
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    saved = json.loads(path.read_text())
    saved["later"] = {"a": 1}  # a later version may say more
    saved["run"]["later"] = 2
    path.write_text(json.dumps(saved))
    assert StepReport.from_json(path) == report


def test_keys_of_the_json_are_those_of_the_page_in_the_docs(report: StepReport) -> None:
    text = (Path(__file__).parents[2] / "docs" / "techniques" / "memory_report.md").read_text()
    table = text.partition("| key |")[2].partition("\n\n")[0]
    documented = {
        name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert set(report.as_dict()) == documented
    assert report.as_dict()["format"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "no report of MemoryReport"),
        ('{"peak_bytes": 1}', "no report of MemoryReport"),
        ('{"at_peak": {}, "format": 99}', "has the format 99"),
        ('{"at_peak": {}}', "no report that memkit can read"),
        (
            '{"at_peak": {}, "peak_bytes": 1, "peak_phase": "forward", "peak_operator": "", "run": 3}',
            "memkit can read",
        ),
    ],
)
def test_what_is_no_report_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        StepReport.from_json(path)


def test_a_report_of_the_first_version_is_read_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(
        '{"peak_bytes": 5, "peak_phase": "forward", "peak_operator": "x", "at_peak": {"weights": 5}}'
    )
    found = StepReport.from_json(path)
    assert found.anatomy.peak_bytes == 5
    assert "no timeline" in Parsed(page(found)).text


def test_the_page_needs_nothing_but_itself(report: StepReport) -> None:
    text = page(report)
    parsed = Parsed(text)
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object")
        assert not {"src", "href", "srcset"} & set(attributes)
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", text)
    assert "prefers-color-scheme: dark" in text
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in parsed.tags


def test_the_drawing_is_of_the_bytes_and_the_peak_is_marked_and_named(report: StepReport) -> None:
    parsed, timeline, top = Parsed(page(report)), report.step.timeline, height_of(report)
    paths = [attributes for tag, attributes in parsed.tags if tag == "path"]
    shown = [attributes["fill"].removeprefix("var(--").removesuffix(")") for attributes in paths]
    assert shown == [name for name in STACK if name in timeline.category_bytes]
    below = [0] * len(timeline.ticks)
    for name, attributes in zip(shown, paths, strict=True):
        below = [low + size for low, size in zip(below, timeline.category_bytes[name], strict=True)]
        assert heights(attributes["d"], len(below)) == [round(1000 * size / top) for size in below]
    assert max(below) == report.anatomy.peak_bytes
    data = json.loads(next(text for text in parsed.inside["script"] if '"ticks"' in text))
    assert data["marked"] == timeline.peak_index
    assert {name: tuple(sizes) for name, sizes in data["category_bytes"].items()} == timeline.category_bytes
    (mark,) = [
        attributes for tag, attributes in parsed.tags if attributes.get("class", "").startswith("mark")
    ]
    x = float(re.search(r"left:([\d.]+)%", mark["style"])[1])  # pyright: ignore[reportOptionalSubscript]
    assert int(x / 100 * len(timeline.ticks)) == timeline.peak_index
    anatomy = report.anatomy
    for words in (
        anatomy.peak_operator,
        anatomy.peak_module or "the step itself",
        "predicted peak",
        "budget",
    ):
        assert words in parsed.text


def test_a_chart_can_be_enlarged_and_read_by_keys_and_aloud(report: StepReport) -> None:
    """What a browser does with these is in docs/pictures; here are the parts that page.js looks for."""
    parsed, timeline = Parsed(page(report)), report.step.timeline
    by_class = {attributes.get("class", "").split(" ")[0]: attributes for _, attributes in parsed.tags}
    plot = by_class["plot"]
    assert (plot["role"], plot["tabindex"], plot["aria-valuemin"]) == ("slider", "0", "1")
    assert plot["aria-valuemax"] == str(len(timeline.ticks))
    assert plot["aria-valuenow"] == str(timeline.peak_index + 1)
    assert format_bytes(report.anatomy.peak_bytes) in plot["aria-label"]
    assert by_class["zoom"]["data-of"] == plot["data-of"]
    assert "hidden" in by_class["zoom"]  # until the script runs
    buttons = [attributes for tag, attributes in parsed.tags if tag == "button"]
    assert [float(one["data-by"]) for one in buttons] == [0.5, 2.0, 0.0]
    data = json.loads(next(text for text in parsed.inside["script"] if '"ticks"' in text))
    assert data["largest_modules"] == [[list(one) for one in found] for found in timeline.largest_modules]
    script = parsed.inside["script"][-1]
    for name in ("cursor", "tip", "mark", "selected"):
        assert name in by_class
        assert f'part("{name}")' in script


def test_the_page_has_every_table(report: StepReport) -> None:
    text = Parsed(page(report)).text
    for words in (
        "saved activations", "By kind of operator", "normalization", "blocks.*.up", "A mask", "train.py:3",
        "chunked loss", "ChunkedLoss()", "-2.00 KiB", "+1%", "+100 B",
    ):  # fmt: skip
        assert words in text, words
    anatomy, step = report.anatomy, report.step
    sizes = [
        anatomy.peak_bytes,
        report.run.budget_bytes,
        *anatomy.at_peak.values(),
        *anatomy.largest.values(),
    ]
    for one in (*step.kinds.values(), *(one for _, one in alike(step.modules).values() if one.saved_at_most)):
        sizes += [one.saved_at_peak, one.saved_at_most]
    sizes += [one.allocated for one in step.kinds.values()]
    for size in sizes:
        assert size == 0 or format_bytes(size) in text
    bare = replace(report, advice=(), predicted=None)
    assert "No single change" in Parsed(page(bare)).text
    assert "Advice" not in Parsed(page(replace(bare, advised=False))).text
    unknown = replace(report, predicted=PredictedStep(what="not predicted: no fork"))
    assert "not predicted: no fork" in Parsed(page(unknown)).text


def test_tables_with_sentences_name_each_cell_and_become_lists_on_a_narrow_screen(report: StepReport) -> None:
    tags = Parsed(page(report)).tags
    assert sum(tag == "table" and "words" in attributes.get("class", "") for tag, attributes in tags) == 2
    named = [attributes["data-column"] for tag, attributes in tags if tag == "td"]
    assert named.count("what to write instead") == len(report.anatomy.findings) > 0
    assert named.count("how") == len(report.advice) > 0


def test_names_of_others_are_text_and_not_tags(report: StepReport) -> None:
    anatomy = replace(report.anatomy, peak_module=NASTY, peak_place=NASTY)
    step = replace(
        report.step, anatomy=anatomy, timeline=replace(report.step.timeline, modules=(NASTY,) * 99)
    )
    found = replace(report, step=step, run=replace(report.run, name=NASTY), failure=NASTY)
    parsed = Parsed(page(found))
    assert not [tag for tag, _ in parsed.tags if tag == "b"]
    assert (
        json.loads(next(text for text in parsed.inside["script"] if '"ticks"' in text))["modules"][0] == NASTY
    )
    Parsed(comparison_page(found, report, (NASTY, "other")))


def test_a_failed_step_says_so_and_marks_its_end(report: StepReport) -> None:
    last = len(report.step.timeline.ticks) - 1
    step = replace(report.step, timeline=replace(report.step.timeline, failed_at=last))
    text = page(replace(report, step=step, failure="OutOfMemoryError: 5 GiB"))
    assert "This step ran out of memory" in text
    assert "OutOfMemoryError: 5 GiB" in text
    assert f'"marked":{last}' in text


def test_two_reports_share_a_scale(report: StepReport) -> None:
    small = StepReport(step=replace(report.step, timeline=Timeline()), run=report.run)
    parsed = Parsed(comparison_page(report, small, ("one", "other")))
    assert "no timeline" in parsed.text
    both = comparison_page(report, report, ("one", "other"))
    assert len(re.findall(r'<div class="plot"', both)) == 2
    assert "step0" in both
    assert "step1" in both


@pytest.mark.parametrize("top", [1, 1000, 4096, 3_000_000, 25 * 2**20, 7 * 2**30, 140 * 2**30])
def test_the_axis_has_few_round_sizes(top: int) -> None:
    sizes = list(ticks_up_to(top))
    assert len(sizes) <= 6
    assert all(0 < size <= top for size in sizes)
    assert top < 100 or len(sizes) >= 3
    assert {after - before for before, after in zip(sizes, sizes[1:], strict=False)} <= {sizes[0]}


def test_modules_that_differ_in_a_number_are_summed() -> None:
    one = SavedBytes(saved_at_peak=1, saved_at_most=2, allocated=3)
    found = alike({"layers.0.up": one, "layers.11.up": one, "conv1": one, "h.3": one, "": one})
    assert found["layers.*.up"] == (2, SavedBytes(saved_at_peak=2, saved_at_most=4, allocated=6))
    assert set(found) == {"layers.*.up", "conv1", "h.3", ""}
    assert next(iter(found)) == "layers.*.up"


def test_words() -> None:
    assert difference(2048, 1024) == "-1.00 KiB"
    assert difference(1024, 3072) == "+2.00 KiB"
    assert difference(5, 5) == "-"
    assert (time_share(0.004), time_share(-0.2), time_share(0.05)) == ("the same", "-20%", "+5%")
    assert (flops_words(12), flops_words(1.5e12)) == ("12 FLOP", "1.5 TFLOP")
