"""Run by test_built_on_device.py: builds a Llama where it will live, and says what the host had at most."""

import json
import resource
import sys

import torch
import transformers

from lightning_memkit import OnDeviceStrategy
from lightning_memkit.initialization.building import build_on
from tests.gpu.card import sized
from tests.plugins.toys import trainer

BF16 = torch.bfloat16


def build() -> torch.nn.Module:
    """Eight billion parameters, as Llama 3's."""
    config = transformers.LlamaConfig(
        vocab_size=sized(128_256, 2048),
        hidden_size=sized(4096, 256),
        intermediate_size=sized(14_336, 1024),
        num_hidden_layers=sized(32, 8),
        num_attention_heads=sized(32, 8),
        num_key_value_heads=8,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(kind: str, how: str) -> None:
    device = torch.device(kind)
    one = torch.ones(8, 8, device=device, dtype=BF16)
    torch.mm(one, one)
    torch.nn.init.normal_(torch.empty(8, device=device))  # the context, and the kernels, are loaded
    before = peak_bytes()
    if how == "build_on":
        with build_on(device, BF16):
            model = build()
    else:
        with trainer(
            accelerator="auto", strategy=OnDeviceStrategy(kind), precision="bf16-true"
        ).init_module():
            model = build()
    found = {
        "grown": peak_bytes() - before,
        "bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "largest": max(parameter.numel() for parameter in model.parameters()),
        "devices": sorted({tensor.device.type for tensor in (*model.parameters(), *model.buffers())}),
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "logits": list(model(torch.ones(1, 8, dtype=torch.int64, device=device)).logits.shape),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
