"""Steps on two gloo ranks that share the rows of a batch: the script that each rank runs, and who starts it.

Before each optimizer step the gradient is compared with the one of the joined batch, by one process; else with the
mean of the two ranks' gradients, by DistributedDataParallel without memkit, which is what a sum over rows trains on.
"""

import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from benchmarks._exactness_generator import cases_of
from benchmarks._exactness_models import EPOCHS, PARTS, Case, loader_of, rows_of
from benchmarks._exactness_runs import is_ours
from benchmarks._fault_runs import quiet
from benchmarks._watched_ranks import watched
from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching import split_batch
from tests.plugins.ranks import leave

SIZES = (1, 3)
JOINED, AVERAGED, WARNED, REFUSED, DIFFERENT = "joined", "averaged", "warned", "refused", "different"
OUTCOMES = (JOINED, AVERAGED, WARNED, REFUSED, DIFFERENT)
_WARNING = "as if it were clamped for all rows"  # what memkit says of the one documented inexactness
_MOST_STARTS = 12
_SAME, _SAME_IN_FLOAT32 = 1e-9, 1e-5  # of the gradient's norm
_SHOWN = 300  # characters of an error


@dataclass(frozen=True, kw_only=True)
class Found:
    """What became of a step at a size.

    Attributes:
        name: of the step.
        size: of its micro-batches; 0 for the run without memkit, which shows that two ranks can run it.
        outcome: JOINED: each gradient is the joined batch's; AVERAGED: some are DistributedDataParallel's; WARNED:
            some are neither, of which memkit has warned; REFUSED; DIFFERENT. Empty for a step that is not judged: it
            fails or hangs without memkit, too.
        why: what differs.
    """

    name: str
    size: int
    outcome: str = ""
    why: str = ""


def judged_on_ranks(seed: int, wanted: Sequence[str]) -> list[Found]:
    """Train these steps in float64 on two ranks; a hang is a difference.

    Args:
        seed: of the drawn steps, of data and weights.
        wanted: names of steps. Others than those of truth "parts" that have one backward a batch are passed over.
    """
    names = [case.name for case in cases_of(seed) if case.name in wanted and _is_judged(case)]
    places = [(name, size) for name in names for size in (0, *SIZES)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results"
        path.touch()
        for _ in range(_MOST_STARTS):
            found = _read(path)
            if len(found) >= len(places):
                break
            given = {"seed": seed, "places": places[len(found) :], "path": str(path)}
            hung = watched("benchmarks._exactness_ranks", json.dumps(given), path)
            if len(_read(path)) < len(places):
                _end_badly(path, places, "the ranks hung" if hung else "a rank ended without a word")
        found = _read(path)
    untried = places[len(found) :]
    found += [
        Found(name=name, size=size, outcome=DIFFERENT, why="never come to") for name, size in untried if size
    ]
    return [one for one in found if one.outcome]


def figures_on_ranks(found: Sequence[Found]) -> dict[str, int]:
    """How many steps, by size, became what."""
    outcomes = Counter(one.outcome for one in found)
    return {"ranks_cells": len(found), **{f"ranks_{outcome}": outcomes[outcome] for outcome in OUTCOMES}}


def _end_badly(path: Path, places: Sequence[tuple[str, int]], why: str) -> None:
    """Note what the ranks did not come to the end of; without memkit, its sizes are not judged."""
    name, size = places[len(_read(path))]
    sizes = [size] if size else [0, *SIZES]
    for one in sizes:
        _append(path, Found(name=name, size=one, outcome=DIFFERENT if size else "", why=why))


def _is_judged(case: Case) -> bool:
    options = {"accumulate_grad_batches", "devices", "strategy"}
    return case.truth == PARTS and "float64" in case.dtypes and not options & set(case.trainer)


def _append(path: Path, found: Found) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(found)) + "\n")


def _read(path: Path) -> list[Found]:
    return [Found(**json.loads(line)) for line in path.read_text().splitlines()]


# Within a rank


class _Halves(Dataset[Any]):
    """The halves of a case's batches that a rank has."""

    def __init__(self, case: Case, seed: int, rank: int) -> None:
        self._batches, self._rank = list(loader_of(case, seed)), rank

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return _halves(self._batches[index])[self._rank]


def _halves(batch: Any) -> list[Any]:
    rows = rows_of(batch)
    return split_batch(batch, [rows // 2, rows - rows // 2])


class Compared(Callback):
    """Compares the gradient of each optimizer step with both oracles.

    Args:
        case: the step.
        seed: of its batches.

    Attributes:
        batches: those of an epoch, whole.
        averaged: the steps whose gradient is the ranks' mean, and not the joined batch's.
        different: in words, the first whose gradient is neither.
        untold: a step has no gradient that could be compared: it draws random numbers, or needs its Trainer.
    """

    def __init__(self, case: Case, seed: int) -> None:
        self.averaged, self.different, self.untold = 0, "", False
        self._case, self.batches = case, list(loader_of(case, seed))
        self._oracle, self._index = case.module().double(), 0
        vars(self._oracle)["log"] = vars(self._oracle)["log_dict"] = lambda *args, **options: None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The place of the batch."""
        self._index = batch_idx

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Before gradients are clipped."""
        if self.untold or self.different:
            return
        ours = torch.cat([_filled(p, p.grad) for p in pl_module.parameters() if p.requires_grad])
        self._oracle.load_state_dict(pl_module.state_dict())
        self._oracle.trainer = trainer  # a step may ask how many there were
        batch = self.batches[self._index]
        try:
            joined, again = self._gradient(batch), self._gradient(batch)
            averaged = torch.stack([self._gradient(half) for half in _halves(batch)]).mean(0)
        except Exception:
            self.untold = True
            return
        if not torch.equal(joined.nan_to_num(), again.nan_to_num()):
            self.untold = True
            return
        misses = [self._miss(ours, oracle) for oracle in (joined, averaged)]
        if misses[0] <= 1:
            return
        self.averaged += misses[1] <= 1
        if misses[1] > 1:
            tolerance = self._tolerance
            self.different = (
                f"the gradient of batch {self._index} misses the joined batch's by {misses[0] * tolerance:.1e} and "
                f"the ranks' mean by {misses[1] * tolerance:.1e}"
            )

    @property
    def _tolerance(self) -> float:
        return _SAME_IN_FLOAT32 if self._case.float32_loss else _SAME

    def _gradient(self, batch: Any) -> Tensor:
        trained = [p for p in self._oracle.parameters() if p.requires_grad]
        widened = tree_map(_widened, batch)
        output = self._oracle.training_step(widened, self._index)
        loss: Any = output["loss"] if isinstance(output, dict) else output
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        return torch.cat([_filled(p, g) for p, g in zip(trained, found, strict=True)])

    def _miss(self, ours: Tensor, oracle: Tensor) -> float:
        """Above 1 for another gradient."""
        if not torch.equal(ours.isfinite(), oracle.isfinite()):
            return float("inf")
        ours, oracle = ours.nan_to_num(), oracle.nan_to_num()
        return float((ours - oracle).norm() / (self._tolerance * oracle.norm()).clamp(min=1e-13))


def _filled(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    return (torch.zeros_like(parameter) if gradient is None else gradient).detach().flatten()


def _widened(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(torch.float64 if value.is_floating_point() else value.dtype, copy=True)


def main(seed: int, places: Sequence[tuple[str, int]], path: Path) -> None:
    """Train each step at each size; rank 0 writes a line for each."""
    quiet()
    rank, cases = int(os.environ["RANK"]), {case.name: case for case in cases_of(seed)}
    failed = set[str]()  # without memkit
    for name, size in places:
        found = Found(name=name, size=size)
        if name not in failed:
            compared = Compared(cases[name], seed)
            with warnings.catch_warnings(record=True) as caught:
                warnings.filterwarnings("always", f".*{_WARNING}")
                error = _train(cases[name], seed, rank, compared, size)
            warned = any(_WARNING in str(one.message) for one in caught)
            told = (error, compared.averaged, compared.different, compared.untold, warned)
            found = outcome_of(found, _gathered(told))
            if not size and found.why:
                failed.add(name)
        if rank == 0:
            _append(path, found)
    leave()


def _train(case: Case, seed: int, rank: int, compared: Compared, size: int) -> tuple[str, bool] | None:
    """What ended the training, if anything did, and whether it is memkit's refusal."""
    torch.manual_seed(seed)
    module = case.module()
    torch.manual_seed(seed + 1)
    budget = [MemoryBudget("1GiB", micro_batch_size=size, within="step")] if size else []
    options: dict[str, Any] = dict(case.trainer)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true", use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        max_epochs=EPOCHS, precision="64-true", callbacks=[*budget, *case.callbacks(), compared], **options,
    )  # fmt: skip
    try:
        trainer.fit(module, DataLoader(_Halves(case, seed, rank), batch_size=None))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:_SHOWN], is_ours(error)
    return None


def outcome_of(found: Found, ranks: Sequence[tuple[tuple[str, bool] | None, int, str, bool, bool]]) -> Found:
    """One outcome for both ranks."""
    errors = [error for error, *_ in ranks]
    given = {"name": found.name, "size": found.size}
    if not found.size:
        return Found(**given, why=next((error[0] for error in errors if error), ""))
    if any(errors):
        refused = all(error is not None and error[1] for error in errors)
        return Found(**given, outcome=REFUSED if refused else DIFFERENT, why=str(errors))
    if any(untold for *_, untold, _ in ranks):
        return Found(**given)
    different = next((why for _, _, why, *_ in ranks if why), "")
    if different:
        warned = any(warned for *_, warned in ranks)
        return Found(**given, outcome=WARNED if warned else DIFFERENT, why="" if warned else different)
    return Found(**given, outcome=AVERAGED if any(averaged for _, averaged, *_ in ranks) else JOINED)


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    _given = json.loads(sys.argv[1])
    main(_given["seed"], _given["places"], Path(_given["path"]))
