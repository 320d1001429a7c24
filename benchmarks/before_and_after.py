"""Peak bytes of the language model example: a plain Trainer, then memkit's three plugins added one by one.

Each run is `memkit fit` on the example's own YAML for two steps, on CPU; the second is metered operator by
operator by `MemoryReport`. Only bytes are counted here, nothing is timed. Quick runs take the demo's smaller model.
"""

import json
import tempfile
from pathlib import Path

import yaml

from benchmarks.__main__ import main_of
from benchmarks.harness import Options, Report
from benchmarks.record import ROOT
from lightning_memkit.cli import main

EXAMPLE = ROOT / "examples" / "pretrain_causal_lm"
PRECISION = {"class_path": "lightning_memkit.PureBF16Precision"}
CHECKPOINTING = {"class_path": "lightning_memkit.ActivationCheckpointing"}
# What each run has that the plain Trainer has not; the budget is the one that the YAML names.
RUNS = {
    "plain Trainer, float32": ((), ()),
    "+ PureBF16Precision": ((PRECISION,), ()),
    "+ ActivationCheckpointing": ((PRECISION,), (CHECKPOINTING,)),
    "+ MemoryBudget": ((PRECISION,), (CHECKPOINTING, "budget")),
}
MIB = 2**20


def run(options: Options) -> Report:
    """Train with none to all of the plugins and compare the peaks."""
    configs = ["budget.yaml", *(["demo.yaml"] if options.quick else [])]
    anatomies = {label: _anatomy(configs, *plugins, seed=options.seed) for label, plugins in RUNS.items()}
    peaks = [anatomy["peak_bytes"] for anatomy in anatomies.values()]
    rows = [_row(label, anatomy, peaks[0]) for label, anatomy in anatomies.items()]
    figures = {
        "before_peak_mib": peaks[0] / MIB,
        "bf16_peak_mib": peaks[1] / MIB,
        "checkpointing_peak_mib": peaks[2] / MIB,
        "after_peak_mib": peaks[3] / MIB,
        "before_to_after": peaks[0] / peaks[3],
    }
    notes = (f"Effective batch and data are the same in every run: {' and '.join(configs)}.",)
    return Report("before_and_after", figures, rows, notes=notes)


def _anatomy(configs: list[str], precision: tuple, callbacks: tuple, *, seed: int) -> dict:
    """Train two steps with these plugins and return what `MemoryReport` wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory_report.json"
        report_of(configs, precision, callbacks, path=path, seed=seed)
        return json.loads(path.read_text(encoding="utf-8"))


def report_of(configs: list[str], precision: tuple, callbacks: tuple, *, path: Path, seed: int) -> None:
    """Train two steps with these plugins, and let `MemoryReport` write the second to a file."""
    with tempfile.TemporaryDirectory() as folder:
        report = {
            "class_path": "lightning_memkit.MemoryReport",
            "init_args": {"path": str(path), "measured_step": 1},
        }
        named = [_budget(configs) if callback == "budget" else callback for callback in callbacks]
        overrides = {
            "max_steps": 2,
            "accelerator": "cpu",
            "strategy": "auto",
            "logger": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "default_root_dir": folder,
            "plugins": list(precision),
            "callbacks": [*named, report],
        }
        config = Path(folder) / "overrides.yaml"
        config.write_text(yaml.safe_dump({"seed_everything": seed, "trainer": overrides}), encoding="utf-8")
        if main(["fit", *(f"--config={path}" for path in [*(EXAMPLE / name for name in configs), config])]):
            raise RuntimeError(
                f"The run with {overrides['plugins']} and {overrides['callbacks']} failed; see above."
            )


def _budget(configs: list[str]) -> dict:
    """Return the MemoryBudget of the last config that names one."""
    for name in reversed(configs):
        trainer = yaml.safe_load((EXAMPLE / name).read_text(encoding="utf-8")).get("trainer", {})
        for callback in trainer.get("callbacks", []):
            if callback["class_path"].endswith("MemoryBudget"):
                return callback
    raise ValueError(f"{configs} name no MemoryBudget.")


def _row(label: str, anatomy: dict, before: int) -> dict[str, object]:
    mib = {category: round(number / MIB, 1) for category, number in anatomy["at_peak"].items() if number}
    return {
        "what": label,
        "peak_mib": round(anatomy["peak_bytes"] / MIB, 1),
        "share_of_plain": f"{anatomy['peak_bytes'] / before:.1%}",
        **{f"{category}_mib": number for category, number in mib.items()},
    }


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
