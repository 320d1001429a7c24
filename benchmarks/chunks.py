"""Modules in chunks: exactness, peak and time, against the unchunked step, full checkpointing and GradCache.

Exactness: two towers under losses over the batch, 20 AdamW steps, chunks of 1, 3 and 10 rows. Contrastive: both
towers of CLIP (transformers) on 1,024 pairs in fp32, in chunks of 64. Long row: a Llama of four blocks on one row of
32,768 tokens in fp32, under full activation checkpointing with `linear_cross_entropy`, with and without its token-wise
modules in chunks of 512. Peaks are the live bytes of a step, weights and gradients included, counted operator by
operator. GradCache (Gao et al. 2021, `pip install --no-deps gradcache`) takes the same towers, chunks and batch. One
CPU thread.
"""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.__main__ import main_of
from benchmarks._chunk_models import LOSSES, ClipTowers, LongRow, clip_batch, clip_loss, trained
from benchmarks.harness import Options, Ratio, Report, one_thread, paired_ratio, self_ratio_is_void
from lightning_memkit import checkpoint_chunks
from lightning_memkit.memory.meter import ByteMeter

CHUNKS = (1, 3, 10)
ROWS, CHUNK_ROWS = 1024, 64
TOKENS, CHUNK_TOKENS = 32_768, 512

Figures = dict[str, float | int | bool]
Rows = list[dict[str, object]]


def run(options: Options) -> Report:
    """Exactness, then the contrastive step, then the long row; an hour, `--quick` a few minutes at a small size."""
    figures: Figures = {}
    rows: Rows = []
    with one_thread():
        _exactness(figures, rows, options.seed)
        same = _contrastive(figures, rows, options)
        _long_row(figures, rows, options)
    notes = () if _grad_cache() else ("GradCache is not installed: pip install --no-deps gradcache.",)
    return Report("chunks", figures, rows, void=self_ratio_is_void(same), notes=notes)


def _exactness(figures: Figures, rows: Rows, seed: int) -> None:
    for dtype, name in ((torch.float64, "max_weight_diff_fp64"), (torch.float32, "max_weight_diff")):
        worst = 0.0
        for label, loss in LOSSES.items():
            plain = trained(loss, None, dtype, seed)
            off = max(float((trained(loss, chunk, dtype, seed) - plain).abs().max()) for chunk in CHUNKS)
            rows.append({"what": f"{label}, {dtype}".replace("torch.", ""), "max_weight_diff": off})
            worst = max(worst, off)
        figures[name] = worst


def _contrastive(figures: Figures, rows: Rows, options: Options) -> Ratio:
    """Peaks and times of both towers of CLIP; returns the ratio of the chunked step to itself."""
    number, chunk = (256, 16) if options.quick else (ROWS, CHUNK_ROWS)
    ids, images = clip_batch(number, options.seed)

    def made() -> ClipTowers:
        return ClipTowers(64, 2 if options.quick else 4, options.seed)

    plain, chunked, cached = made(), made(), made()
    for part in (chunked.text, chunked.vision):
        checkpoint_chunks(part, rows=chunk)

    def step_of(net: ClipTowers) -> Callable[[], object]:
        return lambda: clip_loss(net.text(ids), net.vision(images)).backward()

    steps = {"plain": (plain, step_of(plain)), "chunks": (chunked, step_of(chunked))}
    grad_cache = _grad_cache()
    if grad_cache is not None:
        cache = grad_cache(models=[cached.text, cached.vision], chunk_sizes=chunk, loss_fn=clip_loss)
        steps["GradCache"] = (cached, lambda: cache(ids, images))
    peaks = {name: _peak(net, step, (ids, images)) for name, (net, step) in steps.items()}
    figures["contrastive_peak_fraction"] = peaks["chunks"] / peaks["plain"]
    times = {"chunks over plain": _time("chunks", "plain", steps, options.seed)}
    if grad_cache is not None:
        figures["gradcache_peak_ratio"] = peaks["chunks"] / peaks["GradCache"]
        figures["gradcache_gradient_diff"] = _largest_difference(chunked, cached)
        times["chunks over GradCache"] = _time("chunks", "GradCache", steps, options.seed)
        figures["gradcache_time_ratio"] = times["chunks over GradCache"].median
    same = times["chunks over themselves"] = _time("chunks", "chunks", steps, options.seed)
    figures["contrastive_time_ratio"] = times["chunks over plain"].median
    figures["contrastive_time_high"] = times["chunks over plain"].high
    rows += [{"what": f"CLIP, {number} pairs, {name}", "peak_bytes": peak} for name, peak in peaks.items()]
    rows += [ratio.row(f"CLIP, {number} pairs, {name}") for name, ratio in times.items()]
    return same


def _time(
    ours: str,
    peer: str,
    steps: dict[str, tuple[ClipTowers, Callable[[], object]]],
    seed: int,
) -> Ratio:
    def zeroed(name: str) -> Callable[[], object]:
        net, step = steps[name]

        def run_one() -> None:
            net.zero_grad()
            step()

        return run_one

    return paired_ratio(zeroed(ours), zeroed(peer), seed=seed, warm_up=1)


def _peak(net: nn.Module, step: Callable[[], object], inputs: tuple[torch.Tensor, ...]) -> int:
    """Live bytes of the second step: the first one also asks modules whether rows are independent."""
    step()
    net.zero_grad()
    with ByteMeter() as meter:
        meter.track([*net.parameters(), *net.buffers(), *inputs])
        step()
    return meter.peak_bytes


def _largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Of the gradients, relative to the largest."""
    pairs = [(a.grad, b.grad) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    off = max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)
    return off / max(float(b.abs().max()) for _, b in pairs if b is not None)


def _long_row(figures: Figures, rows: Rows, options: Options) -> None:
    tokens, layers, pairs = (2048, 2, 100) if options.quick else (TOKENS, 4, 3)
    chunk = 64 if options.quick else CHUNK_TOKENS
    full, chunked = (LongRow(tokens, size, layers, options.seed) for size in (None, chunk))
    for row in (full, chunked):
        row.step(min(tokens, 4 * chunk))  # modules are asked once, on few tokens as well
    peaks = [_peak(row.net, row.step, (row.ids,)) for row in (full, chunked)]
    figures["long_row_peak_fraction"] = peaks[1] / peaks[0]
    for row in (full, chunked):
        row.net.zero_grad()
    time = paired_ratio(chunked.step, full.step, pairs=pairs, seed=options.seed, warm_up=1)
    figures["long_row_time_ratio"], figures["long_row_time_high"] = time.median, time.high
    what = f"Llama, a row of {tokens} tokens"
    rows += [
        {"what": f"{what}, {name}", "peak_bytes": peak}
        for name, peak in zip(("full checkpointing", "and chunks"), peaks, strict=True)
    ]
    rows.append(time.row(f"{what}, chunks over none"))


def _grad_cache() -> Any:
    """GradCache's class, where its package is installed; its modules import each other by another name."""
    spec = importlib.util.find_spec("gradcache")
    if spec is None or spec.loader is None:
        return None
    if "gradcache" not in sys.modules:
        package = importlib.util.module_from_spec(spec)
        sys.modules["gradcache"] = sys.modules["grad_cache"] = package
        spec.loader.exec_module(package)
    from gradcache.grad_cache import GradCache  # pyright: ignore[reportMissingImports]

    return GradCache


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
