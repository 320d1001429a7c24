"""The benchmark harness: pairs, intervals, what voids a run, and what is written down."""

import ast
import json
import random
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import harness, record
from benchmarks.harness import Options, Ratio, Report, paired_ratio, self_ratio_is_void

RESULTS = sorted(record.RESULTS.glob("*.json"))
MODULES = {**command.find_benchmarks("run"), **command.find_benchmarks("gpu_rows")}


class FakeClock:
    """A clock that only the timed steps move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.order: list[str] = []
        monkeypatch.setattr(harness.time, "perf_counter", lambda: self.now)

    def step(self, name: str, seconds: float, noise: float = 0.0):
        """Return a step that takes `seconds`, give or take the share `noise`."""
        rng = random.Random(7)

        def run() -> None:
            self.order.append(name)
            self.now += seconds * (1 + noise * rng.uniform(-1, 1))

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def test_ratio_and_interval_are_those_of_the_pairs(clock: FakeClock) -> None:
    ratio = paired_ratio(clock.step("ours", 0.03), clock.step("peer", 0.02), pairs=100)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((1.5, 1.5, 1.5))
    assert (ratio.ours_ms, ratio.peer_ms) == pytest.approx((30, 20))


def test_interval_holds_the_true_ratio_and_shrinks_with_more_pairs(clock: FakeClock) -> None:
    few, many = (
        paired_ratio(clock.step("ours", 0.03, 0.2), clock.step("peer", 0.02), pairs=pairs)
        for pairs in (100, 2500)
    )
    assert few.low < 1.5 < few.high
    assert many.high - many.low < (few.high - few.low) / 3


def test_order_is_random_and_balanced(clock: FakeClock) -> None:
    paired_ratio(clock.step("ours", 0.03), clock.step("peer", 0.02), pairs=100, warm_up=1)
    first = clock.order[2::2]
    assert first.count("ours") == first.count("peer") == 50
    assert first not in (["ours", "peer"] * 50, ["ours"] * 50 + ["peer"] * 50)


def test_setup_runs_before_every_step_and_is_not_timed(clock: FakeClock) -> None:
    setup = clock.step("setup", 5.0)
    ratio = paired_ratio(clock.step("ours", 0.03), clock.step("peer", 0.02), pairs=100, setup=setup)
    assert ratio.median == pytest.approx(1.5)
    assert set(clock.order[::2]) == {"setup"}


def test_fewer_than_100_pairs_are_for_steps_over_a_second(clock: FakeClock) -> None:
    assert paired_ratio(clock.step("ours", 3.0), clock.step("peer", 2.0), pairs=5).pairs == 5
    with pytest.raises(ValueError, match="needs 100 pairs"):
        paired_ratio(clock.step("ours", 0.3), clock.step("peer", 0.2), pairs=99)
    with pytest.raises(ValueError, match="must be at least 1"):
        paired_ratio(clock.step("ours", 3.0), clock.step("peer", 2.0), pairs=0)


@pytest.mark.parametrize(("median", "void"), [(1.0, False), (1.009, False), (1.011, True), (0.989, True)])
def test_a_self_ratio_off_by_more_than_one_percent_voids_the_run(median: float, void: bool) -> None:
    assert self_ratio_is_void(Ratio(median, median, median, 100)) is void


def test_void_run_says_so_on_screen_and_in_result(capsys: pytest.CaptureFixture[str]) -> None:
    command.show(Report("demo", {"ratio": 0.5}, [{"what": "a", "ratio": 0.5}], void=True, notes=("Odd.",)))
    printed = capsys.readouterr().out
    assert "VOID" in printed
    assert "note: Odd." in printed
    last = printed.splitlines()[-1]
    assert json.loads(last.removeprefix("RESULT ")) == {"ratio": 0.5, "void": True}


def test_record_names_hardware_versions_commit_and_date(tmp_path: Path) -> None:
    report = Report("demo", {"ratio": 0.5, "same": True}, [{"what": "a"}], void=True)
    path = record.record(report, Options(quick=True), seconds=1.0, on_gpu=False, folder=tmp_path)
    content = json.loads(path.read_text())
    assert path.name == f"demo-quick-{content['hardware']['slug']}.json"
    assert content["void"] is True
    assert content["quick"] is True
    assert content["figures"] == {"ratio": 0.5, "same": True}
    assert {"python", "torch", "lightning"} <= set(content["versions"])
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", content["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert list(tmp_path.iterdir()) == [path]


def test_commit_is_dirty_where_code_differs_and_not_for_results(tmp_path: Path, monkeypatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True
        )

    for name in (*record.CODE[:4], "benchmarks/results"):
        (tmp_path / name).mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "results" / "a.json").write_text("{}")
    (tmp_path / "memory_report.json").write_text("{}")
    assert re.fullmatch(r"[0-9a-f]{40}", record.git_commit())
    (tmp_path / "examples" / "new.py").write_text("")
    assert record.git_commit().endswith("-dirty")


@pytest.mark.parametrize("figures", [{"a": float("nan")}, {"a b": 1}, {"a": "fast"}, {"a": None}])
def test_a_bad_figure_is_refused_and_no_file_is_left(tmp_path: Path, figures: dict) -> None:
    with pytest.raises(ValueError, match="demo"):
        record.record(Report("demo", figures, []), Options(), seconds=1.0, on_gpu=False, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_command_runs_a_benchmark_and_writes_its_file(tmp_path, monkeypatch, capsys) -> None:
    module = tmp_path / "demo.py"
    module.write_text('"""Counts to its seed."""\ndef run(options):\n    return REPORT(options)\n')
    monkeypatch.setattr(command, "find_benchmarks", lambda entry: {"demo": "Counts to its seed."})
    fake = type(sys)("benchmarks.demo")
    fake.run = lambda options: Report(
        "demo", {"seed": options.seed}, [{"what": "seed", "value": options.seed}]
    )
    monkeypatch.setitem(sys.modules, "benchmarks.demo", fake)
    assert command.main(["demo", "--seed", "3", "--results", str(tmp_path / "out")]) == 0
    assert 'RESULT {"seed": 3, "void": false}' in capsys.readouterr().out
    (written,) = (tmp_path / "out").iterdir()
    assert json.loads(written.read_text())["seed"] == 3


def test_unknown_benchmark_is_refused_with_the_known_ones(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "find_benchmarks", lambda entry: {"packing": "Packs."})
    with pytest.raises(SystemExit):
        command.main(["pakcing"])
    assert "there are: packing" in capsys.readouterr().err


def test_list_shows_the_first_docstring_line(tmp_path: Path) -> None:
    (tmp_path / "demo.py").write_text('"""Measures this.\n\nAnd more.\n"""\ndef run(options): ...\n')
    (tmp_path / "helper.py").write_text('"""No benchmark."""\n')
    assert command.find_benchmarks(folder=tmp_path) == {"demo": "Measures this."}


@pytest.mark.parametrize("name", MODULES)
def test_every_benchmark_says_what_it_measures(name: str) -> None:
    assert re.fullmatch(r".{15,110}[.:]", MODULES[name]), "the first docstring line is one sentence"
    assert (record.RESULTS.parent / f"{name}.py").stat().st_size > 0


@pytest.mark.parametrize("name", MODULES)
def test_every_benchmark_is_a_command_of_its_own(name: str) -> None:
    """`python -m benchmarks.NAME` would otherwise end at once, in success and without a word."""
    tail = ast.parse((record.RESULTS.parent / f"{name}.py").read_text()).body[-1]
    assert ast.unparse(tail) == "if __name__ == '__main__':\n    raise SystemExit(main_of(__file__))"


def test_a_benchmarks_own_command_is_the_common_one(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/demo.py", "--quick"])
    monkeypatch.setattr(command, "main", lambda: sys.argv[1:])
    assert command.main_of("benchmarks/demo.py") == ["demo", "--quick"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_come_from_a_command_and_a_commit(path: Path) -> None:
    content = json.loads(path.read_text())
    if content["name"] == "card_facts":
        assert content["command"].startswith("python scripts/card_facts.py")
    else:
        assert content["name"] in MODULES
        assert content["command"].startswith("python -m benchmarks")
    assert content["commit"] != "unknown"
    assert path.stem.endswith(content["hardware"]["slug"])
    assert ("-quick-" in path.stem) is content["quick"]


@pytest.mark.slow
@pytest.mark.parametrize("name", command.find_benchmarks("run"))
def test_a_quick_run_ends_with_a_result(name: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "benchmarks", name, "--quick", "--results", str(tmp_path)]
    # Under five minutes on an idle machine; the limit is for a hang.
    done = subprocess.run(arguments, cwd=record.ROOT, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("RESULT {")


def test_benchmarks_leave_the_clock_to_the_harness() -> None:
    """A claim that is timed outside `paired_ratio` has no interval and no row that shows the noise."""
    for name in MODULES:
        source = (record.RESULTS.parent / f"{name}.py").read_text()
        if any(
            isinstance(node, ast.Attribute) and node.attr == "perf_counter"
            for node in ast.walk(ast.parse(source))
        ):
            assert "paired_ratio" in source, name


def test_the_gpu_part_of_predictions_sets_each_beside_its_measurement(monkeypatch) -> None:
    from concurrent.futures import Future

    from benchmarks import _prediction_gpu
    from lightning_memkit.plugins.planning.prediction import predict_memory
    from lightning_memkit.prediction.result import Prediction
    from tests.plugins.test_prediction import Language, batch

    found = predict_memory(Language(), batch(), device="h200")
    said: Future[Prediction] = Future()
    said.set_result(found)
    monkeypatch.setattr(_prediction_gpu, "foreseen", lambda options: defaultdict(lambda: said))
    measured = {"allocated": found.allocated_bytes, "reserved": 2 * found.reserved_bytes}
    monkeypatch.setattr(_prediction_gpu, "peaks", lambda fit, device: measured)
    rows = _prediction_gpu.rows_of_predictions(Options(quick=False, seed=0))
    assert len(rows) == len(_prediction_gpu.CASES) + 22
    for row in (rows[0], rows[-1]):
        values = row.run()
        errors = {
            name.partition("_error")[0]: value for name, value in values.items() if "_error_pct" in name
        }
        assert [value for name, value in errors.items() if name.endswith("allocated")] == [0]
        assert [value for name, value in errors.items() if name.endswith("reserved")] == [50]
        (missed,) = row.missed(values)
        assert "reserved_error_pct is 50; its limit is at most 5" in missed


def test_the_documented_plans_are_for_whole_rows() -> None:
    """The data of `memkit plan --config benchmarks/llama_8b.yaml`, whose shape is too large for a test."""
    pytest.importorskip("transformers")
    from benchmarks.planning import LENGTH, LlamaRows
    from lightning_memkit.plugins.planning._first_batch import first_batch

    batch = first_batch(LlamaRows("tiny", 2))
    assert {name: tuple(ids.shape) for name, ids in batch.items()} == {
        "input_ids": (2, LENGTH),
        "labels": (2, LENGTH),
    }
