"""What torch's functions save for backward on the card, beside what a prediction says without one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_memkit import Budget
from lightning_memkit.prediction.persona import as_on_cuda
from tests.gpu.card import needs_cuda
from tests.gpu.test_attention_choice import saved_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")]
ROWS, LENGTH, WIDTH = 4, 128, 64
SMALL = 4096  # statistics a row, random states


@dataclass(frozen=True, kw_only=True)
class Case:
    """A module, or a function of the input alone, and the input's shape."""

    build: Callable[[], nn.Module] = nn.Identity
    run: Callable[[nn.Module, Tensor], Any] = nn.Module.__call__
    shape: tuple[int, ...] = (ROWS, LENGTH, WIDTH)


def of(function: Callable[[Tensor], Tensor]) -> Case:
    return Case(run=lambda module, x: function(x))


def image(build: Callable[[], nn.Module]) -> Case:
    return Case(build=build, shape=(ROWS, 8, 32, 32))


def labels(x: Tensor) -> Tensor:
    return torch.zeros(ROWS * LENGTH, dtype=torch.long, device=x.device)


CASES = {
    "LayerNorm": Case(build=lambda: nn.LayerNorm(WIDTH)),
    "RMSNorm": Case(build=lambda: nn.RMSNorm(WIDTH)),
    "RMSNorm without weight": Case(build=lambda: nn.RMSNorm(WIDTH, elementwise_affine=False)),
    "torch.rms_norm": of(lambda x: torch.rms_norm(x, (WIDTH,))),
    "Linear": Case(build=lambda: nn.Linear(WIDTH, WIDTH)),
    "PReLU": Case(build=nn.PReLU),
    "LogSigmoid": Case(build=nn.LogSigmoid),
    "Softplus": Case(build=nn.Softplus),
    "Mish": Case(build=nn.Mish),
    "gated": of(lambda x: F.silu(x) * x),
    "GELU": Case(build=nn.GELU),
    "dropout": of(lambda x: F.dropout(x, 0.1)),
    "torch.dropout": of(lambda x: torch.dropout(x, 0.1, True)),
    "dropout of rows": Case(build=lambda: nn.Dropout1d(0.1)),
    "softmax": of(lambda x: x.softmax(-1)),
    "softmax in float32": of(lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype)),
    "attention module": Case(
        build=lambda: nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True),
        run=lambda module, x: module(x, x, x, need_weights=False)[0],
    ),
    "attention weights": Case(
        build=lambda: nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True),
        run=lambda module, x: module(x, x, x)[0],
    ),
    "encoder layer": Case(build=lambda: nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True)),
    "GroupNorm": image(lambda: nn.GroupNorm(4, 8)),
    "BatchNorm": image(lambda: nn.BatchNorm2d(8)),
    "InstanceNorm": image(lambda: nn.InstanceNorm2d(8)),
    "convolution": image(lambda: nn.Conv2d(8, 16, 3, padding=1)),
    "depthwise": image(lambda: nn.Conv2d(8, 8, 3, groups=8)),
    "transposed": image(lambda: nn.ConvTranspose2d(8, 16, 2, 2)),
    "max pool": image(lambda: nn.MaxPool2d(2)),
    "bilinear": image(lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    "reflection": image(lambda: nn.ReflectionPad2d(1)),
    "local response": image(lambda: nn.LocalResponseNorm(2)),
    "cross-entropy": of(lambda x: F.cross_entropy(x.flatten(0, 1), labels(x))),
    "smoothed": of(lambda x: F.cross_entropy(x.flatten(0, 1), labels(x), label_smoothing=0.1)),
    "nll": of(lambda x: F.nll_loss(F.log_softmax(x.flatten(0, 1), -1), labels(x))),
    "mse": of(lambda x: F.mse_loss(x, x.detach())),
    "smooth l1": of(lambda x: F.smooth_l1_loss(x, x.detach())),
    "bce": of(lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid())),
    "kl": of(lambda x: F.kl_div(F.log_softmax(x, -1), F.softmax(x.detach(), -1), reduction="batchmean")),
    "multilabel": of(lambda x: F.multilabel_soft_margin_loss(x.flatten(0, 1), x.detach().flatten(0, 1))),
    "triplet": of(lambda x: F.triplet_margin_loss(x, x * 2, x * 3)),
    "cosine": of(lambda x: F.cosine_similarity(x, x * 2)),
    "distance": of(lambda x: F.pairwise_distance(x, x * 2)),
    "normalize": of(F.normalize),
    "norm": of(lambda x: x.norm(dim=-1)),
    "vector norm": of(lambda x: torch.linalg.vector_norm(x, dim=-1)),
    "logsumexp": of(lambda x: x.logsumexp(-1)),
    "cumsum": of(lambda x: x.cumsum(1)),
    "power": of(lambda x: x**1.5),
    "exp": of(torch.exp),
    "einsum": of(lambda x: torch.einsum("btc,bsc->bts", x, x)),
    "topk": of(lambda x: x.topk(3)[0]),
    "gather": of(lambda x: x.gather(1, torch.zeros(ROWS, 2, WIDTH, dtype=torch.long, device=x.device))),
}
PRECISIONS = {"float32": torch.float32, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}


def saved(case: Case, precision: str, device: torch.device) -> tuple[torch.dtype, int]:
    """The output's dtype, and the bytes that autograd keeps of what is neither input nor parameter."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(PRECISIONS[precision])
    try:
        with device:
            module, x = case.build(), torch.empty(case.shape).fill_(0.5).requires_grad_()
    finally:
        torch.set_default_dtype(before)
    with (
        saved_bytes(besides=[x, *module.parameters(), *module.buffers()]) as kept,
        torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"),
    ):
        out = case.run(module, x)
    return out.dtype, kept()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_as_much_is_saved_as_predicted(device: torch.device, name: str, precision: str) -> None:
    target = Budget("auto", "auto").target()
    prefers_cudnn = target is not None and target.prefers_cudnn
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda(prefers_cudnn=prefers_cudnn):
        foretold = saved(CASES[name], precision, torch.device("cpu"))
    needs_cuda("the CPU saves other tensors")
    found = saved(CASES[name], precision, device)
    assert foretold[0] == found[0]
    assert foretold[1] == pytest.approx(found[1], rel=0.02, abs=SMALL)
