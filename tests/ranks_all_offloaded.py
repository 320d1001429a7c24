"""Run on ranks by test_example_multi_gpu.py: `all_offloaded.yaml` on ranks whose device is "fake"."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry

from lightning_memkit import ActivationOffload, MemkitCLI
from tests.plugins.fake_ranks import BACKEND, OneOfEachRank, on_fake_ranks
from tests.plugins.ranks import leave
from tests.testing.fake_device import fake_device

BETWEEN, STEP = "bytes of the device between two steps", "bytes to the host in a step"


def main(path: str, *words: str) -> None:
    with fake_device() as device:
        on_fake_ranks(2)
        AcceleratorRegistry.register("fake", OneOfEachRank, description="no hardware")
        options = ["--trainer.accelerator=fake", f"--trainer.strategy.process_group_backend={BACKEND}"]
        cli = MemkitCLI(args=[*words, *options], run=False, save_config_callback=None)
        cli.model.to(device.torch_device)  # torch's shards can't be moved there from the CPU
        found: dict[str, list[Any]] = {"losses": [], BETWEEN: [], STEP: []}
        module: Any = cli.model
        for callback in cli.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, ActivationOffload):
                callback.min_bytes = 1  # all is small here
        plain = module.on_train_batch_end

        def on_train_batch_end(outputs: Any, *arguments: Any) -> None:
            plain(outputs, *arguments)
            found["losses"].append(float(outputs["loss"]))
            found[BETWEEN].append(device.live_bytes)
            found[STEP].append(device.transfers.to_host_bytes)
            device.reset_counts()

        module.on_train_batch_end = on_train_batch_end
        cli.trainer.fit(module, datamodule=cli.datamodule)
        found["weights"] = [sum(p.numel() * p.element_size() for p in module.parameters())]
        found["devices"] = sorted({str(p.to_local().device) for p in module.parameters()})
        state = cli.trainer.optimizers[0].state.values()
        found["states"] = sorted(
            {str(v.device) for values in state for v in values.values() if v.numel() > 1}
        )
        if torch.distributed.get_rank() == 0:
            Path(path).write_text(json.dumps(found))
        leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
