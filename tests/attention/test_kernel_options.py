"""What a kernel's function knows is read once, not once a layer."""

import inspect
from typing import Any

import pytest
import torch

from lightning_memkit.attention import kernels
from lightning_memkit.attention.documents import Documents


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_a_kernel_s_signature_is_read_once_for_all_layers(monkeypatch):
    from torch.nn.attention import varlen as torch_s

    read, called, signature = [], [], inspect.signature

    def varlen_attn(
        query: Any, key: Any, value: Any, *bounds: Any, scale: float | None = None, **others: Any
    ) -> Any:
        called.append(1)
        return query

    def counted(function: Any) -> inspect.Signature:
        read.append(function)
        return signature(function)

    monkeypatch.setattr(torch_s, "varlen_attn", varlen_attn)
    monkeypatch.setattr(kernels.inspect, "signature", counted)
    documents = Documents(cu_seqlens=torch.tensor([0, 3, 8], dtype=torch.int32))
    query = torch.randn(1, 2, 8, 4)
    for _ in range(8):
        kernels.varlen(query, query, query, documents)
        kernels.varlen_knows_windows()
    assert len(called) == 8
    assert read == [varlen_attn]
