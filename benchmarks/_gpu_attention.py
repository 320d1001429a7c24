"""Rows of attention over packed documents on a GPU, a backend each: time over the loop's, bytes, and error.

Causal attention with 8 heads of 64 features in bfloat16, forward and backward; errors are against every document alone
in float64, over the truth's largest value.
"""

import warnings
from functools import partial

import torch

from benchmarks._gpu_rows import GpuRow, SkipRow, Values, at_most
from benchmarks._gpu_size import GpuSize
from benchmarks.attention import (
    Shape,
    alone,
    byte_counts,
    flex_mask_bytes,
    methods_for,
    one_step,
    refused,
    relative_errors,
    results,
    tensors,
)
from benchmarks.harness import Options

NEEDS_SECONDS = {"flex": 20.0}  # flex is compiled for each shape
WORST_ERROR = 0.02  # five roundings of bfloat16


def rows_of_attention(options: Options) -> list[GpuRow]:
    """The fast backends first, the shapes one after the other."""
    size = GpuSize.of(options)
    rows = []
    for documents, tokens in size.attention:
        shape = Shape(documents, tokens)
        for method in ("varlen", "flash_attn", "loop", "padded", "dense_mask", "flex"):
            limits = {} if method == "padded" else {f"max_error_{method}_{tokens}": at_most(WORST_ERROR)}
            rows.append(
                GpuRow(
                    what=f"{method}, {shape.name}",
                    needs_seconds=size.needs(NEEDS_SECONDS.get(method, 5.0)),
                    run=partial(of_method, method, shape, options),
                    limits=size.limits(limits),
                )
            )
    rows.append(
        GpuRow(what="FlexAttention's mask of 65,536 tokens", needs_seconds=5, run=partial(of_mask, options))
    )
    return rows


def of_method(method: str, shape: Shape, options: Options) -> Values:
    """One backend in one shape; the loop against itself."""
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    inputs = tensors(shape, device, dtype, options.seed)
    bounds = shape.bounds(options.seed).to(device)
    reason = dict(refused(inputs, bounds)).get(method)
    if reason is not None:
        raise SkipRow(reason)
    methods = methods_for(inputs, bounds)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="backend='dense_mask' makes a mask")
        truth = results(inputs, partial(alone, bounds=bounds.tolist()), torch.float64)
        errors = relative_errors(results(inputs, methods[method], dtype), truth)
        ratio = GpuSize.of(options).ratio(
            one_step(inputs, methods[method]), one_step(inputs, methods["loop"]), options
        )
        counts = byte_counts(inputs, methods[method])
    name = f"{method}_{shape.tokens}"
    found: Values = {f"{what}_{name}": count for what, count in counts.items()}
    found |= {f"max_error_{name}": max(errors.values()), f"step_ms_{name}": ratio.ours_ms}
    if method != "loop":
        return found | {f"time_ratio_{name}": ratio.median, f"time_ratio_high_{name}": ratio.high}
    first = GpuSize.of(options).attention[0][1]
    return found | {"self_ratio" if shape.tokens == first else f"loop_again_{shape.tokens}": ratio.median}


def of_mask(options: Options) -> Values:
    """What FlexAttention's mask holds, the most of several packings and windows."""
    return {**flex_mask_bytes(torch.device(options.device), options.seed)}
