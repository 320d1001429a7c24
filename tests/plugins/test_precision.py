"""The precision plugin inside Lightning's Trainer."""

import copy

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning, Callback, GradientAccumulationScheduler
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit.plugins.memory_report._facts import facts
from lightning_memkit.plugins.precision.pure_bf16 import PureBF16Precision
from lightning_memkit.utilities.errors import NoEffectWarning
from tests.optim.helpers import copy_gradients

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*`weights_only` was not set.*"),
]
BF16, FP32 = torch.bfloat16, torch.float32
MODES = ("kahan", "split", "split24", "stochastic", "none")


class Regression(pl.LightningModule):
    """float32 features and targets, a scheduler, and a metric."""

    def __init__(self, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.error = torchmetrics.MeanSquaredError()
        self.learning_rate = learning_rate
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        features, target = batch
        assert features.dtype == target.dtype == FP32
        assert torch.arange(0.0, 300.0)[-1].item() == 299.0
        output = self.net(features)
        assert output.dtype == BF16
        loss = functional.mse_loss(output.float(), target)
        self.error(output.float(), target)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(rows: int = 64, batch_size: int = 8) -> DataLoader:
    features = torch.randn(rows, 8, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=batch_size)


def trainer(precision: PureBF16Precision, tmp_path, **options) -> pl.Trainer:
    options = {"max_epochs": 1, "enable_checkpointing": False} | options
    return pl.Trainer(
        accelerator="cpu",
        plugins=[precision],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )


def test_it_trains_casts_and_leaves_no_global_trace(tmp_path):
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    during = []

    class Look(Callback):
        def on_train_batch_end(self, *args) -> None:
            during.append(flags.allow_bf16_reduced_precision_reduction)

    model, precision = Regression(), PureBF16Precision("split")
    trainer(precision, tmp_path, max_epochs=10, callbacks=[Look()], gradient_clip_val=1.0).fit(
        model, loader()
    )
    assert {parameter.dtype for parameter in model.parameters()} == {BF16}
    assert model.error.sum_squared_error.dtype == FP32  # pyright: ignore[reportAttributeAccessIssue]
    assert model.dtype == BF16
    assert sum(model.losses[-8:]) < 0.5 * sum(model.losses[:8])
    assert set(during) == {False}
    assert flags.allow_bf16_reduced_precision_reduction == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    measured = precision.compensations[0].bytes_per_parameter()
    assert measured.weights == measured.compensation == 2.0


def fp32_twin_weights(model: Regression, steps: int) -> list[torch.Tensor]:
    """The oracle: torch's own float32 AdamW on masters, its gradients taken by a bfloat16 copy."""
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=model.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    net = copy.deepcopy(model.net).to(BF16)
    batches = [batch for _ in range(steps // 8) for batch in loader()]
    for features, target in batches:
        with torch.no_grad():
            for parameter, master in zip(net.parameters(), masters, strict=True):
                parameter.copy_(master)
        net.zero_grad()
        functional.mse_loss(net(features.to(BF16)).float(), target).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        copy_gradients(net.parameters(), masters)
        optimizer.step()
        scheduler.step()
    return [master.detach() for master in masters]


def test_split_with_exact_states_equals_training_fp32_masters(tmp_path):
    model, precision = Regression(), PureBF16Precision("split", "exact")
    truth = fp32_twin_weights(model, steps=16)
    trainer(precision, tmp_path, max_epochs=2, gradient_clip_val=0.5).fit(model, loader())
    ours = [weight for _, weight in precision.compensations[0].float32_weights()]
    for weight, master in zip(ours, truth, strict=True):
        assert torch.equal(weight, master)


def state_of(model: pl.LightningModule) -> list[torch.Tensor]:
    optimizer = model.trainer.optimizers[0]
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    tensors = [state[name] for state in states for name in sorted(state)]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *tensors]]


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("states", ["compact", "exact", "8-bit"])
@pytest.mark.parametrize("mode", MODES)
def test_resume_from_lightnings_checkpoint_is_bitwise(mode, states, tmp_path):
    torch.manual_seed(1)
    whole = Regression()
    first = copy.deepcopy(whole)
    trainer(PureBF16Precision(mode, states), tmp_path, max_epochs=3).fit(whole, loader())
    halted = trainer(PureBF16Precision(mode, states), tmp_path, max_epochs=1)
    halted.fit(first, loader())
    halted.save_checkpoint(tmp_path / "first.ckpt")  # after the fit: teardown must not have lost anything
    assert torch.load(tmp_path / "first.ckpt", weights_only=True)["optimizer_states"]
    resumed = Regression()  # other initial weights, in float32
    trainer(PureBF16Precision(mode, states), tmp_path, max_epochs=3).fit(
        resumed, loader(), ckpt_path=tmp_path / "first.ckpt", weights_only=True
    )
    for left, right in zip(state_of(whole), state_of(resumed), strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


def gradient_dtypes(module: nn.Module) -> list[torch.dtype]:
    return [parameter.grad.dtype for parameter in module.parameters() if parameter.grad is not None]


def test_gradients_over_several_batches_are_float32_and_a_report_says_so(tmp_path):
    seen, said = [], []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            seen.extend(gradient_dtypes(pl_module))
            said.append(facts(trainer, 0).precision)

    model = Regression()
    trainer(PureBF16Precision(), tmp_path, accumulate_grad_batches=2, callbacks=[Look()]).fit(model, loader())
    assert set(seen) == {FP32}
    assert set(said) == {"bf16-true, gradients in float32"}
    assert next(model.parameters()).grad_dtype == BF16  # as before the fit


@pytest.mark.parametrize(
    ("grad_dtype", "accumulate", "expected"),
    [("auto", 1, BF16), ("bfloat16", 2, BF16), ("float32", 1, FP32)],
)
def test_grad_dtype_is_what_was_asked_for(grad_dtype, accumulate, expected, tmp_path):
    seen = []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            seen.extend(gradient_dtypes(pl_module))

    precision = PureBF16Precision(grad_dtype=grad_dtype)
    trainer(precision, tmp_path, accumulate_grad_batches=accumulate, callbacks=[Look()]).fit(
        Regression(), loader()
    )
    assert set(seen) == {expected}


class Unfreezing(BaseFinetuning):
    """Its backbone joins the optimizer in the second epoch."""

    def freeze_before_training(self, pl_module) -> None:
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module, epoch, optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer)


class Frozen(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        return functional.mse_loss(self.last(self.first(batch[0])).float(), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.last.parameters(), lr=0.01)


def test_parameters_that_join_later_get_the_same_gradients(tmp_path):
    seen = {}

    class Look(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            seen.update({n: p.grad.dtype for n, p in pl_module.named_parameters() if p.grad is not None})

    callbacks = [Unfreezing(), Look()]
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "callbacks": callbacks}
    trainer(PureBF16Precision(), tmp_path, **options).fit(Frozen(), loader())
    assert len(seen) == 4
    assert set(seen.values()) == {FP32}


class Still(Regression):
    """Trains with a learning rate of zero, so that its float32 weights are what they were."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.0)

    def validation_step(self, batch, batch_idx) -> None:
        self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def find_rate(trainer: pl.Trainer, model: Still) -> None:
    Tuner(trainer).lr_find(model, loader(), num_training=3, update_attr=False)


def validate(trainer: pl.Trainer, model: Still) -> None:
    trainer.validate(model, loader(), verbose=False)


def fit_before(trainer: pl.Trainer, model: Still) -> None:
    trainer.fit(model, loader())
    trainer.fit_loop.max_epochs = 2


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`.*")
@pytest.mark.parametrize("before", [find_rate, validate, fit_before])
def test_what_runs_before_a_fit_takes_no_bits_from_it(before, tmp_path):
    model, precision = Still(), PureBF16Precision("split")
    initial = [parameter.detach().clone() for parameter in model.parameters()]
    runner = trainer(precision, tmp_path)
    before(runner, model)
    runner.fit(model, loader())
    trained = [weight for _, weight in precision.compensations[0].float32_weights()]
    assert len(trained) == 4
    for weight, truth in zip(trained, initial, strict=True):
        assert torch.equal(weight, truth)


def test_a_schedule_of_accumulation_counts_too(tmp_path):
    """Gradients would change their dtype in the fifth epoch: they are float32 from the first on."""
    seen = set()

    class Look(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            seen.update(gradient_dtypes(pl_module))

    callbacks = [GradientAccumulationScheduler({0: 1, 4: 8}), Look()]
    trainer(PureBF16Precision(), tmp_path, callbacks=callbacks).fit(Regression(), loader())
    assert seen == {FP32}


def test_parts_can_be_set_when_gradients_exist(tmp_path):
    precision, seen = PureBF16Precision(), []

    class Split(Callback):
        def on_after_backward(self, trainer, pl_module) -> None:
            for parts in (3, 1):
                precision.set_gradient_parts(parts)
                seen.append(set(gradient_dtypes(pl_module)))

    trainer(precision, tmp_path, callbacks=[Split()]).fit(Regression(), loader())
    assert seen == [{FP32}, {BF16}] * 8


@pytest.fixture
def one_process_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_keeps_bfloat16_gradients_and_says_so(one_process_group):
    """DDP's reducer refuses gradients of another dtype than the weights'."""
    net = nn.Linear(4, 2).to(BF16)
    model = nn.parallel.DistributedDataParallel(net)
    precision = PureBF16Precision()
    precision.connect(model, [torch.optim.SGD(net.parameters(), lr=0.1)], [])
    with pytest.warns(UserWarning, match="3 micro-batches add up in bfloat16.*DistributedDataParallel"):
        precision.set_gradient_parts(3)
    model(torch.ones(2, 4, dtype=BF16)).sum().backward()
    assert set(gradient_dtypes(net)) == {BF16}
    precision.teardown()
    insisting = PureBF16Precision(grad_dtype="float32")
    with pytest.raises(ValueError, match=r"not possible: DistributedDataParallel.*grad_dtype='bfloat16'"):
        insisting.connect(model, [torch.optim.SGD(net.parameters(), lr=0.1)], [])
    insisting.teardown()


def test_sums_of_many_small_parts_do_not_stall():
    """The reason for float32 gradients: 512 parts of 1e-3."""
    sums = {}
    for grad_dtype in ("bfloat16", "float32"):
        weight = nn.Parameter(torch.ones(1, dtype=BF16))
        if grad_dtype == "float32":
            weight.grad_dtype = FP32
        for _ in range(512):
            (weight * 1e-3).sum().backward()
        assert weight.grad is not None
        sums[grad_dtype] = weight.grad.item()
    assert sums["float32"] == pytest.approx(512 * torch.tensor(1e-3, dtype=BF16).item(), rel=1e-3)
    assert sums["bfloat16"] < 0.51


class Skipping(Regression):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*training_step.* returned .None.*")
def test_a_step_without_loss_changes_nothing(tmp_path):
    before: list[torch.Tensor] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            before[:] = [parameter.detach().clone() for parameter in pl_module.parameters()]

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            same = [torch.equal(a, b) for a, b in zip(before, pl_module.parameters(), strict=True)]
            assert all(same) if batch_idx % 2 else not all(same)

    model, precision = Skipping(), PureBF16Precision()
    trainer(precision, tmp_path, callbacks=[Look()], accumulate_grad_batches=1).fit(model, loader())
    step = model.trainer.optimizers[0].state[next(model.parameters())]["step"]
    assert step.item() == 4


class Adversarial(pl.LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        features, target = batch
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        for optimizer, loss in (
            (first, lambda: self.critic(self.generator(features)).float().pow(2).mean()),
            (second, lambda: functional.mse_loss(self.critic(self.generator(features)).float(), target)),
        ):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return torch.optim.SGD(self.generator.parameters(), lr=1e-4), torch.optim.AdamW(
            self.critic.parameters()
        )


def test_manual_optimization_with_two_optimizers(tmp_path):
    model, precision = Adversarial(), PureBF16Precision("split")
    start = [parameter.detach().clone() for parameter in model.parameters()]
    trainer(precision, tmp_path).fit(model, loader())
    assert len(precision.compensations) == 2
    assert model.trainer.global_step == 16
    trained = [weight for handle in precision.compensations for _, weight in handle.float32_weights()]
    for before, after in zip(start, trained, strict=True):
        assert not torch.equal(before, after)
        assert (before - after).abs().max() < 0.1
    assert not torch.equal(
        trained[0], trained[0].to(BF16).float()
    )  # updates below bfloat16's grain are there


class TokenModel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32)
        self.batch_norm = nn.BatchNorm1d(16)

    def training_step(self, batch, batch_idx):
        (ids,) = batch
        assert ids.dtype == torch.int64
        hidden = self.norm(self.embed(ids))
        hidden = hidden + self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_exceptions_train_in_float32_beside_the_rest(tmp_path):
    ids = torch.randint(32, (16, 6), generator=torch.Generator().manual_seed(0))
    model, precision = TokenModel(), PureBF16Precision(fp32_exceptions=["LayerNorm"])
    start = model.norm.weight.detach().clone()
    trainer(precision, tmp_path).fit(model, DataLoader(TensorDataset(ids), batch_size=4))
    assert model.norm.weight.dtype == model.batch_norm.running_mean.dtype == FP32  # pyright: ignore
    assert model.head.weight.dtype == BF16
    assert not torch.equal(model.norm.weight, start)
    state = model.trainer.optimizers[0].state[model.norm.weight]
    assert state["exp_avg_sq"].dtype == FP32
    assert "compensation" not in state


def test_an_exception_that_matches_nothing_is_reported(tmp_path):
    with pytest.warns(NoEffectWarning, match="nrom"):
        trainer(PureBF16Precision(fp32_exceptions=["nrom"]), tmp_path).fit(Regression(), loader())


class Configured(TokenModel):
    def __init__(self) -> None:
        pl.LightningModule.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "embed"):
            self.embed, self.norm, self.head = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32)
            self.batch_norm = nn.BatchNorm1d(16)
            assert torch.arange(0.0, 300.0)[-1].item() == 299.0


def test_a_late_built_model_is_bfloat16_from_birth(tmp_path):
    born = {}

    class Look(PureBF16Precision):
        def convert_module(self, module):
            born.update({name: parameter.dtype for name, parameter in module.named_parameters()})
            return super().convert_module(module)

    ids = torch.randint(32, (16, 6))
    model = Configured()
    trainer(Look(), tmp_path).fit(model, DataLoader(TensorDataset(ids), batch_size=4))
    assert {name for name, dtype in born.items() if dtype != BF16} == {"batch_norm.weight", "batch_norm.bias"}
    assert model.batch_norm.weight.dtype == FP32


def test_fit_then_test_then_fit_again(tmp_path):
    class Tested(Regression):
        def test_step(self, batch, batch_idx):
            features, target = batch
            self.log("loss", functional.mse_loss(self.net(features), target))

    model, precision = Tested(), PureBF16Precision()
    runner = trainer(precision, tmp_path)
    runner.fit(model, loader())
    runner.test(model, loader(), verbose=False)
    assert precision.compensations[0].optimizer is runner.optimizers[0]
    runner = trainer(PureBF16Precision("split"), tmp_path)
    runner.fit(model, loader())
    assert {parameter.dtype for parameter in model.parameters()} == {BF16}


@pytest.mark.parametrize(
    "options",
    [{"compensation": "kahn"}, {"states": "tiny"}, {"grad_dtype": "fp16"}, {"fp32_exceptions": "norm"}],
)
def test_bad_options_are_refused_at_construction(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        PureBF16Precision(**options)


@pytest.mark.parametrize(
    "options", [{}, {"compensation": "split", "states": "exact", "fp32_exceptions": ["a", "b"]}]
)
def test_repr_round_trips(options):
    precision = PureBF16Precision(**options)
    again = eval(repr(precision))
    assert repr(again) == repr(precision)
    assert again.fp32_exceptions == tuple(options.get("fp32_exceptions", ()))
