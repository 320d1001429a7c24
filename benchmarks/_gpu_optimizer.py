"""Rows of the optimizer's step on a GPU: the bandwidth that it reaches, and what it costs its host.

`bandwidth_fraction`: the bytes a parameter that have to move, over the step's time and a device copy's bandwidth.
`host_ms`: until the host has launched a step on an idle device; of the 201 parameters of 16 elements nothing but that
takes time.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from benchmarks._gpu_device import device_seconds, host_seconds, host_seconds_more
from benchmarks._gpu_offload import Kept
from benchmarks._gpu_rows import GpuRow, Values, at_most
from benchmarks._gpu_size import GpuSize
from benchmarks._host_steps import backward_and_step, in_place, on_mesh, one_rank
from benchmarks.harness import Options
from benchmarks.optimizer_step import (
    HOST_SHAPE,
    LEARNING_RATE,
    _bytes_per_parameter,
    _count,
    _fused_fp32,
    _memkit,
    _parameters,
)
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.fused import gpu
from lightning_memkit.optim.gradient_release import BUNDLE_BYTES, release_gradients

Build = Callable[[list[Parameter]], Any]
Place = Callable[[list[Parameter]], list[Parameter]]
HOST_MS, HOST_US_A_PARAMETER = 1.5, 5.0
HOST_TIMES = 100


def rows_of_steps(options: Options) -> list[GpuRow]:
    """The host's time first: it is what a GPU waits for."""
    size = GpuSize.of(options)
    host = size.limits(
        {"host_ms_201": at_most(HOST_MS), "host_us_per_parameter": at_most(HOST_US_A_PARAMETER)}
    )
    rows = [
        GpuRow(
            what="host's time of memkit kahan, compact",
            needs_seconds=12,
            run=partial(host_cost, options),
            limits=host,
        )
    ]
    for what, run, suffix, needs_seconds in (
        ("host's time of FSDP2's shards", shards_cost, "shards", 6),
        ("host's time of released gradients", release_cost, "release", 20),
    ):
        limits = size.limits(
            {
                f"host_ms_201_{suffix}": at_most(HOST_MS),
                f"host_us_per_parameter_{suffix}": at_most(HOST_US_A_PARAMETER),
            }
        )
        rows.append(GpuRow(what=what, needs_seconds=needs_seconds, run=partial(run, options), limits=limits))
    run = partial(released_step, options)
    rows.append(GpuRow(what="a decoder's step, gradients released", needs_seconds=size.needs(6), run=run))
    for name, (label, dtype, moved_bytes, build) in _candidates().items():
        limits = size.limits({f"gpu_ratio_{name}": at_most(1.0)} if name in ("kahan", "split") else {})
        run = partial(bandwidth, name, dtype, moved_bytes, build, options)
        rows.append(GpuRow(what=label, needs_seconds=size.needs(4), run=run, limits=limits))
    return rows


def host_cost(options: Options, suffix: str = "", place: Place = in_place) -> dict[str, Any]:
    """Steps that compute next to nothing, of so many parameters and of twice as many."""
    device, count = torch.device(options.device), GpuSize.of(options).host_parameters
    found: dict[str, list[float]] = {"ours": [], "torch": []}
    for many in (count, 2 * count):
        shapes = [HOST_SHAPE] * many
        ours = _memkit("kahan", "compact")(place(_parameters(shapes, torch.bfloat16, device, options.seed)))
        base = _fused_fp32(place(_parameters(shapes, torch.float32, device, options.seed)))
        for name, optimizer in (("ours", ours), ("torch", base)):
            optimizer.step()
            found[name].append(host_seconds(optimizer.step, device, HOST_TIMES))
    once, twice = found["ours"]
    return {
        f"host_ms_201{suffix}": 1000 * once,
        f"host_us_per_parameter{suffix}": 1e6 * (twice - once) / count,
        f"host_ratio_to_torch{suffix}": once / found["torch"][0],
        "parameters": f"{count} and {2 * count} of {HOST_SHAPE[0]} elements",
        **_plain_torch(),
    }


def shards_cost(options: Options) -> Values:
    """The same of DTensors, as FSDP2 has them."""
    with one_rank(torch.device(options.device).type) as mesh:
        return host_cost(options, "_shards", partial(on_mesh, mesh))


def release_cost(options: Options) -> Values:
    """What a step takes that goes along with its backward: a whole one's time, and what the backward takes longer."""
    device, count = torch.device(options.device), GpuSize.of(options).host_parameters
    plain = host_cost(options)

    def more(many: int, bundle_bytes: int | None) -> float:
        ours, kept = (
            backward_and_step(
                _parameters([HOST_SHAPE] * many, torch.bfloat16, device, options.seed), LEARNING_RATE, size
            )
            for size in (bundle_bytes, None)
        )
        return host_seconds_more(ours, kept, device, HOST_TIMES)

    once, twice = more(count, BUNDLE_BYTES), more(2 * count, BUNDLE_BYTES)
    return {
        "host_ms_201_release": plain["host_ms_201"] + 1000 * once,
        "host_us_per_parameter_release": plain["host_us_per_parameter"] + 1e6 * (twice - once) / count,
        "host_us_a_bucket_release": 1e6 * more(count, 0) / count,
        "parameters": f"{count} and {2 * count} of {HOST_SHAPE[0]} elements",
        **_plain_torch(),
    }


def released_step(options: Options) -> Values:
    """A decoder's step whose gradients are released, beside one that keeps them all.

    Stepping in buckets takes the host longer; where the device has to wait for it, the ratio shows it.
    """
    size, device = GpuSize.of(options), torch.device(options.device)
    kept = Kept(device, size.decoder, options.seed)
    steps = []
    for released in (True, False):
        model = copy.deepcopy(kept.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        compensate(optimizer)
        if released:
            release_gradients(optimizer)
        steps.append(partial(_step_of, model, kept.x, optimizer))
        steps[-1]()
    ours, base = steps
    ratio = size.ratio(ours, base, options)
    return {
        "gpu_release_time_ratio": ratio.median,
        "gpu_release_time_ratio_high": ratio.high,
        "gpu_release_host_ms": 1000 * host_seconds(ours, device),
        "gpu_release_host_ms_kept": 1000 * host_seconds(base, device),
        **_plain_torch(),
    }


def _step_of(model: nn.Module, x: Tensor, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()


def bandwidth(name: str, dtype: torch.dtype, moved_bytes: int, build: Build, options: Options) -> Values:
    """A step's time, beside torch's fused AdamW in float32 and beside a copy of as many bytes."""
    device, size = torch.device(options.device), GpuSize.of(options)
    shapes = decoder_shapes(layers=size.optimizer_layers, width=size.optimizer_width)
    count = _count(shapes)
    copied_bytes_per_second = 8 * count / _copy_seconds(count, device)
    optimizer = build(_parameters(shapes, dtype, device, options.seed))
    base = _fused_fp32(_parameters(shapes, torch.float32, device, options.seed))
    optimizer.step()
    ratio = size.ratio(optimizer.step, base.step, options)
    seconds = device_seconds(optimizer.step, device)
    figures: Values = {
        f"gpu_ratio_{name}": ratio.median,
        f"gpu_ratio_{name}_high": ratio.high,
        f"gpu_bandwidth_fraction_{name}": moved_bytes * count / seconds / copied_bytes_per_second,
        f"gpu_step_ms_{name}": 1000 * seconds,
        f"gpu_host_ms_{name}": 1000 * host_seconds(optimizer.step, device),
        f"gpu_bytes_per_param_{name}": _bytes_per_parameter(optimizer),
    }
    if name == "torch_fp32":
        figures["copy_gigabytes_per_second"] = copied_bytes_per_second / 1e9
        figures["gpu_parameters"] = count
        figures["self_ratio"] = ratio.median
        return figures
    return figures | (_plain_torch() if dtype is torch.bfloat16 and "torch" not in name else {})


def _candidates() -> dict[str, tuple[str, torch.dtype, int, Build]]:
    """Name of figures to label, weights' dtype, bytes that have to move a parameter, and constructor."""
    low = torch.bfloat16

    def fused(parameters: list[Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def sgd(parameters: list[Parameter]) -> Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)
        compensate(optimizer, mode="kahan")
        return optimizer

    return {
        "kahan": ("memkit kahan, compact", low, 18, _memkit("kahan", "compact")),
        "split": ("memkit split, compact", low, 18, _memkit("split", "compact")),
        "torch_fp32": ("torch AdamW fused, fp32, against itself", torch.float32, 28, fused),
        "stochastic": ("memkit stochastic, compact", low, 14, _memkit("stochastic", "compact")),
        "sgd": ("memkit kahan, SGD with momentum", low, 14, sgd),
        "torch_bf16": ("torch AdamW fused, bf16", low, 14, fused),
    }


def decoder_shapes(*, layers: int, width: int) -> list[tuple[int, ...]]:
    """A decoder's parameters, large and small: 22 layers of 2,048 are TinyLlama's 1.1 billion (arXiv:2401.02385)."""
    hidden = 11 * width // 4
    attention = [(width, width), (width // 8, width), (width // 8, width), (width, width)]
    layer = [*attention, (hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    words = 125 * width // 8
    return [(words, width), *layer * layers, (width,), (words, width)]


def _copy_seconds(count: int, device: torch.device) -> float:
    source = torch.zeros(count, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return device_seconds(lambda: target.copy_(source), device)


def _plain_torch() -> Values:
    """Why memkit's steps run without their kernel, if they do."""
    why = gpu.why_unavailable()
    return {} if why is None else {"in plain torch": why}
