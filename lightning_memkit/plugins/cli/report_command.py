"""`memkit report`: print the report of a run, or of two side by side; only reads files, without Lightning."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lightning_memkit.memory.page import comparison_page, page
from lightning_memkit.memory.report import StepReport
from lightning_memkit.memory.report_table import comparison_tables, tables
from lightning_memkit.utilities.arguments import SentenceParser
from lightning_memkit.utilities.atomic_write import write_whole

REPORT, FAILED = "memory_report.json", "memory_report_oom.json"
_DESCRIPTION = """Print where the bytes of a run's metered step went: by category (beside the prediction, where there
is one), by kind of operator and by module, with findings and advice. MemoryReport writes what is read here."""
_EPILOG = """examples:
  memkit report runs/version_3                      the tables, and where the page is
  memkit report runs/version_3 runs/version_4       by category, and what the second has more
  memkit report runs/version_3 --html step.html     the page once more: a timeline to move over, no network
  memkit report memory_report_oom.json              what lived when a step ran out of memory

A folder is searched for memory_report.json, the newest below it where it has none itself. Advice and predictions are
there if the run had asked for them: MemoryReport(predict=True, advise=True).

exit codes: 0; 1 where a report can't be read or written; 2 where the command line is wrong
"""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    found = SentenceParser(
        prog="memkit report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("run", metavar="RUN", help="a memory_report.json, or a folder of logs that has one")
    found.add_argument(
        "other", metavar="OTHER", nargs="?", help="another to compare with: differences are OTHER - RUN"
    )
    found.add_argument("--html", metavar="FILE", help="write the page, of both where there are two")
    found.add_argument(
        "--oom",
        action="store_true",
        help="of a folder take memory_report_oom.json: the step that ran out of memory",
    )
    return found


def run(words: Sequence[str]) -> int:
    """Run the command and return its exit code; an error is one line, `MEMKIT_DEBUG=1` adds the traceback."""
    options = parser().parse_args(list(words))
    try:
        _report(options)
    except (OSError, ValueError) as error:
        if os.environ.get("MEMKIT_DEBUG"):
            traceback.print_exc()
        print(f"memkit: error: {error}", file=sys.stderr)
        return 1
    return 0


def report_file(given: str, name: str = REPORT) -> Path:
    """The report that a path means: the file itself, or the newest one of that name in a folder.

    Raises:
        FileNotFoundError: there is none; the message says what was found instead.
    """
    path = Path(given)
    if path.is_dir():
        if (path / name).is_file():
            return path / name
        below = sorted(path.rglob(name), key=lambda file: file.stat().st_mtime)
        if not below:
            raise FileNotFoundError(
                f"{given} has no {name}, nor a folder below it: MemoryReport writes one when training ends. "
                f"{_others(path, name)}"
            )
        return below[-1]
    if not path.is_file():
        raise FileNotFoundError(f"{given} does not exist; give a {name}, or the folder of a run's logs.")
    if path.suffix == ".html":
        beside = path.with_suffix(".json")
        if beside.is_file():
            return beside
    return path


def _others(path: Path, name: str) -> str:
    other = FAILED if name == REPORT else REPORT
    if not any(path.rglob(other)):
        return "Is it the folder of the run?"
    return f"There is a {other}: {'add --oom' if name == REPORT else 'leave --oom out'}."


def _report(options: argparse.Namespace) -> None:
    name = FAILED if options.oom else REPORT
    paths = [report_file(given, name) for given in (options.run, options.other) if given is not None]
    reports = [StepReport.from_json(path) for path in paths]
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 118)
    names = _names(paths)
    if len(reports) == 1:
        found = tables(reports[0])
    else:
        found = comparison_tables(reports[0], reports[1], names)
    for table in found:
        console.print(table, markup=False)
    if len(reports) == 1:
        for finding in reports[0].anatomy.findings:
            console.print(f"finding: {finding}", markup=False)
    if options.html is not None:
        text = page(reports[0]) if len(reports) == 1 else comparison_page(reports[0], reports[1], names)
        write_whole(Path(options.html), text)
        console.print(f"page: {options.html}", markup=False)
    elif len(reports) == 1:
        beside = paths[0].with_suffix(".html")
        if beside.is_file():
            console.print(f"page: {beside}", markup=False)
        else:
            console.print("--html FILE writes the page.", markup=False)


def _names(paths: Sequence[Path]) -> tuple[str, str]:
    """Short names for two files: the components of their paths that differ."""
    if len(paths) < 2:
        return str(paths[0]), ""
    one, other = (list(path.resolve().parts) for path in paths)
    while len(one) > 1 and len(other) > 1 and one[-1] == other[-1]:
        one.pop()
        other.pop()
    while len(one) > 1 and len(other) > 1 and one[0] == other[0]:
        one.pop(0)
        other.pop(0)
    return "/".join(one), "/".join(other)
