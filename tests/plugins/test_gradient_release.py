"""Training with the callback against training without it; run on ranks, this file is its own job of two."""

import os
import re
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_memkit import ActivationCheckpointing, MemoryBudget, PureBF16Precision
from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.optim.gradient_release import release_of
from lightning_memkit.plugins.callbacks.gradient_release import GradientRelease
from tests.plugins.ranks import leave
from tests.plugins.toys import ShardableTagger, TokenTagger, loader, tagged_rows, trained, trainer, weights
from tests.processes import run_on_ranks

AT_ONCE: dict[str, Any] = {"bundle_bytes": 0}


class Tagger(TokenTagger):
    """Two groups, and the blocks that activation checkpointing looks for."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__(dropout)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.mix(self.encoder(self.embedding(batch["x"])))[0]
        logits = self.head(self.dropout(hidden)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        early = [*self.embedding.parameters(), *self.encoder.parameters()]
        late = [*self.mix.parameters(), *self.head.parameters()]
        optimizer = torch.optim.AdamW([{"params": early}, {"params": late, "lr": 3e-3}], lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run(*callbacks: Callback, bf16: str = "", max_steps: int = 6, **options: Any) -> Tensor:
    plugins = {"plugins": [PureBF16Precision(bf16)]} if bf16 else {}  # pyright: ignore[reportArgumentType]
    options = {"module": Tagger, "gradient_clip_val": None} | options
    return weights(trained(*callbacks, max_steps=max_steps, **plugins, **options)[0])


NORM: dict[str, Any] = {"gradient_clip_val": 0.05}
VALUE: dict[str, Any] = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize("bundle_bytes", [0, 1 << 20])
@pytest.mark.parametrize("clipping", [{}, NORM, VALUE], ids=["free", "norm", "value"])
@pytest.mark.parametrize("bf16", ["", "kahan", "stochastic"])
@pytest.mark.long
def test_weights_are_bitwise_those_without_it(bf16, clipping, bundle_bytes):
    release = GradientRelease(bundle_bytes=bundle_bytes)
    assert torch.equal(run(bf16=bf16, **clipping), run(release, bf16=bf16, **clipping))


def test_clipping_in_these_tests_clips():
    free = run(module=Sgd)
    assert not torch.equal(run(module=Sgd, **NORM), free)
    assert not torch.equal(run(module=Sgd, **VALUE), free)


class Sgd(Tagger):
    """AdamW hides a gradient's scale."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "options", [NORM, VALUE, NORM | {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.0}]
)
def test_sgd_and_mixed_precision_too(options):
    assert torch.equal(run(module=Sgd, **options), run(GradientRelease(**AT_ONCE), module=Sgd, **options))


@pytest.mark.parametrize("bf16", ["", "split"])
def test_with_activation_checkpointing_and_two_backward_passes(bf16):
    options: Any = {"bf16": bf16, **NORM}
    plain = run(**options)
    both = run(ActivationCheckpointing(), GradientRelease(**AT_ONCE), **options)
    assert torch.equal(plain, both)


class Peak(Callback):
    """Counts the bytes of the third step, and the gradients alive before the optimizer's step."""

    def __init__(self) -> None:
        self.peak_bytes, self.alive_by_batch = 0, []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            self.meter = ByteMeter()
            self.meter.track(pl_module.parameters())
            for state in trainer.optimizers[0].state.values():
                self.meter.track(value for value in state.values() if isinstance(value, Tensor))
            self.meter.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        alive = sum(parameter.grad is not None for parameter in pl_module.parameters())
        self.alive_by_batch.append(alive)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            self.meter.__exit__(None, None, None)
            self.peak_bytes = self.meter.peak_bytes


class Changes(Callback):
    """Clips no longer from the third batch on, and gives the optimizer the head's weights at the second."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            trainer.optimizers[0].add_param_group({"params": cast(Headless, pl_module).head.parameters()})
        if batch_idx == 2:
            trainer.gradient_clip_val = None


class Headless(Tagger):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.embedding.parameters(), *self.encoder.parameters()], lr=0.1)


@pytest.mark.filterwarnings("ignore:Peak.on_before_optimizer_step find no gradients")
@pytest.mark.parametrize("clipping", [NORM, VALUE], ids=["norm", "value"])
def test_groups_and_clipping_may_change_between_steps(clipping):
    peak = Peak()
    plain = run(Changes(), module=Headless, **clipping)
    assert torch.equal(run(Changes(), GradientRelease(), peak, module=Headless, **clipping), plain)
    assert peak.alive_by_batch == [6, 4, 4, 4, 4, 4]  # the recurrent layer has no optimizer


class Wide(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.filterwarnings("ignore:Peak.on_before_optimizer_step find no gradients")
@pytest.mark.parametrize("clipping", [{}, NORM], ids=["free", "norm"])
@pytest.mark.parametrize("bf16", ["", "kahan"])
def test_the_peak_falls_by_the_gradients(bf16, clipping):
    data: Any = torch.randn(12, 512)
    found: list[Any] = []
    for callbacks in ([], [GradientRelease()]):
        peak = Peak()
        found.append(
            run(*callbacks, peak, bf16=bf16, max_steps=3, module=Wide, data=DataLoader(data, 4), **clipping)
        )
        found.append(peak)
    without, plain, released, release = found
    assert torch.equal(without, released)
    assert (plain.alive_by_batch[-1], release.alive_by_batch[-1]) == (16, 0)
    gradients = without.numel() * (2 if bf16 else 4)
    assert plain.peak_bytes - release.peak_bytes >= 0.7 * gradients  # all but one layer's of 8


def half_run(path: Path, *callbacks: Callback, bf16: str = "", module: Any = None) -> None:
    """One epoch of three steps, saved."""
    plugins: Any = {"plugins": [PureBF16Precision(bf16)]} if bf16 else {}  # pyright: ignore[reportArgumentType]
    _, fitted = trained(
        *callbacks, module=module or Calm, data=loader(count=24), max_steps=3, **plugins, **NORM
    )
    fitted.save_checkpoint(path)


def resumed(path: Path, *callbacks: Callback, bf16: str = "", module: Any = None) -> Tensor:
    torch.manual_seed(7)
    rest = (module or Calm)()
    plugins: Any = {"plugins": [PureBF16Precision(bf16)]} if bf16 else {}  # pyright: ignore[reportArgumentType]
    fitted = trainer(*callbacks, max_steps=-1, max_epochs=2, **plugins, **NORM)
    fitted.fit(rest, loader(count=24), ckpt_path=path, weights_only=True)
    return weights(rest)


class Calm(Tagger):
    """No dropout: random state is another plugin's business."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)


@pytest.mark.parametrize("bf16", ["", "kahan", "stochastic"])
@pytest.mark.parametrize("order", ["on", "off", "both"])
def test_a_run_may_be_resumed_with_it_or_without(order, bf16, tmp_path):
    first = [GradientRelease()] if order in ("off", "both") else []
    second = [GradientRelease()] if order in ("on", "both") else []
    half_run(tmp_path / "half.ckpt", *first, bf16=bf16)
    whole = run(bf16=bf16, module=Calm, data=loader(count=24), **NORM)
    assert torch.equal(resumed(tmp_path / "half.ckpt", *second, bf16=bf16), whole)


class Free(Sgd):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)


def clipped_by_previous(steps: int) -> Tensor:
    """The oracle: torch's own optimizer and clipping, told the norm of the step before."""
    torch.manual_seed(0)
    module, previous = Free(), None
    optimizer: Any = module.configure_optimizers()
    data: Any = loader()
    for _, batch in zip(range(steps), data, strict=False):
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(
            module.parameters(), 0.05, norm if previous is None else previous
        )
        optimizer.step()
        previous = norm
    return weights(module)


def test_clipping_by_the_previous_norm_is_what_it_says(tmp_path):
    exact = run(module=Free, **NORM)
    previous = run(GradientRelease("previous"), module=Free, **NORM)
    assert torch.equal(previous, clipped_by_previous(6))
    callback = GradientRelease("previous")
    run(callback, module=Free, **NORM)
    assert torch.equal(run(callback, module=Free, **NORM), previous)  # another run starts anew
    assert not torch.equal(previous, exact)
    assert torch.equal(
        run(GradientRelease("previous"), module=Free, max_steps=1, **NORM), clipped_by_previous(1)
    )
    half_run(tmp_path / "half.ckpt", GradientRelease("previous"), module=Free)
    whole = run(GradientRelease("previous"), module=Free, data=loader(count=24), **NORM)
    assert torch.equal(resumed(tmp_path / "half.ckpt", GradientRelease("previous"), module=Free), whole)


def test_a_previous_norm_that_is_not_finite_is_not_used():
    callback = GradientRelease("previous")
    callback.load_state_dict({"norm": torch.tensor(torch.inf)})

    class Loads(Callback):  # after the setup, as a resume does
        def on_fit_start(self, *args: Any) -> None:
            callback.load_state_dict({"norm": torch.tensor(torch.inf)})

    first = run(callback, Loads(), module=Free, max_steps=1, **NORM)
    assert torch.equal(first, clipped_by_previous(1))


class Skips(Free):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return None if batch_idx in (0, 3) else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("bf16", ["", "kahan"])
@pytest.mark.filterwarnings("ignore:.*training_step.* returned .None.")
def test_skipped_batches(bf16):
    options: Any = {"module": Skips, "bf16": bf16, **NORM}
    assert torch.equal(run(**options), run(GradientRelease(), **options))


class Wasteful(Free):
    """Makes gradients in training_step, which Lightning's zero_grad wipes, and has weights outside its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.ones(16))
        self.probed: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.head.weight.square().sum().backward()
        loss = super().training_step(batch, batch_idx)
        return loss + (self.embedding(batch["x"]) * self.probe).mean()

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.probe.grad is not None
        self.probed.append(self.probe.grad.clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p is not self.probe], lr=0.1)


def test_other_gradients_are_left_alone():
    results = []
    for callbacks in ([], [GradientRelease(**AT_ONCE)]):
        module, _ = trained(*callbacks, module=Wasteful, max_steps=3, **NORM)
        results.append([weights(module), *cast(Wasteful, module).probed])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


class OwnBackward(Free):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


class ShortBackward(Free):
    def backward(self, loss: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss.backward()


def test_a_modules_own_backward_is_the_one_that_is_measured():
    assert torch.equal(run(module=OwnBackward, **NORM), run(GradientRelease(), module=OwnBackward, **NORM))
    assert torch.equal(run(module=ShortBackward), run(GradientRelease(), module=ShortBackward))


def test_what_it_patches_is_given_back():
    during = []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, *args: Any) -> None:
            during.append(release_of(trainer.optimizers[0]))

    module, fitted = trained(GradientRelease(), Look(), module=Tagger, max_steps=2)
    assert during[0] is not None
    assert release_of(fitted.optimizers[0]) is None
    assert "clip_gradients" not in vars(fitted.precision_plugin)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())  # pyright: ignore


class Fails(Free):
    error: BaseException = torch.OutOfMemoryError("CUDA out of memory")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        table = self.embedding(batch["x"])
        if batch_idx == 1:
            table.register_hook(self._fail)  # late in backward
        hidden = self.mix(self.encoder(table))[0]
        return self.head(hidden).square().mean()

    def _fail(self, gradient: Tensor) -> None:
        raise self.error


class FailsOtherwise(Fails):
    error = ZeroDivisionError("here")


@pytest.mark.parametrize(
    ("module", "cause"), [(Fails, "Out of memory"), (FailsOtherwise, "ZeroDivisionError")]
)
def test_an_error_within_backward_says_that_the_weights_are_of_half_a_step(module, cause):
    message = rf"{cause} after \d+ parameters .* half a step.*Resume from an earlier checkpoint"
    with pytest.warns(UserWarning, match=message), pytest.raises(type(module.error)):
        trained(GradientRelease(**AT_ONCE), module=module, gradient_clip_val=None)


class Clips(Free):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:  # noqa: E501
        self.clip_gradients(optimizer, 1.0, "norm")


class Manual(Free):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Sparse(Free):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, sparse=True)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "accumulation": (Free, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2: .* set it to 1"),
    "schedule": (
        Free,
        {"callbacks": [GradientAccumulationScheduler({0: 1, 4: 3})]},
        "accumulate_grad_batches=3",
    ),
    "ddp": (Free, {"strategy": "ddp", "devices": 2}, "DDPStrategy.*ModelParallelStrategy"),
    "one-rank-ddp": (Free, {"strategy": "ddp"}, "DDPStrategy.*Use one device"),
    "scaler": (
        Free,
        {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]},
        "precision='16-mixed' .* 'bf16-mixed'",
    ),
    "manual": (Manual, {}, "Manual optimizes manually.*release_gradients"),
    "own-clipping": (Clips, {}, "Clips.configure_gradient_clipping .*Trainer.gradient_clip_val="),
    "short-backward": (ShortBackward, NORM, "ShortBackward.backward takes no retain_graph"),
    "sparse": (Sparse, {}, "embedding has sparse=True"),
    "recover": (
        Free,
        {"callbacks": [MemoryBudget(micro_batch_size=8)]},
        r"write MemoryBudget\(recover=False\)",
    ),
    "auto": (
        Free,
        {"callbacks": [MemoryBudget(recover=False)]},
        "micro_batch_size='auto'.*batch size as micro_batch",
    ),
    "effective": (
        Free,
        {"callbacks": [MemoryBudget(micro_batch_size=8, effective_batch_size=16, recover=False)]},
        "effective_batch_size=16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_at_setup(case):
    module, options, message = REFUSED[case]
    fitted = trainer(*options.get("callbacks", []), **{k: v for k, v in options.items() if k != "callbacks"})
    with pytest.raises(ValueError, match=message):
        GradientRelease().setup(fitted, module(), "fit")
    GradientRelease().setup(fitted, module(), "validate")


class Several(Free):
    def __init__(self) -> None:
        super().__init__()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.mix, self.head)]


class Lbfgs(Free):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_optimizers_are_refused_before_the_first_step():
    with pytest.raises(TypeError, match="LBFGS.step demands a closure"):
        run(GradientRelease(), module=Lbfgs)
    several = Several()
    fitted = trainer()
    fitted.strategy.optimizers = several.configure_optimizers()
    with pytest.raises(ValueError, match="Several has 2 optimizers.*several groups"):
        GradientRelease().on_fit_start(fitted, several)


def test_a_memory_budget_of_one_part_goes_with_it():
    budget: Any = {"micro_batch_size": 8, "recover": False}
    plain = run(module=Free, **NORM)
    both = run(MemoryBudget("1GiB", **budget), GradientRelease(**AT_ONCE), module=Free, **NORM)
    assert torch.equal(plain, both)
    with pytest.raises(ValueError, match=r"micro_batch_size=4\) splits a batch of 8, and"):
        run(MemoryBudget("1GiB", micro_batch_size=4, recover=False), GradientRelease(), module=Free)


@pytest.mark.long
def test_trials_of_a_memory_budget_are_no_previous_step(tmp_path):
    """Its trial steps run with other gradients, before the first step and after a resume."""

    def callbacks() -> list[Callback]:
        options: Any = {"micro_batch_size": 8, "recover": False}
        return [MemoryBudget("1GiB", **options), GradientRelease("previous", **AT_ONCE)]

    assert torch.equal(run(*callbacks(), module=Free, **NORM), clipped_by_previous(6))
    half_run(tmp_path / "half.ckpt", *callbacks(), module=Free)
    whole = run(GradientRelease("previous"), module=Free, data=loader(count=24), **NORM)
    assert torch.equal(resumed(tmp_path / "half.ckpt", *callbacks(), module=Free), whole)


class Looks(Free):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class LooksToo(Callback):
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass


def test_hooks_that_find_no_gradients_are_named():
    names = re.escape("Looks.on_before_optimizer_step, LooksToo.on_after_backward find no gradients")
    with pytest.warns(UserWarning, match=names):
        GradientRelease().setup(trainer(LooksToo()), Looks(), "fit")


def test_options():
    assert repr(GradientRelease("previous", 0)) == "GradientRelease(clipping='previous', bundle_bytes=0)"
    with pytest.raises(ValueError, match="clipping='last' is unknown; choose one of 'exact', 'previous'"):
        GradientRelease("last")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="bundle_bytes=-1 must be 0 or more"):
        GradientRelease(bundle_bytes=-1)


# Two ranks


class Sharded(ShardableTagger):
    """Each of its layers is sharded over the ranks (FSDP2)."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        for part in (self.embedding, self.mix, self.head):
            fully_shard(part, mesh=mesh["data_parallel"])


def sharded_run(callbacks: list[Callback], bf16: bool, **options: Any) -> Tensor:
    plugins: Any = {"plugins": [PureBF16Precision()]} if bf16 else {}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    fitted = trainer(*callbacks, max_steps=6, devices=2, strategy=strategy, use_distributed_sampler=False,
                     **plugins, **options)  # fmt: skip
    torch.manual_seed(0)
    module = Sharded().to(torch.bfloat16 if bf16 else torch.float32)
    rows: Any = tagged_rows(48)[fitted.global_rank :: 2]
    fitted.fit(module, DataLoader(rows, batch_size=4))
    whole: Any = [parameter.full_tensor() for parameter in module.parameters()]  # pyright: ignore
    return torch.cat([parameter.detach().flatten() for parameter in whole])


def main(path: str) -> None:
    torch.set_num_threads(1)
    equal = {}
    for bf16 in (False, True):
        for name, options in (("free", {}), ("norm", NORM)):
            plain = sharded_run([], bf16, **options)
            released = sharded_run([GradientRelease(**AT_ONCE)], bf16, **options)
            equal[f"{name}, {bf16=}"] = torch.equal(plain, released)
    if int(os.environ["RANK"]) == 0:
        torch.save(equal, path)
    leave()


def test_two_ranks_under_fsdp2_are_bitwise_those_without_it(tmp_path):
    path = tmp_path / "equal.pt"
    done = run_on_ranks("tests.plugins.test_gradient_release", str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    equal = torch.load(path)
    assert len(equal) == 4
    assert all(equal.values()), equal


if __name__ == "__main__":
    main(sys.argv[1])
