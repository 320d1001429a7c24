"""What the precision plugin leaves alone: exceptions in float32, inputs, targets, metrics, the default dtype."""

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_memkit.plugins.precision.pure_bf16 import PureBF16Precision
from tests.plugins.noise import NOISE

pytestmark = NOISE
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
LARGE = 1_700_000_001  # as a bfloat16 it would be 1702887424
EXACT = 1.0 + 2**-40  # float64 only


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "features": torch.randn(8, generator=generator),
            "ids": torch.randint(16, (3,), generator=generator),
            "time": torch.tensor(LARGE),
            "exact": torch.tensor(EXACT, dtype=FP64),
            "mask": torch.tensor([True, False, True]),
            "complex": torch.tensor(1 + 2**-20 * 1j, dtype=torch.complex64),
            "half": torch.tensor(0.5, dtype=torch.float16),
            "target": torch.tensor([1.0 + 2**-20]),
        }
        for _ in range(16)
    ]


class Gate(nn.Module):
    """Float64 and integer arguments beside a float32 one, in a layer with bfloat16 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, features, time, exact, mask):
        assert (features.dtype, time.dtype, exact.dtype, mask.dtype) == (BF16, torch.int64, FP64, torch.bool)
        assert time.eq(LARGE).all()
        assert exact.eq(EXACT).all()
        return features * self.weight


class Everything(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.router = nn.Embedding(16, 8), Gate(), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 1, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        self.error = torchmetrics.MeanSquaredError()
        self.mean = torchmetrics.MeanMetric()
        self.dtypes: set[torch.dtype] = set()

    def check(self, batch: dict[str, torch.Tensor]) -> None:
        expected = {
            "features": FP32,
            "ids": torch.int64,
            "time": torch.int64,
            "exact": FP64,
            "mask": torch.bool,
        }
        expected |= {"complex": torch.complex64, "half": torch.float16, "target": FP32}
        assert {name: value.dtype for name, value in batch.items()} == expected
        assert batch["time"].eq(LARGE).all()
        assert batch["exact"].eq(EXACT).all()
        assert batch["target"].eq(1.0 + 2**-20).all()
        assert batch["complex"].imag.ne(0).all()
        # What code in a step makes by itself is float32, and exact.
        assert torch.arange(0.0, 300.0)[-1].item() == 299.0
        assert torch.arange(300, dtype=FP32)[-3:].tolist() == [297.0, 298.0, 299.0]
        made = (torch.zeros(1), torch.tensor(0.1), torch.linspace(0, 1, 3), nn.Linear(1, 1).weight)
        assert {value.dtype for value in made} == {torch.get_default_dtype()} == {FP32}

    def forward(self, batch):
        hidden = self.embed(batch["ids"]).mean(1) + self.gate(
            batch["features"], batch["time"], exact=batch["exact"], mask=batch["mask"]
        )
        return self.head(self.norm(self.router(hidden)))

    def shared(self, batch) -> torch.Tensor:
        self.check(batch)
        output = self(batch)
        self.dtypes.add(output.dtype)
        self.error(output.float(), batch["target"])
        self.mean(batch["target"])
        return functional.mse_loss(output.float(), batch["target"])  # the target is used as it is

    def training_step(self, batch, batch_idx):
        self.get_buffer("seen").add_(1 / 3)
        loss = self.shared(batch)
        assert loss.dtype == FP32
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.shared(batch))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.check(batch)
        return self(batch)

    def configure_optimizers(self):
        assert torch.get_default_dtype() == FP32
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader() -> DataLoader:
    return DataLoader(rows(), batch_size=4)  # pyright: ignore[reportArgumentType]


def trainer(tmp_path, *exceptions: str, **options) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        plugins=[PureBF16Precision(fp32_exceptions=exceptions)],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )


def test_inputs_targets_metrics_and_default_dtype_are_untouched_in_every_loop(tmp_path):
    module = Everything()
    runner = trainer(tmp_path)
    runner.fit(module, loader(), loader())
    runner.test(module, loader(), verbose=False)
    outputs = runner.predict(module, loader())
    assert outputs is not None
    assert all(isinstance(output, torch.Tensor) and output.dtype == BF16 for output in outputs)
    assert module.dtypes == {BF16}
    assert module.mean.compute().item() == pytest.approx(1.0 + 2**-20, rel=2**-21)
    assert module.error.sum_squared_error.dtype == FP32  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.get_default_dtype() == FP32


def test_a_step_that_fails_leaves_the_default_dtype(tmp_path):
    class Failing(Everything):
        def training_step(self, batch, batch_idx):
            raise ValueError("the third document is empty")

    with pytest.raises(ValueError, match="third document"):
        trainer(tmp_path).fit(Failing(), loader())
    assert torch.get_default_dtype() == FP32


EXCEPTIONS = {
    "router": {"router.weight", "router.bias"},
    "[rg]*": {"router.weight", "router.bias", "gate.weight"},
    "head.weight": {"head.weight"},
    "LayerNorm": {"norm.weight", "norm.bias"},
    "Gate": {"gate.weight"},
    "seen": {"seen"},
}


@pytest.mark.parametrize("pattern", EXCEPTIONS)
def test_exceptions_by_name_by_type_and_for_buffers(pattern, tmp_path):
    module = Everything()
    start = {name: value.clone() for name, value in module.state_dict().items()}

    if "gate.weight" in EXCEPTIONS[pattern]:  # its float32 weight takes its inputs as float32
        module.gate.forward = lambda features, *_, **__: features * module.gate.weight
    runner = trainer(tmp_path, pattern)
    runner.fit(module, loader())
    kept = {name for name, value in module.state_dict().items() if value.dtype == FP32}
    assert kept == EXCEPTIONS[pattern]
    optimizer = runner.optimizers[0]
    for name, parameter in module.named_parameters():
        state = optimizer.state[parameter]
        assert ("compensation" in state) == (name not in kept)
        assert (state["exp_avg_sq"].dtype == FP32) == (name in kept)
        if name in kept:
            assert parameter.grad is None or parameter.grad.dtype == FP32
            assert not torch.equal(parameter, start[name])


def test_a_buffer_that_accumulates_needs_its_exception(tmp_path):
    """Thirds that add up: exact to float32's grain when kept, off by bfloat16's when cast."""
    sums = {}
    for exceptions in ((), ("seen",)):
        module = Everything()
        trainer(tmp_path, *exceptions).fit(module, DataLoader(rows() * 32, batch_size=4))  # pyright: ignore
        sums[exceptions] = module.get_buffer("seen").item()
    assert sums[("seen",)] == pytest.approx(2 * 128 / 3, rel=1e-5)
    assert abs(sums[()] - 2 * 128 / 3) > 1


class T5(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.T5Config(
            d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2, vocab_size=50, decoder_start_token_id=0
        )
        self.model = transformers.T5ForConditionalGeneration(config)
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_what_a_transformers_model_keeps_in_float32_trains_there(tmp_path):
    """T5 lists ``wo`` in `_keep_in_fp32_modules`: its activations overflow and its weights need the bits."""
    module = T5()
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    assert set(module.model._keep_in_fp32_modules) == {"wo"}
    ids = torch.randint(50, (16, 6), generator=torch.Generator().manual_seed(0))
    runner = trainer(tmp_path)
    runner.fit(module, DataLoader(ids, batch_size=4))  # pyright: ignore[reportArgumentType]
    kept = {name for name, parameter in module.named_parameters() if parameter.dtype == FP32}
    assert kept == {name for name in start if ".wo." in name}
    assert kept
    for name, parameter in module.named_parameters():
        if name in kept:
            assert not torch.equal(parameter, start[name])
            assert "compensation" not in runner.optimizers[0].state[parameter]
    assert module.losses[-1] < module.losses[0]
