"""What a new user meets: lines to change, lines of terminal, and what is said of mistakes; counted, not timed.

`lines_changed_max`: of three projects (a LightningModule, a transformers model on a JSONL, a LightningCLI project) the
one that changes most lines to train within a budget. `lines_printed_fit`: the most lines that memkit adds to the
terminal of one of them; each is of one of three kinds. `last_screen_lines`: what `memkit fit` with `MemoryReport`
shows at the end, on 80 columns. `mistakes_named` of `mistakes` are refused before the first step in at most three
lines of 120 columns that have the value and what to do, and leave nothing behind. `import_prints`: lines printed by
imports.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from benchmarks.__main__ import main_of
from benchmarks._contact_messages import PRELOADED, PROCESSES, changed, told
from benchmarks._contact_mistakes import CORPUS, JOB, LINES, MISTAKES, callbacks, one
from benchmarks._contact_projects import KINDS, PROJECTS, kind_of, ours, run_python
from benchmarks.harness import Options, Report

_IMPORTS = "import lightning_memkit as m; [getattr(m, name) for name in m.__all__]"
_FEW = 6  # every so many of the mistakes in a quick run


def run(options: Options) -> Report:
    """Three minutes; `--quick` takes one project and one in six of the mistakes."""
    PROCESSES.set_forkserver_preload(PRELOADED)  # here: there is one server for all that a process imports
    rows: list[dict[str, object]] = []
    changes, printed = [], []
    for project in PROJECTS[: 1 if options.quick else None]:
        before, after = project.printed()
        added = ours(before, after)
        changes.append(project.lines_changed)
        printed.append(len(added))
        rows.append({"what": project.name, "lines_changed": changes[-1], "lines_printed": printed[-1]})
        unknown = [line for line in added if kind_of(line) is None]
        if unknown:
            raise RuntimeError(f"{project.name} prints what is of none of {', '.join(KINDS)}: {unknown}")
    screen, page_bytes = _last_screen()
    mistakes = list(MISTAKES[:: _FEW if options.quick else 1])
    named = 0
    for mistake, said in zip(mistakes, told(mistakes), strict=True):
        lacks = said.lacks(mistake)
        named += not lacks
        rows.append({"what": mistake.what, "lines": said.lines, "lacks": "; ".join(lacks)})
    figures: dict[str, float | int | bool] = {
        "lines_changed_max": max(changes),
        "lines_printed_fit": max(printed),
        "last_screen_lines": len(screen),
        "mistakes": len(mistakes),
        "mistakes_named": named,
        "page_bytes": page_bytes,
        "import_prints": len(run_python(("-c", _IMPORTS), ".")),
    }
    return Report("first_contact", figures, rows, notes=tuple(screen), failed=named < len(mistakes))


def _last_screen() -> tuple[list[str], int]:
    """What a run with a report ends with, and the bytes of its page."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CORPUS).write_bytes(LINES)
        reported = changed(JOB, {**callbacks(one("MemoryReport"), one("MemoryBudget", budget="1GiB")),
                                 "trainer.max_steps": 8, "trainer.default_root_dir": "."})  # fmt: skip
        Path(folder, "job.yaml").write_text(yaml.safe_dump(reported))
        shown = run_python(("-m", "lightning_memkit.cli", "fit", "--config", "job.yaml"), folder)
        pages = list(Path(folder).rglob("*.html"))
        return list(_after_the_steps(shown)), sum(page.stat().st_size for page in pages)


def _after_the_steps(shown: list[str]) -> Iterator[str]:
    ended = False
    for line in shown:
        if ended:
            yield line
        ended = ended or "`Trainer.fit` stopped" in line


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
