"""One end-to-end training, in a process of its own: `python -m benchmarks._end_to_end_run '{json}'`."""

import json
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from benchmarks._gpu_device import synchronize
from benchmarks._gpu_training import Fitted, Repeated, last_seconds, timed_fit
from benchmarks._prediction_gpu import GpuCase
from benchmarks.prediction_ranks import Llama
from lightning_memkit import ActivationCheckpointing, MemoryBudget, OptimizerOffload, PureBF16Precision
from lightning_memkit.initialization import build_on
from lightning_memkit.memory.out_of_memory import is_out_of_memory

WAYS = {
    "memkit": "memkit",
    "lightning": "plain Lightning",
    "hugging_face": "Hugging Face Trainer, fused AdamW",
    "hugging_face_8bit": "Hugging Face Trainer, AdamW of 8 bits",
}
STEPS, SIZING_STEPS = 9, 16  # MemoryBudget times sizes on its first steps
MEMKIT_BYTES = 10  # a parameter: weights, gradients, compensation and moments in bfloat16
ROOM = 0.85  # of the device, for those


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """A Llama of a shape, how it is trained, and on what."""

    shape: str
    way: str
    rows: int
    length: int
    device: str
    seed: int

    def batch(self) -> dict[str, torch.Tensor]:
        """The effective batch."""
        return GpuCase(
            shape=self.shape, precision="", policy="none", micro_batch=self.rows, length=self.length
        ).batch()


class Fused(Llama):
    """The same with AdamW in one kernel."""

    def configure_optimizers(self) -> Optimizer:
        """AdamW with torch's defaults."""
        return AdamW(self.parameters(), lr=1e-4, fused=True)


def plain_lightning(case: EndToEnd) -> tuple[Fitted, str]:
    """Mixed precision, and nothing that saves memory."""
    module = _built(case, torch.float32)
    batches = Repeated(case.batch(), STEPS)
    device = torch.device(case.device)
    return timed_fit(module, batches, device, steps=STEPS, precision="bf16-mixed"), "bf16-mixed"


def memkit(case: EndToEnd) -> tuple[Fitted, str]:
    """Pure bfloat16, activation checkpointing and a budget; states on the host where they do not fit."""
    device = torch.device(case.device)
    module = _built(case, torch.bfloat16)
    budget = MemoryBudget("auto" if device.type == "cuda" else "8GiB")
    callbacks: list[Any] = [ActivationCheckpointing("full"), budget]
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if device.type == "cuda":
        room = ROOM * torch.cuda.get_device_properties(device).total_memory
        callbacks += [OptimizerOffload()] if MEMKIT_BYTES * parameters > room else []
    used = ", ".join(type(callback).__name__ for callback in callbacks)
    found = timed_fit(
        module, Repeated(case.batch(), SIZING_STEPS), device, steps=SIZING_STEPS, callbacks=callbacks,
        plugins=[PureBF16Precision()],
    )  # fmt: skip
    size = budget.state_dict().get("micro_batch_size")
    return found, f"PureBF16Precision, {used}, micro-batch {size}"


def hugging_face(case: EndToEnd, optimizer: str) -> tuple[Fitted, str]:
    """The flags that Hugging Face's docs give for training on one GPU."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    device, times = torch.device(case.device), []

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **options: Any) -> None:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()

        def on_step_end(self, *args: Any, **options: Any) -> None:
            synchronize(device)
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, bf16=True, gradient_checkpointing=True, optim=optimizer, max_steps=STEPS,
            per_device_train_batch_size=case.rows, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True, use_cpu=device.type == "cpu", seed=case.seed,
        )  # fmt: skip
        batch = case.batch()
        samples: Any = [
            {name: values[index % case.rows] for name, values in batch.items()}
            for index in range(case.rows * STEPS)
        ]
        trainer = Trainer(
            model=_built(case, torch.float32).model, args=arguments, train_dataset=samples,
            data_collator=default_data_collator, callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    on_card = device.type == "cuda"
    found = Fitted(
        step_seconds=last_seconds(times),
        allocated_bytes=torch.cuda.max_memory_allocated() if on_card else 0,
        reserved_bytes=torch.cuda.max_memory_reserved() if on_card else 0,
        resident_bytes=0,
    )
    return found, f"bf16, gradient_checkpointing, {optimizer}"


def main(text: str) -> None:
    """Train, and print what it took."""
    warnings.simplefilter("ignore")
    case = EndToEnd(**json.loads(text))
    torch.manual_seed(case.seed)
    try:
        found, how = _train(case)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(json.dumps({"fits": 0, "why": " ".join(str(error).split())[:200]}))
        return
    tokens = case.rows * case.length
    values: dict[str, Any] = {"fits": 1, "tokens_per_second": tokens / found.step_seconds, "how": how}
    if case.device == "cuda":
        values |= {"peak_bytes": found.allocated_bytes, "reserved_bytes": found.reserved_bytes}
    print(json.dumps(values))


def _train(case: EndToEnd) -> tuple[Fitted, str]:
    if case.way == "memkit":
        return memkit(case)
    if case.way == "lightning":
        return plain_lightning(case)
    return hugging_face(case, "adamw_8bit" if case.way == "hugging_face_8bit" else "adamw_torch_fused")


def _built(case: EndToEnd, dtype: torch.dtype) -> Llama:
    with build_on(case.device, dtype):
        return Fused(case.shape)


if __name__ == "__main__":
    main(sys.argv[1])
