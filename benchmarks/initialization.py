"""Host memory while a bfloat16 model is built and loaded from sharded safetensors, and the speed of loading.

A Llama of 1 GiB in bfloat16 is written into a temporary folder, in files of 256 MiB with an index. Each way to the
loaded model runs in a process of its own, which first goes the same way with a tiny model; `host_overhead_pct` is the
peak of its resident memory (mapped pages of files included) above what it was before, less the model's own bytes, over
those. It should be at most 5 %, or the bytes of the model's largest tensor. `stock_host_overhead_pct` is that of
building in float32, `load_state_dict` of the files, and a cast. `fp32_bytes` are the most float32 bytes alive at once
beside those that stay, counted operator by operator. `load_bandwidth_fraction` is the time of reading the files into
memory over the time of loading them into a model that exists, from the system's cache, on one thread. Quick runs take
a model of 0.1 GiB.
"""

import tempfile
from pathlib import Path

from benchmarks.__main__ import main_of
from benchmarks._initialization_paths import (
    PATHS,
    SIZES,
    in_own_process,
    measured,
    save,
    save_small,
    staged,
    timed,
)
from benchmarks.harness import MINIMUM_PAIRS, Options, Report, self_ratio_is_void

SHARDS = 4
_CONFIGURED = ("configure_model, OnDeviceStrategy", "configure_model, DDP")
_BUILT = ("built, streamed", "configure_model, strict=False")


def run(options: Options) -> Report:
    """Write the model, measure each way, time ours."""
    sizes = SIZES["quick" if options.quick else "full"]
    shard_bytes = (2**27 if options.quick else 2**30) // SHARDS
    with tempfile.TemporaryDirectory(prefix="memkit-") as parent:
        folder, small = Path(parent, "model"), Path(parent, "small")
        in_own_process(save_small, small)
        model_bytes = in_own_process(save, sizes, folder, shard_bytes)
        found = {path: in_own_process(measured, path, sizes, folder, small) for path in PATHS}
        fp32 = {path: in_own_process(staged, path, sizes, folder) for path in PATHS}
        ratio, itself = in_own_process(timed, sizes, folder, MINIMUM_PAIRS, options.seed)
        files = len(list(folder.glob("*.safetensors")))
    over = {path: one["peak_bytes"] - model_bytes for path, one in found.items()}
    rows: list[dict[str, object]] = [
        {
            "way": path,
            "peak_bytes": one["peak_bytes"],
            "model_bytes": one["model_bytes"],
            "overhead_bytes": over[path],
            "overhead_pct": round(100 * over[path] / model_bytes, 2),
            "peak_after_setup_bytes": one["peak_after_setup_bytes"],
            "fp32_bytes": fp32[path],
        }
        for path, one in found.items()
    ]
    rows += [ratio.row("load against reading"), itself.row("load against itself")]
    largest = found["streamed"]["largest_bytes"]
    figures = {
        "model_bytes": model_bytes,
        "largest_tensor_bytes": largest,
        "host_overhead_pct": 100 * over["streamed"] / model_bytes,
        "host_overhead_bytes": over["streamed"],
        "within_bound": over["streamed"] <= max(0.05 * model_bytes, largest),
        "configure_model_host_overhead_pct": 100 * max(over[path] for path in _CONFIGURED) / model_bytes,
        "built_host_overhead_pct": 100 * max(over[path] for path in _BUILT) / model_bytes,
        "built_host_overhead_in_largest_tensors": max(over[path] for path in _BUILT) / largest,
        "fp32_bytes": fp32["streamed"],
        "stock_fp32_bytes": fp32["stock"],
        "stock_host_overhead_pct": 100 * over["stock"] / model_bytes,
        "from_pretrained_host_overhead_pct": 100 * over["from_pretrained"] / model_bytes,
        "same_values": len({one["values"] for one in found.values()}) == 1,
        "load_bandwidth_fraction": 1 / ratio.median,
        "load_bandwidth_fraction_low": 1 / ratio.high,
    }
    notes = (
        f"The model lay in {files} files of safetensors; every value was read once before the peak was noted.",
        "streamed: build_empty, then load_weights. built, streamed: build_on, then load_weights. configure_model: of "
        "a LightningModule, with InitialWeights and PureBF16Precision, DDP of one process; strict=False under "
        "OnDeviceStrategy; the peak is that until the weights are there. from_pretrained leaves its weights in the "
        "mapped files.",
        "peak_after_setup_bytes: DDP then broadcasts its weights, in torch's buckets of 250 MiB; that is its own.",
        "The float32 bytes of streamed are what constructors allocate and nobody writes to: not resident on a host.",
    )
    return Report("initialization", figures, rows, void=self_ratio_is_void(itself), notes=notes)


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
