"""Large models whose training is predicted, and measured on the GPU that is here: a case a process."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.prediction_ranks import Llama
from lightning_memkit import ActivationCheckpointing, Budget, PureBF16Precision, predict_memory
from lightning_memkit.initialization import build_on
from lightning_memkit.prediction.result import Prediction

LENGTH, STEPS = 2048, 3
SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """A model of a shape, and how it is trained."""

    shape: str
    precision: str
    policy: str
    micro_batch: int

    def trainer(self) -> dict[str, Any]:
        """The Trainer's arguments."""
        options: dict[str, Any] = {"precision": "bf16-mixed"} if self.precision == "mixed" else {}
        if self.precision == "kahan":
            options["plugins"] = [PureBF16Precision()]
        if self.policy != "none":
            options["callbacks"] = [ActivationCheckpointing(self.policy)]
        return options

    def batch(self) -> dict[str, torch.Tensor]:
        """Rows of 2,048 tokens."""
        ids = torch.randint(
            0, 128_256, (self.micro_batch, LENGTH), generator=torch.Generator().manual_seed(0)
        )
        return {"input_ids": ids, "labels": ids.clone()}


CASES = (
    GpuCase(shape="1b", precision="mixed", policy="none", micro_batch=1),
    GpuCase(shape="1b", precision="mixed", policy="full", micro_batch=4),
    GpuCase(shape="1b", precision="kahan", policy="none", micro_batch=4),
    GpuCase(shape="1b", precision="kahan", policy="selective", micro_batch=2),
    GpuCase(shape="8b", precision="kahan", policy="full", micro_batch=1),
)
QUICK = CASES[:1]


def predicted(case: GpuCase) -> Prediction:
    """For the device that is here; nothing runs on it."""
    device = Budget("auto", "auto").target()
    return predict_memory(
        partial(Llama, case.shape), case.batch(), trainer=case.trainer(), device=device or "cpu"
    )


def measured(case: GpuCase) -> dict[str, int]:
    """What torch's allocator has handed out and reserved at most, in steps after the first one began."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._prediction_gpu", json.dumps(asdict(case))],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class _Peaks(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.reset_peak_memory_stats()


class _Batches:
    def __init__(self, case: GpuCase) -> None:
        self._case = case

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        return (self._case.batch() for _ in range(STEPS))


def main(text: str) -> None:
    """Train a case, and print its peaks."""
    case = GpuCase(**json.loads(text))
    dtype = torch.bfloat16 if case.precision == "kahan" else torch.float32
    with build_on("cuda", dtype):
        module = Llama(case.shape)
    options = case.trainer()
    options["callbacks"] = [*options.get("callbacks", []), _Peaks()]
    trainer = Trainer(
        **options, max_steps=STEPS, accelerator="cuda", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, _Batches(case))
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(json.dumps({"allocated": allocated, "reserved": reserved}))


if __name__ == "__main__":
    main(sys.argv[1])
