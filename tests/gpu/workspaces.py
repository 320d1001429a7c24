"""Run by test_workspaces.py: what cuBLAS keeps after one product, and after one in a backward."""

import json
import sys

import torch

from lightning_memkit.memory.cublas import cublas_bytes


def main(kind: str) -> None:
    device = torch.device(kind)
    found = {"foretold": cublas_bytes(device)}
    if kind == "cuda":
        weight = torch.ones(256, 256, device=device, requires_grad=True)
        own = torch.cuda.memory_allocated()
        product = weight @ weight
        found["forward"] = torch.cuda.memory_allocated() - own - product.nbytes
        product.sum().backward()
        assert weight.grad is not None
        found["both"] = torch.cuda.memory_allocated() - own - product.nbytes - weight.grad.nbytes
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            (weight.detach() @ weight.detach()).sum().item()
        found["on a side stream"] = torch.cuda.memory_allocated() - own - product.nbytes - weight.grad.nbytes
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
