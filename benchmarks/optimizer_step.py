"""Time and bytes of a compensated bfloat16 AdamW step beside torch's float32 fused AdamW and other optimizers.

Every row is a ratio to torch's fused AdamW on float32 weights; those of journaled steps are to the same step without
a journal. The gradients stay the same from step to step, and zero_grad is not timed. Two CPU threads where there are
two cores; what a step costs its host, and journaled steps, are of one.

What a step costs its host is measured on parameters of 16 elements, of which the arithmetic takes nothing:
`host_ms_201` for 201 of them, `host_us_per_parameter` for each of the next 201, `host_ratio_to_torch` for 201 over
torch's fused step; `_shards` are of DTensors, as FSDP2 has them, and `_release` of a step that goes along with its
backward, in buckets of 1 MiB, each of which takes `host_us_a_bucket_release`. `host_ms_noise` is a part of each: on a
CPU a step draws the noise that rounds its states, whatever it steps; on a GPU the kernel draws it.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from benchmarks.__main__ import main_of
from benchmarks._gpu_rows import GpuRow
from benchmarks._host_steps import backward_and_step, in_place, on_mesh, one_rank
from benchmarks.harness import (
    LONG_STEP_SECONDS,
    MINIMUM_PAIRS,
    Options,
    Report,
    keep_freed_memory,
    one_thread,
    paired_ratio,
    self_ratio_is_void,
    threads,
)
from lightning_memkit.memory.processors import allowed_processors
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.gradient_release import BUNDLE_BYTES, release_gradients
from lightning_memkit.optim.journal import journal_steps
from lightning_memkit.optim.stochastic_rounding import StochasticRounding

LEARNING_RATE = 1e-3
FULL_SHAPES = [(1024, 3072)] * 16 + [(3072,)] * 16  # 50.4 million parameters
QUICK_SHAPES = [(1024, 2048)] * 4 + [(2048,)] * 4  # 8.4 million
THREADS = 2
PAIRS_OF_LONG_STEPS = 15
JOURNALED_SHAPES = {  # 12.6 million each, some times what caches hold
    "layers": [(1024, 3072)] * 4,
    "embedding": [(4096, 3072)],
    "small": [(256, 256)] * 192,
}

FIGURES = {
    "memkit kahan, compact": "kahan",
    "memkit split, compact": "split",
    "memkit split, exact": "split_exact",
    "memkit split24, compact": "split24",
    "memkit split24, 8-bit": "8bit_states",
    "memkit split over bitsandbytes AdamW 8-bit": "8bit",
    "memkit split, compact, over Adafactor": "adafactor",
    "torch Adafactor, fp32": "adafactor_torch",
    "optimi AdamW, Kahan": "optimi",
}

HOST_PARAMETERS = 201  # of a Llama with 22 layers
HOST_SHAPE: tuple[int, ...] = (16,)

Build = Callable[[list[Parameter]], Any]


def run(options: Options) -> Report:
    """Time the step on the CPU, our modes and the peers that are installed, each against the base."""
    shapes = QUICK_SHAPES if options.quick else FULL_SHAPES
    figures: dict[str, float | int | bool] = {}
    cores = min(THREADS, allowed_processors())
    notes = [
        f"{_count(shapes) / 1e6:.1f} million parameters on {cores} threads; states of all rows exist before timing"
    ]
    rows: list[dict[str, object]] = []
    with threads(cores):
        base = _fused_fp32(_parameters(shapes, torch.float32, torch.device("cpu"), options.seed))
        same = paired_ratio(base.step, base.step, seed=options.seed)
        rows.append(same.row("torch AdamW fused, fp32, against itself") | _bytes(base))
        for label, dtype, build in _candidates(notes):
            parameters = _parameters(shapes, dtype, torch.device("cpu"), options.seed)
            optimizer = build(parameters)
            ratio = paired_ratio(optimizer.step, base.step, pairs=_pairs(optimizer), seed=options.seed)
            rows.append(ratio.row(label) | _bytes(optimizer))
            if label in FIGURES:
                figures |= {
                    f"cpu_ratio_{FIGURES[label]}": ratio.median,
                    f"cpu_ratio_{FIGURES[label]}_high": ratio.high,
                    f"bytes_per_param_{FIGURES[label]}": _bytes_per_parameter(optimizer),
                }
    figures["bytes_per_param_split24_8bit"] = figures.pop("bytes_per_param_8bit_states")
    released = _released_bytes(shapes, options)
    figures["bytes_per_param_split24_8bit_released"] = released
    rows.append({"what": "memkit split24, 8-bit, gradients released", "bytes_per_param": released})
    with one_thread():
        figures |= _host_times(options, rows)
        figures |= _journaled_steps(options, rows)
    figures["parameters"], figures["threads_of_ratios"] = _count(shapes), cores
    return Report("optimizer_step", figures, rows, void=self_ratio_is_void(same), notes=tuple(notes))


def _released_bytes(shapes: list[tuple[int, ...]], options: Options) -> float:
    """Bytes a parameter when a backward has ended that has stepped each of its parameters, and freed the gradient."""
    parameters = _parameters(shapes, torch.bfloat16, torch.device("cpu"), options.seed)
    optimizer = _memkit("split24", "8-bit")(parameters)
    release_gradients(optimizer)
    optimizer.zero_grad()
    torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
    return _bytes_per_parameter(optimizer)


def _host_times(options: Options, rows: list[dict[str, object]]) -> dict[str, float | int | bool]:
    """Time steps that compute next to nothing, of many parameters and of twice as many."""
    figures: dict[str, float | int | bool] = {}
    with one_rank("cpu") as mesh:
        for suffix, place in (("", in_place), ("_shards", partial(on_mesh, mesh))):
            found = []
            for count in (HOST_PARAMETERS, 2 * HOST_PARAMETERS):
                shapes, device = [HOST_SHAPE] * count, torch.device("cpu")
                base = _fused_fp32(place(_parameters(shapes, torch.float32, device, options.seed)))
                ours = _memkit("kahan", "compact")(
                    place(_parameters(shapes, torch.bfloat16, device, options.seed))
                )
                found.append(paired_ratio(ours.step, base.step, seed=options.seed))
                what = f"memkit kahan, compact, {count} {suffix[1:] or 'parameters'} of {HOST_SHAPE[0]}"
                rows.append(found[-1].row(what))
            once, twice = found
            figures |= {
                f"host_ms_201{suffix}": once.ours_ms,
                f"host_us_per_parameter{suffix}": 1000 * (twice.ours_ms - once.ours_ms) / HOST_PARAMETERS,
                f"host_ratio_to_torch{suffix}": once.median,
                f"host_ratio_to_torch{suffix}_high": once.high,
            }
    noise = StochasticRounding()

    def draw() -> None:
        noise.begin_step()
        noise.tile_int16()

    drawn = paired_ratio(draw, draw, seed=options.seed)
    rows.append(drawn.row("the noise of one step, drawn on the CPU, against itself"))
    figures["host_ms_noise"] = drawn.ours_ms
    extra = []
    for count in (HOST_PARAMETERS, 2 * HOST_PARAMETERS):
        ratio = paired_ratio(
            _released(count, options, BUNDLE_BYTES),
            _released(count, options, None),
            seed=options.seed,
        )
        rows.append(ratio.row(f"backward and step, released, {count} parameters of {HOST_SHAPE[0]}"))
        extra.append(ratio.ours_ms - ratio.peer_ms)
    figures["host_ms_201_release"] = figures["host_ms_201"] + extra[0]
    figures["host_us_per_parameter_release"] = (
        figures["host_us_per_parameter"] + 1000 * (extra[1] - extra[0]) / HOST_PARAMETERS
    )
    alone = paired_ratio(
        _released(HOST_PARAMETERS, options, 0), _released(HOST_PARAMETERS, options, None), seed=options.seed
    )
    rows.append(alone.row(f"backward and step, {HOST_PARAMETERS} parameters released one by one"))
    figures["host_us_a_bucket_release"] = 1000 * (alone.ours_ms - alone.peer_ms) / HOST_PARAMETERS
    return figures


def _released(count: int, options: Options, bundle_bytes: int | None) -> Callable[[], None]:
    parameters = _parameters([HOST_SHAPE] * count, torch.bfloat16, torch.device("cpu"), options.seed)
    return backward_and_step(parameters, LEARNING_RATE, bundle_bytes)


def _journaled_steps(options: Options, rows: list[dict[str, object]]) -> dict[str, float | int | bool]:
    """Time warm journaled steps against the optimizer's own, for parameters of several sizes."""
    keep_freed_memory()  # a plain step's temporaries would be page faults or not, by what else is on the heap
    figures: dict[str, float | int | bool] = {}
    for size, shapes in JOURNALED_SHAPES.items():
        for how in ("for-loop", "foreach"):
            plain, journaled = (
                torch.optim.AdamW(
                    _parameters(shapes, torch.float32, torch.device("cpu"), options.seed),
                    lr=LEARNING_RATE,
                    foreach=how == "foreach",
                )
                for _ in range(2)
            )
            journal_steps(journaled)
            ratio = paired_ratio(journaled.step, plain.step, seed=options.seed)
            rows.append(ratio.row(f"torch AdamW {how}, journaled, {size}") | _bytes(journaled))
            figures[f"journal_ratio_{how.replace('-', '_')}_{size}"] = ratio.median
            figures[f"journal_ratio_{how.replace('-', '_')}_{size}_high"] = ratio.high
    return figures


def gpu_rows(options: Options) -> list[GpuRow]:
    """The host's time, and the bandwidth that a step reaches on a GPU."""
    from benchmarks._gpu_optimizer import rows_of_steps

    return rows_of_steps(options)


def _candidates(notes: list[str]) -> Iterator[tuple[str, torch.dtype, Build]]:
    """Label, weights' dtype and constructor of everything that is timed against the base."""
    low = torch.bfloat16
    for mode, states in (
        ("kahan", "compact"),
        ("split", "compact"),
        ("split", "exact"),
        ("split24", "compact"),
        ("split24", "8-bit"),
    ):
        yield f"memkit {mode}, {states}", low, _memkit(mode, states)
    yield "memkit split, compact, over Adafactor", low, lambda p: _split(torch.optim.Adafactor(p))
    yield "torch Adafactor, fp32", torch.float32, torch.optim.Adafactor
    yield "torch AdamW fused, bf16", low, lambda p: torch.optim.AdamW(p, lr=LEARNING_RATE, fused=True)
    for label, build in (
        ("DeepSpeedCPUAdam, fp32", _deepspeed),
        ("memkit split over bitsandbytes AdamW 8-bit", lambda p: _split(_bitsandbytes(p, 8))),
        ("optimi AdamW, Kahan", _optimi),
        ("torchao AdamW, stochastic rounding", _torchao),
        ("bitsandbytes AdamW 32-bit", lambda p: _bitsandbytes(p, 32)),
        ("bitsandbytes AdamW 8-bit", lambda p: _bitsandbytes(p, 8)),
    ):
        try:
            build([Parameter(torch.zeros(64, 64, dtype=low))])
        except (ImportError, RuntimeError, OSError) as error:  # not installed, or it doesn't build here
            notes.append(f"{label} is left out: {error}")
        else:
            yield label, torch.float32 if label.endswith("fp32") else low, build


def _memkit(mode: Any, states: Any) -> Build:
    def build(parameters: list[Parameter]) -> Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
        compensate(optimizer, mode=mode, states=states)
        return optimizer

    return build


def _fused_fp32(parameters: list[Parameter]) -> Optimizer:
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    optimizer.step()
    return optimizer


def _split(optimizer: Optimizer) -> Optimizer:
    compensate(optimizer, mode="split")
    return optimizer


def _deepspeed(parameters: list[Parameter]) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, lr=LEARNING_RATE)


def _optimi(parameters: list[Parameter]) -> Any:
    from optimi import AdamW

    return AdamW(parameters, lr=LEARNING_RATE, kahan_sum=True)


def _torchao(parameters: list[Parameter]) -> Any:
    from torchao.optim import _AdamW

    return _AdamW(parameters, lr=LEARNING_RATE, bf16_stochastic_round=True)


def _bitsandbytes(parameters: list[Parameter], bits: int) -> Any:
    from bitsandbytes.optim import AdamW, AdamW8bit

    return (AdamW8bit if bits == 8 else AdamW)(parameters, lr=LEARNING_RATE)


def _parameters(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int
) -> list[Parameter]:
    generator = torch.Generator(device).manual_seed(seed)
    parameters = []
    for shape in shapes:
        parameter = Parameter(torch.randn(shape, generator=generator, device=device).to(dtype))
        parameter.grad = (1e-2 * torch.randn(shape, generator=generator, device=device)).to(dtype)
        parameters.append(parameter)
    return parameters


def _count(shapes: list[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _pairs(optimizer: Any) -> int:
    """Fewer pairs only where a step takes clearly over a second."""
    optimizer.step()
    start = time.perf_counter()
    optimizer.step()
    long = time.perf_counter() - start > 1.3 * LONG_STEP_SECONDS
    return PAIRS_OF_LONG_STEPS if long else MINIMUM_PAIRS


def _bytes(optimizer: Any) -> dict[str, object]:
    """The table's column of bytes."""
    return {"bytes_per_param": _bytes_per_parameter(optimizer)}


def _bytes_per_parameter(optimizer: Any) -> float:
    """Bytes of all the tensors of an optimizer's parameters, by their storages, a parameter."""
    count, held = 0, []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count += parameter.numel()
            held += [parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in held
        if isinstance(tensor, torch.Tensor)
    }
    return round(sum(storages.values()) / count, 4)


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
