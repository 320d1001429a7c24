"""Training on several real ranks, whose memory is measured."""

import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks._prediction_ranks import Batches, Case, build, options

# The profiler hears the threads that run the training, and not those of gloo. What one of these is the last to hold
# seems to live on. At set-up DDP sends a flat copy of all weights, which on a busy host such a thread may let go of
# 1 ms after everybody else (so says a trace of malloc and free); it would count to the end. So ranks wait a little
# after a collective, everything is torn down within hearing, and a run that leaves more than this is measured again.
REPEATS, TRIES, SETTLES_SECONDS, UNHEARD_BYTES = 2, 20, 0.003, 1024
TRAINING = "lightning_memkit: training starts"
_COLLECTIVES = (
    "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast",
    "all_reduce",
)  # fmt: skip


def measure(case: Case) -> tuple[int, int]:
    """What this rank's allocator handed out at most from training's start on, with what the module held from before.

    The set-up is left out: on this host each rank makes all weights before they are sharded.

    Returns:
        The peak, and by how many bytes it may be too large: those of which nobody heard that they were freed.
    """
    torch.manual_seed(0)
    module = build(case)
    gc.collect()  # what an earlier trace saw made counts where it is freed
    before = _storages(module)
    found = options(case, real=True)
    trainer = Trainer(
        **{**found, "callbacks": [*found.get("callbacks", []), _Start()]},
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as trace:
        trainer.fit(module, Batches(2 * trainer.accumulate_grad_batches))  # pyright: ignore[reportArgumentType]
        after = _storages(module)
        held = sum(storage.nbytes() for key, storage in before.items() if key in after)
        del module, trainer, found, after
        gc.collect()
    peak, unheard = peak_bytes(trace)
    return peak + held, unheard


class _Start(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with torch.profiler.record_function(TRAINING):
            pass


def peak_bytes(trace: Any) -> tuple[int, int]:
    """The most that was alive at once of what was allocated within, from training's start on, and what is alive last.

    A copy that gloo makes may be freed by a thread of its own, of which the profiler hears nothing: such copies end
    with the collective.
    """
    allocation: Any = torch._C._profiler._EventType.Allocation  # pyright: ignore[reportAttributeAccessIssue]
    events: list[tuple[int, int, int, bool]] = []
    starts: list[int] = []

    def collect(nodes: list[Any], in_collective: bool) -> None:
        for node in nodes:
            if node.tag == allocation:
                fields = node.extra_fields
                events.append((node.start_time_ns, fields.ptr, fields.alloc_size, in_collective))
            elif node.name == TRAINING:
                starts.append(node.start_time_ns)
            collect(node.children, in_collective or node.name.startswith("c10d::"))

    collect(trace.profiler.kineto_results.experimental_event_tree(), False)
    live = peak = 0
    alive: dict[int, int] = {}
    for at, place, size, in_collective in sorted(events):
        if size > 0:
            if at >= starts[0]:
                peak = max(peak, live + size)
            if not in_collective:
                live += size
                alive[place] = size
        else:
            live -= alive.pop(place, 0)
    return peak, live


def _storages(module: nn.Module) -> dict[int, torch.UntypedStorage]:
    """By identity, kept: another's memory may lie where one's was."""
    storages = [
        tensor.untyped_storage()
        for tensor in (*module.parameters(), *module.buffers())
        if not isinstance(tensor, DTensor)
    ]
    return {storage._cdata: storage for storage in storages}


class Measured(NamedTuple):
    """The peak of the rank that took the most, in the run where that was the least, and where it was the most."""

    least: int
    most: int


def measured(cases: list[Case], *, timeout_s: float = 600) -> list[Measured]:
    """What ranks took in some runs of each case; all cases have as many ranks, and run in one launch of those."""
    ranks = {case.ranks for case in cases}
    if len(ranks) != 1:
        raise ValueError(f"cases have {sorted(ranks)} ranks; a launch has one number of them.")
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "cases.json")
        plan.write_text(json.dumps([asdict(case) for case in cases]))
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", f"--nproc-per-node={ranks.pop()}",
                   "--standalone", "-m", "benchmarks._measured_prediction_ranks", str(plan)]  # fmt: skip
        done = subprocess.run(
            command, cwd=Path(__file__).parents[1], env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"The ranks ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found = [json.loads(path.read_text()) for path in Path(folder).glob("rank-*.json")]
    peaks = [[max(ranks) for ranks in zip(*runs, strict=True)] for runs in zip(*found, strict=True)]
    return [Measured(min(runs), max(runs)) for runs in peaks]


def _heard(case: Case) -> int:
    """This rank's peak in a run of which all ranks heard everything."""
    for _ in range(TRIES):
        peak, unheard = measure(case)
        worst = torch.tensor(unheard)
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
        if worst <= UNHEARD_BYTES:
            return peak
    raise RuntimeError(
        f"{case}: in each of {TRIES} runs a thread of gloo freed more than {UNHEARD_BYTES} bytes, which the profiler "
        "doesn't hear; measure while less else runs."
    )


def _settled(collective: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        out = collective(*args, **kwargs)
        time.sleep(SETTLES_SECONDS)
        return out

    return run


def main(plan: str) -> None:
    """A rank's part of `measured`."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for name in _COLLECTIVES:
        if hasattr(torch.distributed, name):
            setattr(torch.distributed, name, _settled(getattr(torch.distributed, name)))
    cases = [Case(**fields) for fields in json.loads(Path(plan).read_text())]
    peaks = [[_heard(case) for _ in range(REPEATS)] for case in cases]
    Path(plan).with_name(f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(peaks))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort a process that exits by the usual way


if __name__ == "__main__":
    main(*sys.argv[1:])
