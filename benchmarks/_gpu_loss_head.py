"""Rows of the loss head on a GPU: peak, time and error beside float32 logits and cross-entropy, in bfloat16.

Peaks are above the inputs, gradients included.
"""

import gc
import re
from dataclasses import replace
from functools import partial

import torch

from benchmarks._gpu_device import Peak
from benchmarks._gpu_rows import GpuRow, Values, at_most
from benchmarks._gpu_size import GpuSize
from benchmarks.harness import Options
from benchmarks.loss_head import Case, Loss, _errors, _step, ours, peers, plain

ERROR_TOKENS = 2048
PEAK_FRACTION, ERROR_OVER_PLAIN = 0.5, 1.05


def rows_of_losses(options: Options) -> list[GpuRow]:
    """Ours for each vocabulary with its errors, then plain itself, and what else is installed for the largest."""
    size = GpuSize.of(options)
    cases = [
        Case(vocabulary=vocabulary, features=size.loss_features, tokens=size.loss_tokens, dtype="bf16")
        for vocabulary in size.vocabularies
    ]
    rows = []
    for case in cases:
        words = case.vocabulary
        rows += [
            GpuRow(
                what=f"{case.name}, memkit",
                needs_seconds=size.needs(6),
                run=partial(of_loss, "memkit", ours, case, options),
                limits=size.limits({f"memkit_peak_fraction_{words}": at_most(PEAK_FRACTION)}),
            ),
            GpuRow(
                what=f"{case.name}, errors over plain's",
                needs_seconds=size.needs(5),
                run=partial(of_errors, case, options),
                limits=size.limits({f"error_over_plain_{words}": at_most(ERROR_OVER_PLAIN)}),
            ),
        ]
    run = partial(itself, cases[0], options)
    rows.append(GpuRow(what="plain against itself", needs_seconds=size.needs(5), run=run))
    for name, loss in peers():
        what, run = f"{cases[-1].name}, {name}", partial(of_loss, name, loss, cases[-1], options)
        seconds = size.needs(14 if name == "liger" else 6)  # its kernels are compiled first
        rows.append(GpuRow(what=what, needs_seconds=seconds, run=run))
    return rows


def of_loss(name: str, loss: Loss, case: Case, options: Options) -> Values:
    """Peak and time of a step, over plain's."""
    device = torch.device(options.device)
    given = case.make(options.seed, device)
    base, step = partial(_step, plain, given), partial(_step, loss, given)
    peaks = []
    for one in (base, step):
        one()  # loads kernels, and what libraries keep
        given[0].grad = given[1].grad = None
        gc.collect()
        with Peak(device) as peak:
            one()
        peaks.append(peak.allocated_bytes)
    ratio = GpuSize.of(options).ratio(step, base, options)
    slug, words = re.sub(r"[^a-z0-9]+", "_", f"{name} ".lower().lstrip("8 ")).strip("_"), case.vocabulary
    return {
        f"{slug}_peak_fraction_{words}": peaks[1] / peaks[0],
        f"{slug}_peak_bytes_{words}": peaks[1],
        f"{slug}_time_ratio_{words}": ratio.median,
        f"{slug}_time_ratio_high_{words}": ratio.high,
    }


def of_errors(case: Case, options: Options) -> Values:
    """The worst of our errors over plain's, both against float64."""
    small = replace(case, tokens=min(case.tokens, ERROR_TOKENS))
    first, scaled = _errors(small, [], options.seed, torch.device(options.device))
    return {
        f"error_over_plain_{case.vocabulary}": first,
        f"error_over_plain_scaled_{case.vocabulary}": scaled,
    }


def itself(case: Case, options: Options) -> Values:
    """Plain's step against itself: what the noise is."""
    base = partial(_step, plain, case.make(options.seed, torch.device(options.device)))
    ratio = GpuSize.of(options).ratio(base, base, options)
    return {"self_ratio": ratio.median, "plain_ms": ratio.ours_ms}
