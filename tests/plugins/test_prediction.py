"""Predicted peaks against what torch's profiler saw a Trainer allocate, to the byte."""

import gc
import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F

from lightning_memkit import ActivationCheckpointing, MemoryBudget, PureBF16Precision, predict_memory
from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.prediction.contained import contained
from lightning_memkit.prediction.lines import PeakLines
from lightning_memkit.utilities.errors import PredictionError
from tests.processes import ROOT, run_script
from tests.testing.fake_device import compiler

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(LightningModule):
    """A small model over token ids; `optimizer` makes its optimizer."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.logits(batch["ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=1e-3)


def batch(rows: int = 4, length: int = 32) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "labels": ids.clone()}


class Loader:
    def __init__(self, given: Any, number: int) -> None:
        self.given, self.number = given, number

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Any:
        for _ in range(self.number):
            yield {name: value.clone() for name, value in self.given.items()}


def measured(build: Any, given: Any, options: dict[str, Any]) -> int:
    """What the allocator handed out at most, from before the model was built."""

    def train() -> int:
        with AllocatorTrace() as trace:
            trainer = Trainer(
                **options,
                max_epochs=1,
                accelerator="cpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(build(), Loader(given, 2 * options.get("accumulate_grad_batches", 1)))
        return trace.peak_bytes

    gc.collect()
    return contained(train)


def foreach(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, foreach=True)


def fused(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


# As functions: plugins and callbacks belong to one Trainer.
OPTIONS: dict[str, Any] = {
    "plain": dict,
    "mixed": lambda: {"precision": "bf16-mixed"},
    "16-true": lambda: {"precision": "bf16-true"},
    "kahan": lambda: {"plugins": [PureBF16Precision()]},
    "split, exact": lambda: {"plugins": [PureBF16Precision(compensation="split", states="exact")]},
    "split24": lambda: {"plugins": [PureBF16Precision(compensation="split24")]},
    "split24, 8-bit": lambda: {"plugins": [PureBF16Precision(compensation="split24", states="8-bit")]},
    "accumulated, clipped": lambda: {"accumulate_grad_batches": 3, "gradient_clip_val": 1.0},
    "kahan, accumulated": lambda: {"plugins": [PureBF16Precision()], "accumulate_grad_batches": 2},
    "full": lambda: {"callbacks": [ActivationCheckpointing("full")]},
    "selective": lambda: {"callbacks": [ActivationCheckpointing("selective")]},
    "every second, mixed": lambda: {
        "precision": "bf16-mixed",
        "callbacks": [ActivationCheckpointing("every:2")],
    },
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.long
def test_the_peak_is_that_of_a_run(options):
    predicted = predict_memory(Language(), batch(), trainer=options())
    real = measured(Language, batch(), options())
    assert predicted.peak_bytes == pytest.approx(real, rel=2e-4)
    assert sum(predicted.anatomy.at_peak.values()) == predicted.peak_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", [foreach, fused, momentum])
@pytest.mark.parametrize("rows", [1, 16])
def test_the_peak_is_that_of_a_run_with_any_optimizer_and_batch(optimizer, rows):
    predicted = predict_memory(Language(optimizer), batch(rows))
    real = measured(lambda: Language(optimizer), batch(rows), {})
    assert predicted.peak_bytes == pytest.approx(real, rel=2e-4)


def test_convolutions_count_what_their_kernels_take_within():
    class Images(Language):
        def __init__(self) -> None:
            super().__init__(layers=0)
            self.net = nn.Sequential(
                nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 5, groups=16), nn.Flatten(),
                nn.Dropout(0.1), nn.LazyLinear(10),
            )  # fmt: skip
            self.net(torch.zeros(2, 3, 16, 16))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch["x"]), batch["y"])

    given = {"x": torch.randn(8, 3, 16, 16), "y": torch.arange(8)}
    assert predict_memory(Images(), given).peak_bytes == pytest.approx(measured(Images, given, {}), rel=2e-3)


def test_a_step_without_lightning():
    model = Language(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(given: Any) -> None:
        model.training_step_loss = F.cross_entropy(
            model.logits(given["ids"]).flatten(0, 1), given["labels"].flatten()
        )
        model.training_step_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    predicted = predict_memory(step, batch())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())

    def run() -> int:
        held, loader = sum(p.nbytes for p in model.parameters()), Loader(batch(), 2)
        with AllocatorTrace() as trace:
            for given in loader:
                step(given)
        return trace.peak_bytes + held

    assert predicted.peak_bytes == pytest.approx(contained(run), rel=2e-4)
    assert predicted.anatomy.at_peak["weights"] == sum(p.nbytes for p in model.parameters())


def test_a_model_that_is_built_within_needs_no_memory_here():
    large = predict_memory(lambda: Language(width=8192, layers=8), batch(1, 8))  # 17 GB of weights alone
    assert large.anatomy.at_peak["weights"] > 16 * 2**30
    inside, outside = predict_memory(Language, batch()), predict_memory(Language(), batch())
    assert inside.phases == outside.phases
    assert inside.anatomy.at_peak == outside.anatomy.at_peak


def test_nothing_here_is_touched():
    module: Any = Language()
    module.blocks[1].up.weight.grad = torch.ones_like(module.blocks[1].up.weight)
    given = batch()
    held = [*module.parameters(), *given.values()]
    before = [(tensor, tensor._version, tensor.clone()) for tensor in held]
    modules, hooks = dict(module.named_modules()), [dict(m._forward_hooks) for m in module.modules()]
    states = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
    settings = (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype())
    predict_memory(module, given, trainer={"precision": "bf16-true"})
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == states
    assert (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()) == settings
    assert dict(module.named_modules()) == modules
    assert [dict(m._forward_hooks) for m in module.modules()] == hooks
    assert all(
        now is was for now, (was, _, _) in zip([*module.parameters(), *given.values()], before, strict=True)
    )
    assert all(tensor._version == version and torch.equal(tensor, copy) for tensor, version, copy in before)
    assert module.blocks[1].up.weight.grad.eq(1).all()
    assert module._trainer is None


def test_the_anatomy_says_what_is_known_by_hand():
    module = Language(fused)
    count = sum(p.numel() for p in module.parameters())
    found = predict_memory(module, batch(), trainer={"plugins": [PureBF16Precision()]})
    largest = found.anatomy.largest
    assert found.anatomy.at_peak["weights"] == 2 * count
    assert largest["gradients"] == 2 * count
    assert largest["compensation"] == 2 * count
    assert largest["optimizer_states"] == pytest.approx(4 * count, rel=0.01)
    assert set(found.phases) == {"forward", "backward", "optimizer"}
    assert max(found.phases.values()) == found.peak_bytes
    assert "compensation" in str(found)


def test_saved_activations_are_those_of_the_blocks():
    found = predict_memory(Language(layers=4), batch(64))
    ups = {name: size for name, size in found.saved.items() if name.endswith(".up")}
    assert ups == {f"blocks.{index}.up": 64 * 32 * 4 * 64 * 4 for index in range(4)}
    assert found.anatomy.peak_phase in ("forward", "backward")


def test_only_what_matters_of_the_trainer_is_taken(tmp_path):
    class Says(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            (tmp_path / "was here").touch()

    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint

    options = {
        "max_epochs": 100,
        "logger": True,
        "callbacks": [ModelCheckpoint(), LearningRateMonitor(), Says()],
        "accelerator": "gpu",
    }
    found = predict_memory(Language(), batch(), trainer=options)
    assert found.peak_bytes == predict_memory(Language(), batch()).peak_bytes
    assert (tmp_path / "was here").exists()


def test_bad_input_is_refused_with_a_remedy():
    with pytest.raises(TypeError, match="module is a Linear; give a LightningModule"):
        predict_memory(nn.Linear(2, 2), batch())  # pyright: ignore
    with pytest.raises(TypeError, match="takes 2 arguments"):
        predict_memory(lambda a, b: None, batch())
    with pytest.raises(TypeError, match="built a int; it has to build a LightningModule"):
        predict_memory(lambda: 3, batch())
    with pytest.raises(ValueError, match="no argument of Lightning's Trainer"):
        predict_memory(Language(), batch(), trainer={"precison": 16})
    with pytest.raises(ValueError, match="leave it out, give the micro-batch"):
        predict_memory(Language(), batch(), trainer={"callbacks": [MemoryBudget("1GiB")]})
    with pytest.raises(
        TypeError, match="Sized takes width; give a function without arguments that builds it"
    ):
        predict_memory(Sized, batch())


class Sized(Language):
    def __init__(self, width: int) -> None:
        super().__init__(width=width)


def test_a_batch_that_is_not_trained_on_is_said():
    class Skips(Language):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # pyright: ignore
            return None

    with pytest.raises(PredictionError, match="No optimizer step was taken: training_step returned None"):
        predict_memory(Skips(), batch())


def test_several_optimizers_take_their_steps():
    class Two(Language):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # pyright: ignore
            for optimizer in self.optimizers():  # pyright: ignore
                loss = super().training_step(batch, batch_idx)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.blocks.parameters()), torch.optim.Adam(self.head.parameters())

    predicted = predict_memory(Two(), batch())
    assert predicted.peak_bytes == pytest.approx(measured(Two, batch(), {}), rel=2e-4)
    counted = sum(p.numel() for p in [*Two().blocks.parameters(), *Two().head.parameters()])
    assert predicted.anatomy.largest["optimizer_states"] == pytest.approx(8 * counted, rel=0.01)


def test_an_error_of_the_step_is_the_users_own():
    class Fails(Language):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.logits(batch["no such key"])

    with pytest.raises(KeyError, match="no such key"):
        predict_memory(Fails(), batch())


def test_an_operator_of_unknown_shape_is_named():
    @torch.library.custom_op("memkit_tests::grows", mutates_args=())
    def grows(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    class Custom(Language):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return grows(self.logits(batch["ids"])).mean()

    with pytest.raises(PredictionError, match=r"memkit_tests::grows gives.*register_fake"):
        predict_memory(Custom(), batch())


@pytest.mark.long
def test_two_sizes_say_the_peak_of_all():
    lines = PeakLines.through({rows: predict_memory(Language(), batch(rows)) for rows in (4, 16)})
    for rows in (1, 3, 7, 32, 64):
        assert lines.peak_bytes(rows) == predict_memory(Language(), batch(rows)).peak_bytes
    phases = {predict_memory(Language(), batch(rows)).anatomy.peak_phase for rows in (1, 64)}
    assert len(phases) == 2  # one line would not do
    budget = lines.peak_bytes(20)
    assert lines.largest_fitting(budget, range(1, 65)) == 20
    assert lines.largest_fitting(1000, range(1, 65)) is None


def test_three_lengths_say_the_peak_of_all_where_scores_are_kept():
    class Scores(Language):
        def logits(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            return self.head((x @ x.transpose(1, 2)).softmax(-1) @ x)

    found = {length: predict_memory(Scores(), batch(2, length)) for length in (16, 64, 128)}
    lines = PeakLines.through(found)
    assert lines.peak_bytes(96) == predict_memory(Scores(), batch(2, 96)).peak_bytes
    two = PeakLines.through({length: found[length] for length in (16, 64)})
    assert two.peak_bytes(128) < found[128].peak_bytes


def test_sizes_that_run_other_operators_give_no_line():
    class Branches(Language):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * 2 if len(batch["ids"]) > 8 else loss

    with pytest.raises(ValueError, match="other operators for other sizes"):
        PeakLines.through({rows: predict_memory(Branches(), batch(rows)) for rows in (4, 16)})
    with pytest.raises(ValueError, match=r"1 size\(s\) give no line"):
        PeakLines.through({4: predict_memory(Language(), batch())})


def test_without_forks_a_copy_is_predicted_here(monkeypatch):
    expected = predict_memory(Language(), batch(), trainer={"precision": "bf16-true"})
    monkeypatch.delattr(os, "fork")
    module = Language()
    before = [parameter.clone() for parameter in module.parameters()]
    found = predict_memory(module, batch(), trainer={"precision": "bf16-true"})
    assert found.anatomy.at_peak == expected.anatomy.at_peak
    assert all(torch.equal(now, was) for now, was in zip(module.parameters(), before, strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    with pytest.raises(PredictionError, match="the system has no forks"):
        predict_memory(lambda given: None, batch())


AFTER_AN_ACCELERATOR = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from lightning_memkit import predict_memory, PureBF16Precision
from lightning_memkit.utilities.errors import PredictionError
from tests.testing.fake_device import fake_device
from tests.plugins.test_prediction import Language, batch

options = lambda: {"plugins": [PureBF16Precision()], "accumulate_grad_batches": 2}
before = predict_memory(Language(), batch(), trainer=options())
with fake_device() as device:
    torch.ones(2, device=device.torch_device, requires_grad=True).sum().backward()
module = Language()
values, state = [p.clone() for p in module.parameters()], torch.get_rng_state()
after = predict_memory(module, batch(), trainer=options())
assert after.peak_bytes == before.peak_bytes, (after.peak_bytes, before.peak_bytes)
assert after.anatomy.at_peak == before.anatomy.at_peak
assert all(type(p) is torch.nn.Parameter and torch.equal(p, v) for p, v in zip(module.parameters(), values))
assert torch.equal(torch.get_rng_state(), state) and module._trainer is None
assert predict_memory(Language, batch(), trainer=options()).peak_bytes == before.peak_bytes
assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().item() != 1.0  # real again
try:
    predict_memory(lambda given: None, batch())
    predict_memory(lambda given: module(given).sum().backward(), batch())
except PredictionError as error:
    assert "Predict before training" in str(error), error
else:
    raise AssertionError("not refused")
"""


@pytest.mark.skipif(compiler() is None, reason="the fake device needs a compiler")
@pytest.mark.long
def test_a_process_that_has_used_an_accelerator_predicts_on_a_copy(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(AFTER_AN_ACCELERATOR.replace("module(given)", "module.logits(given['ids'])"))
    done = run_script(script, str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]


class Scaled(Language):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.trainer.datamodule.scale  # pyright: ignore


class Logging(Language):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.logger.log_metrics({"step": batch_idx})  # pyright: ignore
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("module", "line"), [(Scaled, "datamodule.scale"), (Logging, "logger.log_metrics")])
def test_a_step_that_needs_the_trainer_that_trains_is_told_so(module, line):
    with pytest.raises(PredictionError, match=f"only the Trainer that trains has.*{line}"):
        predict_memory(module(), batch())


def test_other_errors_of_a_step_are_the_users():
    class Wrong(Language):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            nothing: Any = None
            return nothing.loss

    with pytest.raises(AttributeError, match="loss"):
        predict_memory(Wrong(), batch())


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (lambda ids: ids.to_sparse(), "sparse_coo"),
        (lambda ids: torch.nested.nested_tensor(list(ids)), "nested"),
    ],
)
def test_a_batch_that_has_no_twin_is_refused(build, kind):
    given = {**batch(), "ids": build(batch()["ids"])}
    with pytest.raises(ValueError, match=f"a tensor that is .*{kind}, and predictions run on dense ones"):
        predict_memory(Language(), given)
