"""`python -m benchmarks.gpu`: rows that fail, crash or hang lose only themselves, and all is written as it comes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import _gpu_schedule, gpu
from benchmarks._gpu_results import Results
from benchmarks._gpu_rows import GpuRow, SkipRow, at_least, at_most, needs_package
from benchmarks._gpu_schedule import ORDER, jobs_of, rows_of, seconds_for
from benchmarks._gpu_size import GpuSize
from benchmarks.harness import Options
from benchmarks.record import RESULTS, ROOT

CPU = Options(device="cpu")
HEAD = """
import os, signal, subprocess, sys, time
from benchmarks._gpu_rows import GpuRow, SkipRow, at_least, at_most

def row(what, run, needs=5, **limits):
    return GpuRow(what=what, needs_seconds=needs, run=run, limits=limits)
"""


class Fakes:
    """Benchmarks made of a few lines, in a package that the process of rows finds too."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.package = folder, f"fakes_{folder.name}".replace("-", "_")
        (folder / self.package).mkdir()
        (folder / self.package / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")

    def add(self, name: str, rows: str) -> None:
        """A benchmark whose `gpu_rows` returns this list."""
        text = f"{HEAD}\ndef gpu_rows(options):\n    return [{rows}]\n"
        (self.folder / self.package / f"{name}.py").write_text(text)

    def run(self, *names: str, seconds: float = 600) -> tuple[int, Results]:
        """Run them all; the exit code, and what was found."""
        jobs = jobs_of(names, CPU, self.package)
        results = Results(jobs, CPU, "python -m benchmarks.gpu", self.folder / "out")
        code = gpu.run_all(results, CPU, deadline=time.monotonic() + seconds, package=self.package)
        return code, results

    def files(self) -> dict[str, dict]:
        """What lies in the results' folder, by benchmark."""
        found = [json.loads(path.read_text()) for path in (self.folder / "out").iterdir()]
        return {content["name"]: content for content in found}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(tmp_path, monkeypatch)


def kinds(results: Results) -> dict[str, str]:
    return {outcome.job.row.what: outcome.kind for outcome in results.outcomes}


def test_a_row_that_raises_crashes_or_hangs_loses_only_itself(fakes, monkeypatch, capsys) -> None:
    monkeypatch.setattr(_gpu_schedule, "LEAST_SECONDS", 1.0)
    monkeypatch.setattr(_gpu_schedule, "PATIENCE", 1.0)
    # The hanging row leaves a process behind that holds the pipe.
    fakes.add(
        "bad",
        """
        row("first", lambda: {"one": 1}),
        row("raises", lambda: 1 / 0),
        row("exits", lambda: sys.exit(3)),
        row("not a number", lambda: {"two": float("nan")}),
        row("after a raise", lambda: {"three": 3, "said": "so"}),
        row("crashes", lambda: os._exit(7)),
        row("after a crash", lambda: {"four": os.getpid()}),
        row("is killed", lambda: (print("last words"), sys.stdout.flush(), os.kill(os.getpid(), signal.SIGKILL))),
        row("hangs", lambda: subprocess.run(["sleep", "987"]), needs=0.01),
        row("can't run", lambda: (_ for _ in ()).throw(SkipRow("needs a card"))),
        row("last", lambda: {"five": 5.0}),
        """,
    )
    fakes.add("good", 'row("only", lambda: {"one": 2})')
    code, results = fakes.run("bad", "good", seconds=30)
    assert code == 1
    good = {"first", "after a raise", "after a crash", "last", "only"}
    assert {what for what, kind in kinds(results).items() if kind == "ok"} == good
    assert {what for what, kind in kinds(results).items() if kind == "skipped"} == {"can't run"}
    why = {outcome.job.row.what: outcome.why for outcome in results.outcomes}
    assert why["raises"] == "ZeroDivisionError: division by zero"
    assert "two=nan" in why["not a number"]
    assert "exit code 7" in why["crashes"]
    assert "SIGKILL" in why["is killed"]
    assert "last words" in why["is killed"]
    assert why["hangs"].startswith("stopped after")
    assert not _is_running("sleep 987")
    printed = capsys.readouterr().out
    last = json.loads(printed.splitlines()[-1].removeprefix("RESULT "))
    assert last == {
        "bad_one": 1,
        "bad_three": 3,
        "bad_four": last["bad_four"],
        "bad_five": 5.0,
        "good_one": 2,
    }
    files = fakes.files()
    assert files["good"]["figures"] == {"one": 2}
    assert [row["result"].partition(":")[0] for row in files["bad"]["rows"]].count("failed") == 6
    assert files["bad"]["notes"] == []


def test_a_benchmark_that_cannot_be_imported_is_one_failed_row(fakes) -> None:
    (fakes.folder / fakes.package / "broken.py").write_text("import a_package_that_is_not_there\n")
    fakes.add("good", 'row("only", lambda: {"one": 2})')
    code, results = fakes.run("broken", "good")
    assert code == 1
    assert kinds(results) == {"its rows": "failed", "only": "ok"}
    assert "a_package_that_is_not_there" in results.outcomes[0].why


def test_rows_are_written_as_they_come_and_a_kill_leaves_a_whole_file(fakes) -> None:
    fakes.add("slow", 'row("first", lambda: {"one": 1}), row("second", lambda: time.sleep(987))')
    code = (
        "import time; from benchmarks import gpu; from benchmarks._gpu_results import Results\n"
        "from benchmarks._gpu_schedule import jobs_of; from benchmarks.harness import Options\n"
        "from pathlib import Path; options = Options(device='cpu')\n"
        f"package, folder = {fakes.package!r}, Path({str(fakes.folder / 'out')!r})\n"
        "results = Results(jobs_of(['slow'], options, package), options, 'python -m benchmarks.gpu', folder)\n"
        "gpu.run_all(results, options, deadline=time.monotonic() + 600, package=package)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert "slow: first: ok" in process.stdout.readline()
    deadline = time.monotonic() + 30
    while not (fakes.folder / "out").is_dir() or not list((fakes.folder / "out").glob("slow*.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (written,) = (fakes.folder / "out").glob("slow*.json")
    content = json.loads(written.read_text())
    assert content["figures"] == {"one": 1}
    assert content["notes"] == ["1 rows had not been run"]
    assert {"commit", "hardware", "versions", "command", "date", "seed"} <= set(content)
    assert written.stem.endswith(content["hardware"]["slug"])
    deadline = time.monotonic() + 30  # the process of rows ends by itself
    while _is_running(fakes.package):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_missed_limit_is_exit_code_1(fakes, capsys) -> None:
    fakes.add(
        "a", 'row("fast", lambda: {"ms": 1.0, "fraction": 1.0}, ms=at_most(2), fraction=at_least(0.97))'
    )
    fakes.add("b", 'row("slow", lambda: {"ms": 3.0}, ms=at_most(2), other=at_least(1))')
    code, results = fakes.run("a", "b")
    assert code == 1
    (why,) = (outcome.why for outcome in results.outcomes if outcome.kind == "limit missed")
    assert why == "ms is 3; its limit is at most 2; other was not measured; its limit is at least 1"
    assert fakes.files()["b"]["figures"] == {"ms": 3.0}
    assert why in capsys.readouterr().out


def test_two_rows_of_a_benchmark_share_no_name_and_no_figure(fakes) -> None:
    fakes.add("a", 'row("one", lambda: {"x": 1}), row("two", lambda: {"x": 2})')
    code, results = fakes.run("a")
    assert code == 1
    assert results.figures() == {"a_x": 1}
    fakes.add("b", 'row("one", lambda: {"x": 1}), row("one", lambda: {"y": 2})')
    with pytest.raises(ValueError, match="Rows of b have one name: one"):
        rows_of("b", CPU, fakes.package)


def test_a_row_that_cannot_finish_is_left_out_and_a_short_one_still_runs(fakes) -> None:
    fakes.add("a", 'row("long", lambda: {"x": 1}, needs=1000), row("short", lambda: {"y": 1}, needs=1)')
    code, results = fakes.run("a", seconds=200)
    assert kinds(results) == {"long": "no time", "short": "ok"}
    assert results.outcomes[0].why.startswith("needs 1000 s and ")
    assert code == 1


def test_seconds_are_shared_out_by_need() -> None:
    assert seconds_for([100, 200, 100], 800) == pytest.approx(200)
    assert seconds_for([100, 200, 100], 1600) == pytest.approx(400)
    assert seconds_for([100, 300, 600], 500) == pytest.approx(200), (
        "an earlier row gets what it needs and more"
    )
    assert seconds_for([100], 120) == pytest.approx(120)
    assert seconds_for([100, 1], 99) is None
    assert seconds_for([1, 400], 500) == pytest.approx(_gpu_schedule.LEAST_SECONDS)


def test_a_void_benchmark_says_so(fakes) -> None:
    fakes.add("a", 'row("same", lambda: {"self_ratio": 1.02})')
    fakes.add("b", 'row("same", lambda: {"self_ratio": 1.002})')
    code, results = fakes.run("a", "b")
    assert code == 0
    assert results.figures()["a_void"] is True
    assert results.figures()["b_void"] is False
    assert fakes.files()["a"]["void"] is True


def test_the_order_names_every_gpu_benchmark_once() -> None:
    assert sorted(ORDER) == sorted(command.find_benchmarks("gpu_rows"))


def test_jobs_come_in_the_order_of_benchmarks_and_only_leaves_others_out(monkeypatch, tmp_path) -> None:
    seen: list[str] = []
    monkeypatch.setattr(gpu, "_cuda_is_available", lambda: True)
    monkeypatch.setattr(gpu, "jobs_of", lambda names, options: seen.extend(names) or [])
    assert gpu.main(["--only", "attention", "loss_head", "--results", str(tmp_path)]) == 0
    assert seen == ["loss_head", "attention"]
    seen.clear()
    assert gpu.main(["--results", str(tmp_path)]) == 0
    assert tuple(seen) == ORDER


def test_unknown_names_are_refused_with_the_known_ones(capsys) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--only", "atention"])
    assert "no GPU benchmark atention; there are: optimizer_step" in capsys.readouterr().err


def test_without_a_device_the_command_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu, "_cuda_is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "No CUDA device is present" in capsys.readouterr().out


def test_a_run_on_the_cpu_is_not_written_to_the_results(capsys) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--results", str(RESULTS)])
    assert "name another folder" in capsys.readouterr().err


def test_a_benchmarks_own_command_runs_its_rows(monkeypatch, tmp_path) -> None:
    seen = []
    monkeypatch.setattr(gpu, "main", lambda arguments: seen.append(arguments) or 0)
    assert command.main(["attention", "--gpu", "--quick", "--results", str(tmp_path)]) == 0
    assert seen == [["--only", "attention", "--quick", "--seed", "0", "--results", str(tmp_path)]]


@pytest.mark.parametrize("options", [Options(), Options(quick=True), CPU], ids=["full", "quick", "tiny"])
def test_rows_are_listed_without_a_device_and_have_names_needs_and_limits(options: Options) -> None:
    jobs = jobs_of(ORDER, options)
    assert not any(job.row.what == "its rows" for job in jobs)
    assert all(job.row.needs_seconds > 0 for job in jobs)
    assert any(job.row.limits for job in jobs) is (options.device == "cuda")


def test_rows_limit_what_is_claimed_of_a_card() -> None:
    limits = {name: str(limit) for job in jobs_of(ORDER, Options()) for name, limit in job.row.limits.items()}
    assert limits["host_ms_201"] == "at most 1.5"
    assert limits["host_us_per_parameter"] == "at most 5"
    for suffix in ("shards", "release"):
        assert limits[f"host_ms_201_{suffix}"] == "at most 1.5"
        assert limits[f"host_us_per_parameter_{suffix}"] == "at most 5"
    assert {name for name in limits if limits[name] == "at least 0.97"} == {
        f"throughput_fraction_{name}" for name in ("attention_scores", "large_vocabulary", "convolutions")
    }
    allocated = [
        name for name in limits if name.endswith("_allocated_error_pct") and limits[name] == "at most 2"
    ]
    reserved = [
        name for name in limits if name.endswith("_reserved_error_pct") and limits[name] == "at most 5"
    ]
    assert len(allocated) == len(reserved) >= 25


def test_full_sizes_are_larger_than_quick_and_tiny_ones_have_no_limits() -> None:
    full, quick, tiny = GpuSize(), GpuSize.quick(), GpuSize.tiny()
    assert full.decoder.depth > quick.decoder.depth > tiny.decoder.depth
    assert tiny.limits({"x": at_most(1)}) == {}
    assert quick.limits({"x": at_most(1)}) == {"x": at_most(1)}


def test_a_missing_package_is_a_reason_to_skip() -> None:
    with pytest.raises(SkipRow, match="needs a_package_that_is_not_there"):
        needs_package("a_package_that_is_not_there")


def test_limits_are_judged_by_their_figures() -> None:
    row = GpuRow(what="a", needs_seconds=1, run=dict, limits={"x": at_least(0.97), "y": at_most(5)})
    assert row.missed({"x": 0.97, "y": 5}) == []
    assert len(row.missed({"x": 0.96, "y": 5.1})) == 2
    assert row.missed({"x": 1.0, "y": "fast"}) == ["y was not measured; its limit is at most 5"]


CHEAP = {
    "optimizer_step": {
        "host's time of memkit kahan, compact",
        "host's time of FSDP2's shards",
        "host's time of released gradients",
        "memkit split, compact",
    },
    "loss_head": {"V=512 N=256 bf16, memkit", "V=512 N=256 bf16, errors over plain's"},
    "activations": {"none", "full", "budget:0.5", "auto", "offload"},
    "attention": {"loop, 3 in 128", "dense_mask, 3 in 128", "flex, 3 in 128"},
    "optimizer_offload": {"AdamW, float32"},
}


@pytest.mark.parametrize("name", CHEAP)
def test_rows_run_at_a_tiny_size_on_the_cpu(name: str) -> None:
    from benchmarks._gpu_worker import run_row

    rows = {row.what: row for row in rows_of(name, CPU) if row.what in CHEAP[name]}
    assert rows.keys() == CHEAP[name]
    answers = {what: run_row(lambda row=row: row) for what, row in rows.items()}
    assert not [answer["failed"] for answer in answers.values() if "failed" in answer]
    for what, answer in answers.items():
        if "skipped" in answer:
            assert what in ("offload", "flex, 3 in 128", "AdamW, float32")
        else:
            assert answer["values"]


@pytest.mark.slow
def test_every_row_runs_at_a_tiny_size_on_the_cpu(tmp_path, capsys) -> None:
    assert gpu.main(["--device", "cpu", "--seconds", "3000", "--results", str(tmp_path)]) == 0
    assert {json.loads(path.read_text())["name"] for path in tmp_path.iterdir()} == set(ORDER)
    assert capsys.readouterr().out.splitlines()[-1].startswith("RESULT {")


def _is_running(text: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                return True
        except OSError:
            continue
    return False
