"""Every model by every plugin: trained three steps, and its weights compared with plain float32 Lightning's.

A cell is passed if the weights are plain Lightning's, to the bit where the plugin promises it, else up to rounding (as
a share of how far the three steps move them); bfloat16 may be as far off as Lightning's own bf16-true, and a quarter
more. Where rounding flips a ReLU, float32 tells nothing: such a cell is compared again in float64, to 1e-9. It is
refused if memkit raised an error before the first step: the error's own line is the reason. All else has failed.
Plugins that offload run on a device without hardware whose memory isn't the host's, strategies that shard on two
ranks. litgpt's model takes part where litgpt is installed, unpacked. Quick runs take a seeded sample of 64 cells.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.__main__ import main_of
from benchmarks._matrix_cells import plain_weights
from benchmarks._matrix_columns import COLUMNS, ROUNDING, Column, cells
from benchmarks._matrix_models import Model, models
from benchmarks.harness import Options, Report, one_thread
from benchmarks.record import ROOT

SAMPLE = 64
PASSED, REFUSED, FAILED, NO_CELL = "yes", "no", "FAILED", "-"
_OFF, _ROUNDING_64 = "weights are off by", 1e-9
_OVER_PEER = 1.25  # stochastic rounding draws, and a mixture's routes flip
_SECONDS_A_CELL, _SECONDS_TO_START = 60, 120

Cell = tuple[str, str]


def run(options: Options) -> Report:
    """Train all cells, or a sample of them."""
    wanted = cells()
    if options.quick:
        wanted = sorted(random.Random(options.seed).sample(wanted, SAMPLE), key=wanted.index)
    with one_thread():  # of plain runs, too: with another number of threads, sums have another order
        return report_of(judged(wanted))


def judged(wanted: list[Cell]) -> dict[Cell, tuple[str, str]]:
    """What became of each cell: passed, refused or failed, and what was said."""
    columns = {column.name: column for column in COLUMNS}
    known = {model.name: model for model in models()}
    with tempfile.TemporaryDirectory(prefix="memkit-") as parent:
        truths = _Truths(known, Path(parent, "plain"))

        def verdicts(cells: list[Cell], precision: str = "") -> dict[Cell, tuple[str, str]]:
            outcomes: dict[Cell, dict[str, Any]] = {}
            for place in dict.fromkeys(column.place for column in COLUMNS):
                here = [cell for cell in cells if columns[cell[1]].place == place]
                folder = Path(parent, f"{place.replace(' ', '_')} {precision}")
                outcomes |= _run_in_own_process(place, here, folder, precision)
            return {
                cell: _verdict(outcomes.get(cell), columns[cell[1]], known[cell[0]], truths, precision)
                for cell in cells
            }

        found = verdicts(wanted)
        missed = [
            cell for cell, (verdict, text) in found.items()
            if verdict == FAILED and text.startswith(_OFF) and columns[cell[1]].most_update_error == ROUNDING
        ]  # fmt: skip
        return found | verdicts(missed, "64-true")


def report_of(verdicts: dict[Cell, tuple[str, str]]) -> Report:
    """A row a model, a column a plugin; what was said is numbered and told below."""
    said = list(dict.fromkeys(text for _, text in verdicts.values() if text))
    rows: list[dict[str, object]] = []
    for model in dict.fromkeys(cell[0] for cell in verdicts):
        row: dict[str, object] = {"model": model}
        for column in COLUMNS:
            verdict, text = verdicts.get((model, column.name), (NO_CELL, ""))
            row[column.name] = f"{verdict} {said.index(text) + 1}" if text else verdict
        rows.append(row)
    marks = [verdict for verdict, _ in verdicts.values()]
    figures: dict[str, float | int | bool] = {
        "cells": len(marks),
        "passed": marks.count(PASSED),
        "refused": marks.count(REFUSED),
        "failed": marks.count(FAILED),
    }
    notes = tuple(f"{number}: {text}" for number, text in enumerate(said, 1))
    return Report("matrix", figures, rows, notes=notes, failed=FAILED in marks)


class _Truths:
    """Plain Lightning's weights before and after, made once for a model and a way to compare."""

    def __init__(self, known: dict[str, Model], folder: Path) -> None:
        self._known, self._folder = known, folder
        self._made: dict[tuple[str, str], dict[str, Tensor]] = {}

    def before(self, name: str) -> dict[str, Tensor]:
        key = (name, "before")
        if key not in self._made:
            torch.manual_seed(0)
            parameters = self._known[name].module().named_parameters()
            self._made[key] = {one: parameter.detach().clone() for one, parameter in parameters}
        return self._made[key]

    def after(self, name: str, compared: Any, precision: str = "") -> dict[str, Tensor]:
        key = (name, compared + precision)
        if key not in self._made:
            found = plain_weights(self._known[name], compared, self._folder, precision)
            if "weights" not in found:
                raise RuntimeError(f"Plain Lightning can't train {name}: {found['traceback']}")
            self._made[key] = found["weights"]
        return self._made[key]


def _verdict(
    outcome: dict[str, Any] | None, column: Column, model: Model, truths: _Truths, precision: str
) -> tuple[str, str]:
    if outcome is None:
        return FAILED, "its process ended early"
    if "error" in outcome:
        refused = outcome["is_ours"] and outcome["kind"] not in (
            "AssertionError",
            "KeyError",
            "AttributeError",
        )
        return (REFUSED if refused else FAILED), f"{outcome['kind']}: {outcome['error']}"
    before, plain = truths.before(model.name), truths.after(model.name, column.compared_for(model), precision)
    error, most = update_error(outcome["weights"], plain, before), column.most_update_error
    if precision == "64-true":
        most = _ROUNDING_64
    if column.peer_precision:
        peer = truths.after(model.name, "whole", column.peer_precision)
        most = max(most, _OVER_PEER * update_error(peer, plain, before))
    if not error <= most:
        return FAILED, f"{_OFF} {error:.2g} of the update, not {most:.2g}"
    return PASSED, " ".join(outcome["warnings"])


def update_error(weights: dict[str, Tensor], plain: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """How far weights are from plain Lightning's, over how far these have moved; infinite where names differ."""
    if weights.keys() != plain.keys():
        return float("inf")
    off = _norm(weights[name] - plain[name] for name in plain)
    moved = _norm(plain[name] - before[name] for name in plain)
    return off / moved if moved else float("inf")


def _norm(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


def _run_in_own_process(
    place: str, wanted: list[Cell], folder: Path, precision: str
) -> dict[Cell, dict[str, Any]]:
    if not wanted:
        return {}
    folder.mkdir(parents=True)
    (folder / "cells.json").write_text(json.dumps(wanted), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    words = ["-m", "benchmarks._matrix_cells", place, str(folder / "cells.json"), str(folder), precision]
    command = [sys.executable, "-W", "ignore", *(launcher if place == "two ranks" else []), *words]
    seconds = _SECONDS_TO_START + _SECONDS_A_CELL * len(wanted)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
    found = {}
    for number, cell in enumerate(wanted):
        path = folder / f"{number}.pt"
        if path.exists():
            found[cell] = torch.load(path, weights_only=True)
    return found


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
