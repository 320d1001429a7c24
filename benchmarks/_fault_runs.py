"""One training run with a fault in it: what it ends with, and whether that is bitwise what it should be."""

import copy
import copyreg
import gc
import logging
import random
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch._dynamo
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from benchmarks._fault_cases import BATCH, CHANGING, IN_CHUNKS, PART, extras, loader_for, model_named
from benchmarks._fault_state import captured, differences, relative_difference
from lightning_memkit import MemoryBudget, NoEffectWarning
from lightning_memkit.micro_batching.proof.probe import Weighing
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.shares.batch_numbers import BatchCount
from lightning_memkit.testing import Faults, count_allocations, sweep
from tests.plugins.fake_accelerator import FakeAccelerator
from tests.testing.fake_device import FakeDevice, fake_device

Kind = Literal["operators", "allocator"]
# Methods of `Weighing` that compare rows: before a batch, and after one whose loss was not as proven.
_COMPARISONS = ("settle", "again")
_LOOKS = 6
# Of an optimizer step: the rows of a micro-batch, and the rows and tokens of a chunk.
Partition = tuple[tuple[int, int, int | None, int | None], ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cell of the table.

    Attributes:
        model: a name of `_fault_cases.MODELS`, `CHANGING` or `IN_CHUNKS`, or `exact`.
        optimizer: a name of `_fault_cases.OPTIMIZERS`.
        step: the optimizer step that the faults are in: 0 is cold.
        kind: operators' outputs on the CPU, or the fake device's allocator.
        naive: zero_grad and the same batch again, in the place of MemoryBudget.
        dtype: of the weights.
        steps_after: how many the run takes after the one with the fault.
    """

    model: str
    optimizer: str
    step: int = 0
    kind: Kind = "operators"
    naive: bool = False
    dtype: torch.dtype = torch.float32
    steps_after: int = 1


@dataclass(frozen=True, kw_only=True)
class End:
    """What a run ended with.

    Attributes:
        state: by name, values that can be compared; tensors are clones on the host.
        partition: from which step on parts had which size.
        live_bytes: alive at the end of the step with the fault, of what was allocated since it began.
    """

    state: dict[str, Any]
    partition: Partition
    live_bytes: int


@dataclass(kw_only=True)
class Tally:
    """What came of a case's points."""

    points: int = 0
    equal: int = 0
    failures: list[str] = field(default_factory=list)
    total_points: int = 0
    largest_difference: float = 0.0

    @property
    def equal_fraction(self) -> float:
        """Of the points that were run; 1 where there were none."""
        return self.equal / self.points if self.points else 1.0

    def fail(self, point: int, operator: str, why: str) -> None:
        """Count a point that is not equal."""
        self.failures.append(f"{point} {operator}: {why}")


class Proofs:
    """What a case's comparisons of rows have shown, by the batches and sizes before them, for its other runs.

    No fault is in a comparison: where it changes nothing but what is known of the loss, each run would do the same
    for most of its time. Runs of what a step changes besides gradients compare anew.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], Any]] = {}

    def given_to(self, weighing: Weighing) -> None:
        """Let a run's comparisons find what runs before it have shown."""
        path, stock = list[tuple[Any, ...]](), {name: getattr(weighing, name) for name in _COMPARISONS}

        def remembered(name: str) -> Callable[[Any, Trials, int], None]:
            def compare(step: Any, trials: Trials, micro_batch_size: int) -> None:
                what_for = str(weighing.rules), str(sorted(map(str, weighing.head)))
                path.append((name, step.trainer.global_step, micro_batch_size, *what_for))
                if tuple(path) not in self._known:
                    stock[name](step, trials, micro_batch_size)
                    trials.values, trials.returned, trials.logged = {}, {}, []
                    if weighing.state is not None:
                        return
                    shown = {name: value for name, value in vars(weighing).items() if name not in stock}
                    self._known[tuple(path)] = copy.deepcopy(shown), trials.changing
                # Also in the run that has compared: all hold as many bytes.
                shown, trials.changing = self._known[tuple(path)]
                vars(weighing).update(copy.deepcopy(shown))

            return compare

        vars(weighing).update({name: remembered(name) for name in stock})


class ArmedBudget(MemoryBudget):
    """Arms the faults once its own trials are over; in a run without, takes the partition it is given."""

    def __init__(
        self,
        faults: Faults | None,
        step: int,
        partition: Partition,
        model: str = "",
        proofs: Proofs | None = None,
    ) -> None:
        size = BATCH if model in CHANGING else IN_CHUNKS.get(model, PART)
        super().__init__("1GiB", micro_batch_size=size)
        self.faults, self.armed_step, self.proofs = faults, step, proofs
        self.given = {entry[0]: entry for entry in partition}
        self.in_chunks = model in IN_CHUNKS

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """With what other runs have shown of the loss."""
        super().setup(trainer, pl_module, stage)
        if self.proofs is not None and self._engine is not None:
            self.proofs.given_to(self._engine.choice.weighing)

    def prepare(self, step: Any) -> None:
        """Trials, then the faults; modules run in chunks as after a micro-batch of one row that did not fit."""
        super().prepare(step)
        now, engine = step.trainer.global_step, self._engine
        if engine is not None:
            partition = engine.runner.partition
            if self.in_chunks and not partition.in_chunks and (failure := engine.choice.dry(step, "")):
                raise failure
            if now in self.given:
                _, size, rows, tokens = self.given[now]
                partition.resize(size)
                partition.run_in_chunks(rows, tokens)
        if self.faults is not None and now == self.armed_step:
            self.faults.arm()


class NaiveRetry(Callback):
    """What users write: zero_grad, and the batch again."""

    def __init__(self, faults: Faults | None, step: int) -> None:
        self.faults, self.armed_step = faults, step

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Arm, and catch what the step raises."""
        if self.faults is not None and trainer.global_step == self.armed_step:
            self.faults.arm()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Override the module's own hook, where users put it."""
        stock = pl_module.optimizer_step

        def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            try:
                stock(epoch, batch_idx, optimizer, optimizer_closure)
                return
            except torch.OutOfMemoryError:
                pass
            optimizer.zero_grad()
            stock(epoch, batch_idx, optimizer, optimizer_closure)

        pl_module.optimizer_step = optimizer_step


class StepEnd(Callback):
    """Disarms the faults when the step has ended, and notes the bytes then."""

    def __init__(self, faults: Faults | None, step: int, device: FakeDevice | None) -> None:
        self.faults, self.armed_step, self.device = faults, step, device
        self.live_bytes = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Once, after the step with the fault."""
        if self.faults is None or trainer.global_step != self.armed_step + 1:
            return
        self.faults.disarm()
        if self.device is not None:
            self.device.synchronize()
        self.live_bytes = _settled(self.faults)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Float32 gradients of bfloat16 weights can't follow a module from the device "fake" to the host."""
        pl_module.zero_grad(set_to_none=True)


def _settled(faults: Faults) -> int:
    """The bytes alive; among ranks once cycles and gloo's threads have let go of what the last collectives held."""
    least = faults.live_bytes
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        gc.collect()
        for _ in range(_LOOKS):
            time.sleep(0.005)
            least = min(least, faults.live_bytes)
    return least


def train(
    case: Case, faults: Faults | None, device: FakeDevice | None = None, partition: Partition = (),
    *, rank: int = 0, strategy: Any = None, proofs: Proofs | None = None,
) -> End:  # fmt: skip
    """A whole run from the seed; the faults are on within one step of it.

    Args:
        case: what to train.
        faults: armed within the case's step; None for a run without.
        device: where it trains; None for the CPU.
        partition: the sizes of parts to take from given steps on.
        rank: whose data.
        strategy: makes Lightning's, for two ranks; None for one device.
        proofs: what other runs of the case have shown of its loss.
    """
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    module = model_named(case.model, case.optimizer).to(case.dtype)
    loader = loader_for(case.model, rank)
    callbacks, plugins = extras(case.model, case.optimizer)
    budget = ArmedBudget(faults, case.step, partition, case.model, proofs)
    end = StepEnd(faults, case.step, device)
    callbacks += [NaiveRetry(faults, case.step) if case.naive else budget, end]
    trainer = Trainer(
        max_steps=case.step + 1 + case.steps_after, callbacks=callbacks, plugins=plugins or None,
        gradient_clip_val=0.5, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **place(device, strategy),
    )  # fmt: skip
    trainer.fit(module, loader)
    changes = () if case.naive else budget.history
    history = tuple(
        (one.global_step, one.micro_batch_size, one.chunk_rows, one.chunk_tokens) for one in changes
    )
    return End(state=captured(trainer, module, loader), partition=history, live_bytes=end.live_bytes)


def place(device: FakeDevice | None, strategy: Any) -> dict[str, Any]:
    """The Trainer's arguments for the device."""
    if strategy is not None:
        return {"accelerator": "cpu", "devices": 2, "strategy": strategy()}
    if device is None:
        return {"accelerator": "cpu", "devices": 1}
    return {
        "devices": 1,
        "strategy": SingleDeviceStrategy(device.torch_device, accelerator=FakeAccelerator()),
    }


def quiet() -> None:
    """One thread, no compiler and no word of Lightning's in a process that trains thousands of times.

    What is there by now is never garbage: a collection of cycles looks at what the runs make, and the modules of
    torch and Lightning cost ten times as much.
    """
    gc.collect()
    gc.freeze()
    torch.set_num_threads(1)
    # bitsandbytes compiles what it steps on the device "fake", for minutes.
    torch._dynamo.config.disable = True
    # `Proofs` copies thousands of these at a time; a reducer that returns a string says that no copy is needed.
    copyreg.pickle(BatchCount, lambda count: "BatchCount")
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", NoEffectWarning)  # a case must be what its name says
    logging.disable(logging.WARNING)


class References:
    """Fault-free runs of a case, one for each partition that a faulty run came to use."""

    def __init__(self, case: Case, device: FakeDevice | None, **where: Any) -> None:
        self._case, self._device, self._where = case, device, where
        self._known: dict[Partition, End] = {}

    def __getitem__(self, partition: Partition) -> End:
        if partition not in self._known:
            gc.collect()
            with count_allocations(on=self._device, armed=False) as faults:
                end = train(self._case, faults, self._device, partition, **self._where)
            if end.partition != partition:
                raise RuntimeError(f"A run was to take the partition {partition} and took {end.partition}.")
            self._known[partition] = end
        return self._known[partition]


def run_case(case: Case, points: int | None, seed: int = 0) -> Tally:
    """Sweep a case's points, or a sample of so many."""
    tally = Tally()
    # What is alive now stays: a collection then looks at little more than a run's own objects.
    gc.collect()
    gc.freeze()
    with fake_device() if case.kind == "allocator" else nullcontext() as device:
        proofs = Proofs()
        references = References(case, device, proofs=proofs)
        outcomes = sweep(
            lambda faults: train(case, faults, device, proofs=proofs),
            on=device, armed=False, points=lambda count: chosen_points(count, points, seed),
        )  # fmt: skip
        for outcome in outcomes:
            tally.points, tally.total_points = tally.points + 1, outcome.points
            operator = outcome.fault.operator if outcome.fault else "not reached"
            why = reasons(outcome, references)
            if (
                case.naive and outcome.result is not None
            ):  # neither logs nor bytes are held against the control
                why = ", ".join(differences(outcome.result.state, outcome.expected.state, skip=("logged",)))
            if case.dtype == torch.float64 and outcome.result is not None:
                difference = relative_difference(outcome.result.state, outcome.expected.state)
                tally.largest_difference = max(tally.largest_difference, difference)
            if why:
                tally.fail(outcome.point, operator, why)
            else:
                tally.equal += 1
    return tally


def reasons(outcome: Any, references: References, *, peer: bool = False) -> str:
    """Why an outcome is not what it should be, empty where it is; a `peer` has no fault itself."""
    if outcome.error is not None:
        return f"{type(outcome.error).__name__}: {str(outcome.error)[:160]}"
    if outcome.fault is None and not peer:
        return "the fault was not reached"
    reference = references[outcome.result.partition]
    wrong = differences(outcome.result.state, reference.state)
    if outcome.result.live_bytes != reference.live_bytes:
        wrong.append(f"live bytes {outcome.result.live_bytes - reference.live_bytes:+}")
    if outcome.leaked_bytes:
        wrong.append(f"leaked bytes {outcome.leaked_bytes:+}")
    return ", ".join(wrong)


def chosen_points(count: int, wanted: int | None, seed: int) -> Sequence[int]:
    """All points, or that many of them: one at random out of each of as many equal stretches."""
    if wanted is None or wanted >= count:
        return range(count)
    rng = random.Random(seed)
    return [int((stretch + rng.random()) * count / wanted) for stretch in range(wanted)]


def added(tallies: Iterable[Tally]) -> Tally:
    """The sum of several."""
    whole = Tally()
    for tally in tallies:
        whole.points += tally.points
        whole.equal += tally.equal
        whole.failures += tally.failures
    return whole
