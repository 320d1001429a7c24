"""Attention over packed documents: time, saved and peak bytes, and error, for every backend that runs here.

Causal attention with 8 heads of 64 features in float32, forward and backward, one thread: 8 documents in rows of
2048 tokens, and 32 in 8192. The peers are SDPA with a dense mask, and what most code does without packing: documents
padded to the longest, SDPA, and the padding taken away. Errors are against every document alone in float64.

Times are ratios to the loop's. `speedup_vs_dense` and `speedup_vs_padded` are the loop's in the shape where they are
smaller, `_low` the lower end of that interval; bytes are the larger shape's. `max_error` is the largest of all our
backends and shapes, over the largest value of the truth.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from benchmarks.__main__ import main_of
from benchmarks._gpu_device import Peak
from benchmarks._gpu_rows import GpuRow
from benchmarks.harness import (
    LONG_STEP_SECONDS,
    MINIMUM_PAIRS,
    Options,
    Ratio,
    Report,
    paired_ratio,
    self_ratio_is_void,
)
from lightning_memkit.attention import flex, packed_attention
from lightning_memkit.attention.choice import refusal
from lightning_memkit.attention.documents import Documents
from lightning_memkit.memory.meter import ByteMeter

HEADS, FEATURES = 8, 64
BACKENDS = ("loop", "dense_mask", "flash_attn", "varlen", "flex")
LONG_PAIRS = 5  # of steps that take a dense mask seconds

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Documents in one row."""

    documents: int
    tokens: int

    @property
    def name(self) -> str:
        """For the table and the figures."""
        return f"{self.documents} in {self.tokens}"

    def bounds(self, seed: int) -> Tensor:
        """`cu_seqlens` of documents of uneven lengths, the longest some three times the shortest."""
        shares = np.random.default_rng(seed).uniform(0.5, 1.5, self.documents)
        ends = np.round(np.cumsum(shares) / shares.sum() * self.tokens)
        return torch.tensor([0, *ends.astype(int).tolist()], dtype=torch.int32)


SHAPES = (Shape(8, 2048), Shape(32, 8192))


def run(options: Options) -> Report:
    """Every backend that runs on the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="backend='dense_mask' makes a mask")
            return measured(options, torch.device("cpu"), torch.float32)
    finally:
        torch.set_num_threads(threads)


def gpu_rows(options: Options) -> list[GpuRow]:
    """Every backend, and padding, in bfloat16 on a GPU."""
    from benchmarks._gpu_attention import rows_of_attention

    return rows_of_attention(options)


def measured(options: Options, device: torch.device, dtype: torch.dtype) -> Report:
    """The table and the figures of one device."""
    shapes = SHAPES[:1] if options.quick else SHAPES
    found = [result for shape in shapes for result in of_shape(shape, device, dtype, options.seed)]
    inputs, bounds = (
        tensors(SHAPES[0], device, dtype, options.seed),
        SHAPES[0].bounds(options.seed).to(device),
    )
    step = one_step(inputs, methods_for(inputs, bounds)["loop"])
    itself = paired_ratio(step, step, seed=options.seed)
    figures: dict[str, float | int | bool] = {}
    for method, name in (("dense_mask", "dense"), ("padded", "padded")):
        slowest = min(
            (r.ratio for r in found if r.method == method and r.ratio), key=lambda ratio: ratio.median
        )
        figures |= {f"speedup_vs_{name}": slowest.median, f"speedup_vs_{name}_low": slowest.low}
    for result in found:
        if result.shape == shapes[-1] and result.method in ("loop", "dense_mask", "padded"):
            figures |= {f"{result.method}_{what}": count for what, count in result.memory.items()}
    figures |= flex_mask_bytes(device, options.seed)
    figures["max_error"] = max(e for r in found if r.method != "padded" for e in r.errors.values())
    figures["tokens"] = shapes[-1].tokens
    return Report(
        name="attention",
        figures=figures,
        rows=[*(result.row() for result in found), itself.row(f"loop, {SHAPES[0].name}: against itself")],
        void=self_ratio_is_void(itself),
        notes=(
            f"{HEADS} heads of {FEATURES} features, {dtype}, causal, forward and backward; ratio: to the loop's time",
            "saved_bytes: what the forward keeps for the backward beside query, key and value; peak_bytes: of forward "
            "and backward, beside query, key and value",
            *(f"{name} did not run: {reason}" for name, reason in refused(inputs, bounds)),
        ),
    )


def flex_mask_bytes(device: torch.device, seed: int) -> dict[str, float | int | bool]:
    """What FlexAttention's mask of 65,536 tokens holds, the most of several packings and windows, by the meter."""
    query, most = torch.empty(1, 1, 65_536, 1, device=device), 0
    for documents, window in product((1, 2, 8, 128), (None, 4096)):
        bounds = Shape(documents, 65_536).bounds(seed).to(device)
        with ByteMeter() as meter:
            mask = flex._block_mask(Documents(cu_seqlens=bounds, window=window), query)
            most = max(most, meter.live_bytes)
            del mask
    return {"flex_mask_bytes_64k": most}


@dataclass(frozen=True)
class Result:
    """What one method gave in one shape; the ratio is its time over the loop's."""

    method: str
    shape: Shape
    ratio: Ratio | None
    memory: dict[str, int]
    errors: dict[str, float]

    def row(self) -> dict[str, object]:
        """The table's line."""
        times = {} if self.ratio is None else self.ratio.row("")
        errors = {key: f"{value:.1e}" for key, value in self.errors.items()}
        return {**times, "what": f"{self.method}, {self.shape.name}", **self.memory, **errors}


def of_shape(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> Iterator[Result]:
    """Every method that runs, in one shape."""
    inputs, bounds = tensors(shape, device, dtype, seed), shape.bounds(seed).to(device)
    methods = methods_for(inputs, bounds)
    truth = results(inputs, partial(alone, bounds=bounds.tolist()), torch.float64)
    for method, attend in methods.items():
        ratio = None if method == "loop" else compared(inputs, attend, methods["loop"], seed)
        errors = relative_errors(results(inputs, attend, dtype), truth)
        yield Result(method, shape, ratio, byte_counts(inputs, attend), errors)


def tensors(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    """Query, key and value [1, heads, tokens, features], as a projection lays them out."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(3, 1, shape.tokens, HEADS, FEATURES, generator=generator)
    return tuple(x.to(device, dtype).transpose(1, 2) for x in made)


def methods_for(inputs: tuple[Tensor, ...], bounds: Tensor) -> dict[str, Attend]:
    """Our backends that run on these tensors, and padding."""
    not_here = dict(refused(inputs, bounds))
    longest = int(bounds.diff().max())
    ours: dict[str, Attend] = {
        name: partial(packed_attention, cu_seqlens=bounds, max_seqlen=longest, backend=name)  # pyright: ignore[reportArgumentType]
        for name in BACKENDS
        if name not in not_here
    }
    return {**ours, "padded": partial(padded, bounds=bounds)}


def refused(inputs: tuple[Tensor, ...], bounds: Tensor) -> list[tuple[str, str]]:
    """The backends that don't run on these tensors, with the reason."""
    reasons = ((name, refusal(name, inputs[0], inputs[2], Documents(cu_seqlens=bounds))) for name in BACKENDS)
    return [(name, str(reason)) for name, reason in reasons if reason is not None]


def padded(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    """Documents as rows of a padded batch, causal SDPA, and back; the peer that needs no mask."""
    lengths = bounds.diff().tolist()
    q, k, v = (
        pad_sequence(list(x[0].transpose(0, 1).split(lengths)), batch_first=True).transpose(1, 2)
        for x in (query, key, value)
    )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)]).transpose(0, 1)[None]


def alone(query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
    """Every document by itself, by the formula: the truth, in the inputs' precision."""
    outputs = []
    for begin, end in pairwise(bounds):
        q, k, v = (x[:, :, begin:end] for x in (query, key, value))
        later = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2) * FEATURES**-0.5).masked_fill(later, -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, 2)


def results(inputs: tuple[Tensor, ...], attend: Attend, dtype: torch.dtype) -> dict[str, Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    query, key, value = leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = attend(query, key, value)
    out.backward(weights_of(out))
    return {"out_error": out.detach(), **{f"{n}_error": x.grad for n, x in zip("qkv", leaves, strict=True)}}  # pyright: ignore[reportReturnType]


def weights_of(out: Tensor) -> Tensor:
    """A gradient that differs from value to value."""
    return (
        torch.cos(torch.arange(out.numel(), device=out.device, dtype=torch.float64))
        .view(out.shape)
        .to(out.dtype)
    )


def relative_errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """The largest distance from the truth, over the truth's largest value."""
    return {
        name: float((found[name].double() - truth[name]).abs().max() / truth[name].abs().max())
        for name in truth
    }


def byte_counts(inputs: tuple[Tensor, ...], attend: Attend) -> dict[str, int]:
    """What the forward saves beside its inputs, and the peak of forward and backward beside inputs and gradients."""
    query, key, value = leaves = [x.detach().requires_grad_() for x in inputs]
    own = {x.untyped_storage()._cdata for x in leaves}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    # A compiled backend would run uncompiled under a `ByteMeter`: on a GPU the allocator is asked.
    with Peak(query.device) as peak:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = attend(query, key, value)
        out.backward(weights_of(out))
    return {"saved_bytes": sum(kept.values()), "peak_bytes": peak.allocated_bytes}


def one_step(inputs: tuple[Tensor, ...], attend: Attend) -> Callable[[], Any]:
    """Forward and backward."""
    query, key, value = leaves = [x.detach().requires_grad_() for x in inputs]
    weights = weights_of(query)

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        attend(query, key, value).backward(weights)

    return step


def compared(inputs: tuple[Tensor, ...], ours: Attend, peer: Attend, seed: int) -> Ratio:
    """Time of a step of ours over the peer's."""
    steps = one_step(inputs, ours), one_step(inputs, peer)
    begin = time.perf_counter()
    steps[0]()
    pairs = LONG_PAIRS if time.perf_counter() - begin > 2 * LONG_STEP_SECONDS else MINIMUM_PAIRS
    return paired_ratio(*steps, pairs=pairs, seed=seed, warm_up=1)


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
