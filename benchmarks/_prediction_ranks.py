"""Training on several real ranks, whose memory is measured, and the same training predicted from one process."""

import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from lightning_memkit import ActivationCheckpointing, PureBF16Precision
from lightning_memkit.distributed.sharding import Sharding
from lightning_memkit.plugins._sharded_prediction import ShardedStrategy
from lightning_memkit.plugins.prediction import predict_memory

# gloo's threads may be the last to let go of what was sent, and the profiler doesn't hear of it, which only adds: so
# ranks wait a little after a collective, and the least of several runs counts.
REPEATS, SETTLES_SECONDS = 2, 0.003
_TRAINING = "lightning_memkit: training starts"
_COLLECTIVES = (
    "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast",
    "all_reduce",
)  # fmt: skip
VOCABULARY, LENGTH, WIDTH, ROWS = 509, 32, 96, 4  # a prime: ranks' shares are uneven


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how.

    Args:
        model: transformer or mlp.
        ranks: how many.
        strategy: ddp, ddp views, ddp unused, zero1, stage 2, stage 3 or in configure_model.
        precision: float32 or kahan.
        policy: of activation checkpointing.
        optimizer: foreach or loop.
        extra: mixed, clipped or accumulated (two batches a step), or nothing.
    """

    model: str = "transformer"
    ranks: int = 2
    strategy: str = "stage 3"
    precision: str = "float32"
    policy: str = "none"
    optimizer: str = "foreach"
    extra: str = ""

    def __str__(self) -> str:
        return ", ".join(str(value) for value in asdict(self).values() if value != "")


class Block(nn.Module):
    """Attention and a feed-forward layer, before each a norm."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) to the same."""
        parts = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Trained(LightningModule):
    """A small model whose strategy may want its optimizer sharded, or its blocks in `configure_model`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        if case.model == "transformer":
            self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        else:
            wide = 3 * WIDTH
            layers = [
                nn.Sequential(nn.Linear(wide, 2 * wide), nn.ReLU(), nn.Linear(2 * wide, wide))
                for _ in range(5)
            ]
            ends = nn.Sequential(nn.Linear(WIDTH, wide)), nn.Sequential(nn.Linear(wide, WIDTH))
            self.blocks = nn.ModuleList([ends[0], *layers, ends[1]])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss of the labels."""
        x = self.embedding(batch["ids"])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        """AdamW as the case has it."""
        options: dict[str, Any] = {"lr": 1e-3, "foreach": self.case.optimizer == "foreach"}
        if self.case.strategy == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=AdamW, **options)
        return AdamW(self.parameters(), **options)


class Sharded(Trained):
    """The same, sharded by the user's own hand."""

    def configure_model(self) -> None:
        """Shard the blocks, the embedding and the head."""
        mesh: Any = self.device_mesh
        for module in (*self.blocks, self.embedding, self.head):
            if mesh is not None and not isinstance(next(module.parameters()), DTensor):
                fully_shard(module, mesh=mesh["data_parallel"])


class Batches:
    """So many batches, one after the other, as a loader would make them."""

    def __init__(self, number: int = 2) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for _ in range(self.number):
            yield batch()


def batch() -> dict[str, Tensor]:
    """Token ids and labels of one rank."""
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "labels": ids.clone()}


def build(case: Case) -> Trained:
    """The module of a case; what a user shards has its dtype before."""
    if case.strategy != "in configure_model":
        return Trained(case)
    module = Sharded(case)
    return module if case.precision == "float32" else module.bfloat16()


def options(case: Case, *, real: bool) -> dict[str, Any]:
    """The Trainer's arguments; for a prediction those that a user would write."""
    kinds: dict[str, Any] = {
        "ddp views": lambda: DDPStrategy(gradient_as_bucket_view=True),
        "ddp unused": lambda: "ddp_find_unused_parameters_true",
        "stage 2": lambda: Sharding(stage=2),
        "stage 3": lambda: "memkit_fsdp2",
        "in configure_model": lambda: ModelParallelStrategy(case.ranks, 1),
    }
    strategy = kinds.get(case.strategy, lambda: "ddp")()
    if real and case.strategy.startswith("stage"):
        strategy = ShardedStrategy(Sharding(stage=int(case.strategy[-1])))
    extras: dict[str, Any] = {
        "mixed": {"precision": "bf16-mixed"},
        "clipped": {"gradient_clip_val": 1.0},
        "accumulated": {"accumulate_grad_batches": 2},
    }
    found: dict[str, Any] = {"devices": case.ranks, "strategy": strategy, **extras.get(case.extra, {})}
    if case.precision != "float32":
        found["plugins"] = [PureBF16Precision()]
    if case.policy != "none":
        found["callbacks"] = [ActivationCheckpointing(case.policy)]
    return found


def predict(case: Case) -> int:
    """The predicted peak of the rank that holds the most."""
    torch.manual_seed(0)
    return predict_memory(build(case), batch(), trainer=options(case, real=False)).peak_bytes


def measure(case: Case) -> int:
    """What this rank's allocator handed out at most from training's start on, with what the module held from before.

    The set-up is left out: on this host each rank makes all weights before they are sharded.
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
    return _peak_bytes(trace) + sum(storage.nbytes() for key, storage in before.items() if key in after)


class _Start(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with torch.profiler.record_function(_TRAINING):
            pass


def _peak_bytes(trace: Any) -> int:
    """The most that was alive at once of what was allocated within, from training's start on.

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
            elif node.name == _TRAINING:
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
    return peak


def _storages(module: nn.Module) -> dict[int, torch.UntypedStorage]:
    """By identity, kept: another's memory may lie where one's was."""
    storages = [
        tensor.untyped_storage()
        for tensor in (*module.parameters(), *module.buffers())
        if not isinstance(tensor, DTensor)
    ]
    return {storage._cdata: storage for storage in storages}


def measured(cases: list[Case], *, timeout_s: float = 600) -> list[int]:
    """The most that any rank took in each case; all cases have as many ranks, and run in one launch of those."""
    ranks = {case.ranks for case in cases}
    if len(ranks) != 1:
        raise ValueError(f"cases have {sorted(ranks)} ranks; a launch has one number of them.")
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "cases.json")
        plan.write_text(json.dumps([asdict(case) for case in cases]))
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", f"--nproc-per-node={ranks.pop()}",
                   "--standalone", "-m", "benchmarks._prediction_ranks", str(plan)]  # fmt: skip
        done = subprocess.run(
            command, cwd=Path(__file__).parents[1], env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"The ranks ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found = [json.loads(path.read_text()) for path in Path(folder).glob("rank-*.json")]
    return [max(peaks) for peaks in zip(*found, strict=True)]


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
    peaks = [min(measure(case) for _ in range(REPEATS)) for case in cases]
    Path(plan).with_name(f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(peaks))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort a process that exits by the usual way


if __name__ == "__main__":
    main(*sys.argv[1:])
