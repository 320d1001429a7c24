"""Activations on a GPU, offloaded or computed again: how far a step's peak falls, and what its time becomes.

A decoder of a billion parameters in bfloat16 with causal flash attention. Each way to treat activations is timed in
pairs against the same model that keeps them all. A step is zero_grad, forward and backward; an optimizer's step would
bring every ratio nearer to 1. `host_ms` is the time until the host has launched a step on an idle device: where it
nears the step's, the device waits. `same_bits` is asked with FlashAttention under deterministic algorithms, whose
backward then adds in one order: by atomics no two runs of plain training agree.
"""

import copy
import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._gpu_device import Peak, host_seconds
from benchmarks._gpu_rows import GpuRow, Values, at_most, needs_cuda
from benchmarks._gpu_size import DecoderSize as Size
from benchmarks._gpu_size import GpuSize
from benchmarks.harness import Options, Report, paired_ratio, self_ratio_is_void
from lightning_memkit import checkpoint_modules
from lightning_memkit.activations.offload import offload_activations
from lightning_memkit.activations.offload_choice import measure_copy_rates

SETTLING_STEPS = 4  # "auto" has chosen after three
POLICIES = ("none", "full", "every:2", "selective", "budget:0.5", "auto", "compile:0.5")
AUTO_LEFT = 0.6  # of what is kept beside weights and gradients, the size of "auto" leaves room for so much
COMPILE_SECONDS = 30  # that Inductor takes longer: a block, with torch's bound and without
FULL_TIME = 1.4  # a forward more is a third
AUTO_TIME = 1.05  # "auto" is to cost no more than the cheaper of recomputation and offload, of all blocks

Way = Callable[[nn.Module, int], object]
WAYS: dict[str, Way] = {
    "offload": lambda model, least: offload_activations(model, min_bytes=least),
    "offload_auto": lambda model, least: offload_activations(model, min_bytes=least, choose="auto"),
    "checkpoint": lambda model, _: checkpoint_modules(model),
    "checkpoint_and_offload": lambda model, least: (
        checkpoint_modules(model),
        offload_activations(model, min_bytes=least),
    ),
}


class Layer(nn.Module):
    """A decoder layer: causal attention and a gated MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 6 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states of shape (rows, length, width) to the same."""
        heads = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        )
        gate, value = self.up(self.second(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Kept:
    """The model that keeps all activations, its batch, and what it gives: what every way is compared with."""

    def __init__(self, device: torch.device, size: Size, seed: int) -> None:
        torch.manual_seed(seed)
        self.device, self.size = device, size
        with torch.device("cuda" if device.type == "cuda" else "cpu"):  # a billion values take the host long
            layers = nn.Sequential(*(Layer(size) for _ in range(size.depth)))
        self.model = layers.bfloat16().to(device)
        self.x = torch.randn(size.rows, size.length, size.width).bfloat16().to(device)
        self.step = partial(_step, self.model, self.x)
        self.step()
        self.peak_bytes = _peak_bytes(self.step, device, self.model)
        self.gradients = _gradients(self.model, self.x)

    def auto(self) -> str:
        """A policy that bounds the whole step, AdamW's states included, below what is kept here."""
        weights = sum(p.nbytes for p in self.model.parameters())
        return f"auto:{4 * weights + int(AUTO_LEFT * (self.peak_bytes - 2 * weights))}"

    def treated(self, begin: Way) -> tuple[Callable[[], None], Values]:
        """The step of a copy that is treated in a way, and its peak's fraction of this one's."""
        model = copy.deepcopy(self.model)
        begin(model, self.size.min_bytes)
        step = partial(_step, model, self.x)
        for _ in range(SETTLING_STEPS):
            step()
        self.model.zero_grad()
        peak_bytes = _peak_bytes(step, self.device, model)
        return step, {
            "peak_fraction": peak_bytes / self.peak_bytes,
            "same_bits": all(map(torch.equal, _gradients(model, self.x), self.gradients)),
        }


def rows_of_activations(options: Options) -> list[GpuRow]:
    """Policies of activation checkpointing, then ways to offload."""
    size = GpuSize.of(options)
    rows = []
    for policy in POLICIES:
        if options.quick and policy.startswith("compile:"):
            continue
        limits = {"gpu_full_time_ratio": at_most(FULL_TIME)} if policy == "full" else {}
        run = partial(of_policy, policy, options)
        seconds = size.needs(7) + COMPILE_SECONDS * policy.startswith("compile:")
        rows.append(GpuRow(what=policy, needs_seconds=seconds, run=run, limits=size.limits(limits)))
    for way, begin in WAYS.items():
        if way == "checkpoint":  # the policy "full"
            continue
        limits = {"gpu_offload_auto_time_over_best": at_most(AUTO_TIME)} if way == "offload_auto" else {}
        run = partial(of_way, way, begin, options)
        seconds = size.needs(17 if way == "offload_auto" else 9)  # it is timed beside two others
        rows.append(GpuRow(what=way, needs_seconds=seconds, run=run, limits=size.limits(limits)))
    return rows


def of_policy(policy: str, options: Options) -> Values:
    """A policy of activation checkpointing: peak, time, and the host's time to launch a step."""
    size = GpuSize.of(options)
    kept = Kept(torch.device(options.device), size.decoder, options.seed)
    slug = policy.replace(":", "_").replace(".", "_")
    if policy == "none":
        ratio = size.ratio(kept.step, kept.step, options)
        found: Values = {
            "self_ratio": ratio.median,
            "gpu_none_peak_bytes": kept.peak_bytes,
            "gpu_none_step_ms": ratio.ours_ms,
        }
        return {**found, "gpu_none_host_ms": 1000 * host_seconds(kept.step, kept.device)}
    asked = kept.auto() if policy == "auto" else policy
    step, found = kept.treated(lambda model, _: checkpoint_modules(model, asked))
    if policy.startswith(
        "compile:"
    ):  # its bits are those of compiled blocks, in which no cast is between kernels
        del found["same_bits"]
    ratio = size.ratio(step, kept.step, options)
    found |= {
        "time_ratio": ratio.median,
        "time_ratio_high": ratio.high,
        "step_ms": ratio.ours_ms,
        "host_ms": 1000 * host_seconds(step, kept.device),
    }
    return {f"gpu_{slug}_{name}": value for name, value in found.items()}


def of_way(way: str, begin: Way, options: Options) -> Values:
    """A way to offload: peak and time, and the rates of copies that it rests on."""
    device, size = torch.device(options.device), GpuSize.of(options)
    needs_cuda(device)
    kept = Kept(device, size.decoder, options.seed)
    step, found = kept.treated(begin)
    ratio = size.ratio(step, kept.step, options)
    found |= {"time_ratio": ratio.median, "time_ratio_high": ratio.high}
    if way == "offload_auto":
        del step
        gc.collect()
        found["time_over_best"] = ratio.median / min(
            size.ratio(kept.treated(WAYS[other])[0], kept.step, options).median
            for other in ("offload", "checkpoint")
        )
    values: Values = {f"gpu_{way}_{name}": value for name, value in found.items()}
    return values | (copy_rates(device) if way == "offload" else {})


def copy_rates(device: torch.device) -> Values:
    """Of pinned memory, as the choice of "auto" measures them."""
    rates = measure_copy_rates(device)
    return {
        "gpu_copy_to_host_gigabytes_per_second": rates.to_host / 1e9,
        "gpu_copy_to_device_gigabytes_per_second": rates.to_device / 1e9,
    }


def measure(device: torch.device, size: Size, options: Options) -> Report:
    """Every way on one model, on any device whose allocator keeps a peak."""
    kept = Kept(device, size, options.seed)
    same = paired_ratio(kept.step, kept.step, seed=options.seed)
    figures: dict[str, Any] = copy_rates(device)
    rows = [same.row("all kept, against itself") | {"peak_mib": kept.peak_bytes >> 20, "peak_fraction": 1.0}]
    for way, begin in WAYS.items():
        step, found = kept.treated(begin)
        ratio = paired_ratio(step, kept.step, seed=options.seed)
        rows.append(ratio.row(way) | found)
        figures |= {f"gpu_{way}_{name}": value for name, value in found.items()}
        figures |= {f"gpu_{way}_time_ratio": ratio.median, f"gpu_{way}_time_ratio_high": ratio.high}
        del step
        gc.collect()
    return Report("activations", figures, rows, void=self_ratio_is_void(same))


def _step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(x).float().square().mean().backward()


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of one step, by deterministic kernels."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    # Not with `warn_only`, with which FlashAttention's backward goes on adding by atomics. cuBLAS is deterministic on
    # one stream, whatever its workspaces; torch asks for them to be configured, and reads it at the first product in
    # this mode. Their size was read at the very first one, and stays.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            _step(model, x)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _peak_bytes(step: Callable[[], object], device: torch.device, model: nn.Module) -> int:
    """The peak of a step with its model's weights: as if nothing else were on the device."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    with Peak(device) as peak:
        step()
    return peak.allocated_bytes + sum(p.nbytes for p in model.parameters())
