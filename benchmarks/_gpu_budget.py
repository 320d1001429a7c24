"""Rows of MemoryBudget on a GPU: the throughput of the size that it chooses, over the best of the exhaustive grid.

A budget is what a training with a known micro-batch takes, with the headroom. MemoryBudget chooses a size under it;
then every size up to the largest that fits trains for some steps, and the chosen one and the grid's best in turns
once more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks._budget_models import Attention, Model
from benchmarks._gpu_rows import GpuRow, Values, at_least
from benchmarks._gpu_size import GpuSize
from benchmarks._gpu_training import Repeated, timed_fit
from benchmarks.budget import HEADROOM, _all_sizes, _without_cache
from benchmarks.harness import Options
from lightning_memkit import MemoryBudget
from lightning_memkit.memory.units import format_bytes

FRACTION = 0.97
CHOOSING_STEPS, GRID_STEPS, TURNS, NEAR = 40, 8, 3, 1.1
ROOMY = 0.9  # of the device, for the training that tells what a micro-batch needs


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model of a scale, and the batch that it trains on."""

    name: str
    net: Callable[[int], nn.Module]
    batch: Callable[[int, int], dict[str, Tensor]]
    fits: float  # of the batch's samples, in the micro-batch that the budget has room for


def rows_of_budgets(options: Options) -> list[GpuRow]:
    """A model a row."""
    size = GpuSize.of(options)
    return [
        GpuRow(
            what=f"{model.name}, against the grid of micro-batches",
            needs_seconds=45,
            run=partial(throughput, model, options),
            limits=size.limits({f"throughput_fraction_{model.name}": at_least(FRACTION)}),
        )
        for model in MODELS[: size.budget_models]
    ]


def throughput(model: Trained, options: Options) -> Values:
    """The chosen size against the best of all that fit."""
    size = GpuSize.of(options)
    rows, fits = size.budget_rows, max(1, int(model.fits * size.budget_rows))
    run = partial(_fit, model, options)
    with _without_cache():
        roomy = _roomy(torch.device(options.device))
        first = MemoryBudget(roomy, micro_batch_size=fits)
        run(first, 2)
        budget_bytes = int(first.peak_bytes / (1 - HEADROOM) * 1.001)
        budget = MemoryBudget(budget_bytes, headroom=HEADROOM)
        run(budget, CHOOSING_STEPS)
        assert budget.sizing is not None
        chosen, largest = int(budget.state_dict()["micro_batch_size"]), budget.sizing.micro_batch_size
        grid = [one for one in _all_sizes(rows) if one <= largest]
        seconds = {one: run(MemoryBudget(roomy, micro_batch_size=one), GRID_STEPS) for one in {*grid, chosen}}
        fraction, best = _against_best(
            seconds, chosen, lambda one: MemoryBudget(roomy, micro_batch_size=one), run
        )
    return {
        f"throughput_fraction_{model.name}": fraction,
        f"chosen_{model.name}": chosen,
        f"best_{model.name}": best,
        f"largest_{model.name}": largest,
        f"spread_{model.name}": max(seconds.values()) / min(seconds.values()),
        f"probe_steps_{model.name}": len(budget.sizing.trials),
        f"retries_{model.name}": budget.retries,
        "budget": format_bytes(budget_bytes),
    }


def _against_best(
    seconds: dict[int, float],
    chosen: int,
    budget_of: Callable[[int], MemoryBudget],
    run: Callable[[MemoryBudget, int], float],
) -> tuple[float, int]:
    """The throughput of the chosen size over the best's, of those that are near it timed again in turns."""
    rivals = sorted(seconds, key=seconds.__getitem__)[:2]
    times: dict[int, list[float]] = {one: [seconds[one]] for one in {chosen, *rivals}}
    if seconds[chosen] <= NEAR * seconds[rivals[0]]:  # else the grid itself tells
        for _ in range(TURNS - 1):
            for one, found in times.items():
                found.append(run(budget_of(one), GRID_STEPS))
    typical = {one: median(found) for one, found in times.items()}
    best = min(typical, key=typical.__getitem__)
    return typical[best] / typical[chosen], best


def _fit(model: Trained, options: Options, budget: MemoryBudget, steps: int) -> float:
    """Seconds of a step of the effective batch."""
    size, device = GpuSize.of(options), torch.device(options.device)
    torch.manual_seed(options.seed)
    batch = model.batch(size.budget_scale, size.budget_rows)
    module = Model(model.net(size.budget_scale))
    return timed_fit(module, Repeated(batch, steps), device, steps=steps, callbacks=[budget]).step_seconds


def _roomy(device: torch.device) -> str | float:
    return ROOMY if device.type == "cuda" else "8GiB"


def _vocabulary(scale: int) -> nn.Module:
    width, words = 64 * scale, 2048 * scale
    middle = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return nn.Sequential(nn.Embedding(words, width), *middle, nn.Linear(width, words))


def _scores(scale: int) -> nn.Module:
    width = 64 * scale
    blocks = [Attention(width, 4) for _ in range(4)]
    return nn.Sequential(nn.Embedding(257, width), *blocks, nn.Linear(width, 257))


def _convolutions(scale: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 8 * scale), *[(8 * scale, 8 * scale)] * 5):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * scale, 10))


def _tokens(words: int, scale: int, rows: int) -> dict[str, Tensor]:
    ids = torch.randint(words, (rows, 128 * scale), generator=torch.Generator().manual_seed(0))
    return {"x": ids, "labels": ids.roll(-1, 1)}


def _pictures(scale: int, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    side = 24 * scale
    return {"x": torch.randn(rows, 3, side, side, generator=generator), "labels": torch.arange(rows) % 10}


def _words(scale: int, rows: int) -> dict[str, Tensor]:
    return _tokens(2048 * scale, scale, rows)


MODELS = (
    Trained(name="attention_scores", net=_scores, batch=partial(_tokens, 257), fits=0.5),
    Trained(name="large_vocabulary", net=_vocabulary, batch=_words, fits=0.7),
    Trained(name="convolutions", net=_convolutions, batch=_pictures, fits=1.0),
)
