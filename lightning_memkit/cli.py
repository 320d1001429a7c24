"""The `memkit` command: fit, validate, test and predict from YAML, plan, report, consolidate and doctor."""

import io
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_memkit.utilities.arguments import SentenceParser
from lightning_memkit.utilities.garbage import without_collecting

COMMANDS = {
    "fit": "Train the model of a config.",
    "validate": "One evaluation epoch over the validation set.",
    "test": "One evaluation epoch over the test set.",
    "predict": "Predictions for the data of a config.",
    "plan": "The fastest configuration of a config that fits a budget, before anything is allocated.",
    "report": "Where the bytes of a run went, from what MemoryReport wrote; of two runs side by side.",
    "consolidate": "A sharded, streamed or bfloat16 checkpoint as one file that plain Lightning loads.",
    "doctor": "What this machine offers, and what memkit will therefore use.",
}
INTERRUPTED = 130
_OF_FIT_ALONE = (
    "With --budget SIZE (24GiB, 90%, auto) the config is planned first and trained as planned; --goal speed, exact or "
    "memory and --headroom FRACTION belong to it: see `memkit plan --help`."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; errors print one line, `--debug` adds the traceback.

    Args:
        arguments: the words after `memkit`; None takes those of the process.

    Returns:
        0; 1 after an error; 2 where the arguments or the config can't be read; 130 after Ctrl+C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in words:
        words = [word for word in words if word != "--debug"]
        os.environ["MEMKIT_DEBUG"] = "1"  # processes that a strategy launches inherit it
    # OpenMP's threads spin while they wait, without end by default: beside another process that keeps a core busy, a
    # step then takes a hundred times as long. A bounded spin costs nothing. Read when torch is loaded, later.
    os.environ.setdefault("GOMP_SPINCOUNT", "300000")
    _never_fail_to_print()
    # Classes of the project one stands in are named in its configs: `examples.job.model.Model`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        print(f"memkit: {words[0]!r} is no command; the commands are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    if words[0] == "doctor":
        return _doctor(words[1:])
    if words[0] == "plan":
        return _reported(lambda: _plan(words[1:]))
    if words[0] == "report":
        return _report(words[1:])
    if words[0] == "consolidate":
        return _consolidate(words[1:])
    if words[0] == "fit" and any(word.partition("=")[0] == "--budget" for word in words):
        return _reported(lambda: _fit_as_planned(words[1:]))
    return _run(words)


def _never_fail_to_print() -> None:
    """Print '?' for a character that the terminal's encoding lacks; a report would end in an error there."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _help() -> str:
    lines = [f"  {name:<13}{text}" for name, text in COMMANDS.items()]
    return "\n".join(
        (
            "usage: memkit COMMAND [--config FILE.yaml] [options] [--debug]",
            "",
            "Train PyTorch Lightning models in the memory one has.",
            "",
            *lines,
            "",
            "Start with what a machine has, what would fit, the run itself, and where its bytes went:",
            "",
            "  memkit doctor",
            "  memkit plan --config job.yaml --budget 24GiB --output planned.yaml",
            "  memkit fit --config planned.yaml             or both at once: fit --budget 24GiB --config job.yaml",
            "  memkit report lightning_logs/version_0",
            "",
            "A config names a model, its data and the Trainer, as for LightningCLI; classes of the folder one stands",
            "in are found. What comes later overrides what came before it: --config job.yaml --config small.yaml",
            "--trainer.max_steps=10. `--print_config` shows what was read.",
            "",
            "`memkit COMMAND --help` explains every option. --debug, or MEMKIT_DEBUG=1, prints tracebacks.",
            "Exit status: 0; 1 after an error; 2 where the arguments or the config can't be read; 130 after Ctrl+C.",
        )
    )


def _run(words: list[str]) -> int:
    # LightningCLI reads sys.argv, and strategies start further processes with it.
    previous, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        return _reported(_fit)
    finally:
        sys.argv = previous


def _fit() -> int:
    with without_collecting():
        from lightning_memkit.plugins.cli.memkit_cli import MemkitCLI

    MemkitCLI(parser_kwargs={"fit": {"epilog": _OF_FIT_ALONE}})
    return 0


def _fit_as_planned(words: list[str]) -> int:
    with without_collecting():
        from lightning_memkit.plugins.cli.planned_fit import planned_words

    with tempfile.TemporaryDirectory(prefix="memkit-") as folder:
        return _run(planned_words(words, Path(folder)))


def _plan(words: list[str]) -> int:
    with without_collecting():
        from lightning_memkit.plugins.cli.plan_command import run

    return run(words)


def _report(words: list[str]) -> int:
    from lightning_memkit.plugins.cli.report_command import run

    return run(words)


def _reported(command: Callable[[], int]) -> int:
    """The exit status of a command; an error is a line."""
    try:
        if os.environ.get("MEMKIT_DEBUG"):
            return command()
        from lightning_memkit.plugins.cli.quiet import only_what_matters

        with only_what_matters():
            return command()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exit_:
        # Lightning shuts down after Ctrl+C and exits with 1, whatever the shell should know.
        if isinstance(exit_.__context__, KeyboardInterrupt):
            return INTERRUPTED
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Exception as error:
        if os.environ.get("MEMKIT_DEBUG"):
            traceback.print_exc()
        refused = _is_config_error(error)
        if refused:
            print(f"memkit: error: {error}", file=sys.stderr)
        elif not os.environ.get("MEMKIT_DEBUG"):
            print(_short(error), file=sys.stderr)
        return 2 if refused else 1


def _is_config_error(error: Exception) -> bool:
    module = sys.modules.get(
        "lightning_memkit.plugins.cli.config_errors"
    )  # absent where its import has failed
    return module is not None and isinstance(error, module.ConfigError)


def _short(error: Exception) -> str:
    """What happened; and where, unless memkit says of itself what is wrong and what to do."""
    name = type(error).__name__
    place = traceback.extract_tb(error.__traceback__)[-1]
    package = Path(__file__).parent
    if type(error).__module__.partition(".")[0] == package.name:
        return f"memkit: error: {name}: {error}"
    if isinstance(error, (ValueError, TypeError, FileNotFoundError)) and Path(place.filename).is_relative_to(
        package
    ):
        return f"memkit: error: {error}"
    return (
        f"memkit: error: {name}: {error}\n"
        f"  in {place.name}, {place.filename}:{place.lineno}; --debug prints the traceback"
    )


def _consolidate(words: list[str]) -> int:
    parser = SentenceParser(
        prog="memkit consolidate",
        description="Turn a checkpoint, a file or the folder that several ranks wrote, into one file that plain "
        "Lightning loads. Of PureBF16Precision's, weights are the float32 values that were trained (exact for split, "
        "about 16 bits for kahan) and optimizer states float32. Loops, schedulers, callbacks and hyperparameters are "
        "kept. What is read is read with weights_only=True.",
    )
    parser.add_argument(
        "source",
        metavar="IN.ckpt",
        help="what Trainer.save_checkpoint or ModelCheckpoint wrote: a file or a folder",
    )
    parser.add_argument("target", nargs="?", metavar="OUT.ckpt", help="the same as --output")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the file to write; it appears whole or not at all. *.safetensors: the weights alone, in that format",
    )
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="leave out optimizer states, loops, schedulers and callbacks",
    )
    parser.add_argument(
        "--keep-dtypes",
        action="store_true",
        help="bfloat16 stays bfloat16, to be resumed by PureBF16Precision",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.example = "IN.ckpt OUT.ckpt"
    options = parser.parse_args(words)
    if (options.target is None) == (options.output is None):
        parser.error("name the file to write, once: OUT.ckpt or --output FILE")

    from lightning_memkit.optim.consolidated_files import consolidate_file

    try:
        target = consolidate_file(
            options.source,
            options.target or options.output,
            overwrite=options.overwrite,
            weights_only=options.weights_only,
            keep_dtypes=options.keep_dtypes,
        )
    except (OSError, ValueError) as error:
        if os.environ.get("MEMKIT_DEBUG"):
            traceback.print_exc()
        print(f"memkit: error: {str(error).replace('overwrite=True', '--overwrite')}", file=sys.stderr)
        return 1
    print(f"{target}: {target.stat().st_size:,} bytes")
    return 0


def _doctor(words: list[str]) -> int:
    parser = SentenceParser(prog="memkit doctor", description=COMMANDS["doctor"])
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(words)

    from lightning_memkit.plugins.cli.doctor import diagnose, summary

    diagnosis = diagnose()
    if options.json:
        import json

        print(json.dumps(diagnosis.as_dict(), indent=2))
        return 0

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, rows in summary(diagnosis).items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))  # Text: brackets are no markup here
        console.print(table)
        console.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
