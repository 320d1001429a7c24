import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.loops.optimization.automatic import Closure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_memkit import MemoryBudget, PureBF16Precision
from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.micro_batching.sizes import failed_sizes
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.toys import TokenTagger, loader, tagged_rows, trained, trainer, weights

EXACT = {torch.float64: 1e-12, torch.float32: 2e-5}


def difference(a: nn.Module, b: nn.Module) -> float:
    return float((weights(a) - weights(b)).abs().max())


# Exactness against the unsplit batch


@pytest.mark.sampled(2)
@pytest.mark.parametrize("micro_batch_size", [1, 3, "auto"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.long
def test_twenty_steps_in_parts_are_the_unsplit_batch_s(dtype: torch.dtype, micro_batch_size: Any) -> None:
    whole, _ = trained(dtype=dtype)
    parts, _ = trained(MemoryBudget("1GiB", micro_batch_size=micro_batch_size), dtype=dtype)
    assert difference(whole, parts) <= EXACT[dtype]


def test_lightning_s_own_accumulation_is_the_control_that_differs() -> None:
    whole, _ = trained(dtype=torch.float64)
    control, _ = trained(dtype=torch.float64, data=loader(batch_size=2), accumulate_grad_batches=4)
    assert difference(whole, control) >= 1e-3


@pytest.mark.long
def test_loader_batches_accumulate_exactly_to_an_effective_batch() -> None:
    whole, _ = trained(dtype=torch.float64)
    budget = MemoryBudget("1GiB", micro_batch_size=1, effective_batch_size=8)
    parts, fitted = trained(budget, dtype=torch.float64, data=loader(batch_size=2))
    assert difference(whole, parts) <= 1e-12
    assert fitted.global_step == 20
    assert fitted.accumulate_grad_batches == 1  # given back


def test_logged_values_are_those_of_the_whole_batch() -> None:
    seen: list[dict[str, float]] = []

    class Logged(TokenTagger):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["logits"].shape == (8, 12, 50)
            assert len(batch["x"]) == 8
            seen.append({"returned": float(outputs["loss"])})

    def metrics(*callbacks: Any) -> dict[str, float]:
        _, fitted = trained(*callbacks, module=Logged, dtype=torch.float64)
        return {name: float(value) for name, value in fitted.callback_metrics.items()}

    whole, parts = metrics(), metrics(MemoryBudget("1GiB", micro_batch_size=3))
    assert whole.keys() == parts.keys() == {"loss", "loss_step", "loss_epoch", "labels", "longest", "mean_x"}
    for name in whole:
        assert whole[name] == pytest.approx(parts[name], rel=1e-6), name
    assert [row["returned"] for row in seen[:20]] == pytest.approx([row["returned"] for row in seen[20:]])


def test_a_logged_value_that_does_not_come_from_parts_is_named() -> None:
    class Spread(TokenTagger):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            self.log("spread", output["logits"].std())
            return output

    with pytest.warns(
        UserWarning, match="What training_step logs as 'spread' can't be made from a batch's micro-batches"
    ):
        trained(MemoryBudget("1GiB", micro_batch_size=2), module=Spread, max_steps=4)


def test_parts_without_a_loss_are_skipped_as_batches_are() -> None:
    class Skips(TokenTagger):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            if batch_idx == 1 or bool((batch["labels"] == -100).all()):
                return None
            return super().training_step(batch, batch_idx)

    Closure.warning_cache.clear()  # Lightning says it once a process
    with pytest.warns(UserWarning, match="returned `None`"):
        plain, _ = trained(module=Skips, max_steps=6, dtype=torch.float64)
    budget = MemoryBudget("1GiB", micro_batch_size=2)
    module, fitted = trained(budget, module=Skips, max_steps=6, dtype=torch.float64)
    assert fitted.global_step == 6
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
@pytest.mark.long
def test_lightning_s_own_precisions_work(precision: Any) -> None:
    whole, _ = trained(precision=precision, max_steps=5)
    parts, _ = trained(MemoryBudget("1GiB", micro_batch_size=3), precision=precision, max_steps=5)
    assert difference(whole, parts) <= (1e-12 if precision == "64-true" else 2e-3)


# Third-party modules with ordinary loaders


class DigitsNet(LightningModule):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU(),
                                 nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 36, 10))  # fmt: skip
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self.net(images)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class DemoTransformer(LightningTransformer):
    def prepare_data(self) -> None:
        """Lightning's demo would download its text here."""


def digits(batch_size: int = 16, shuffle: bool = True) -> DataLoader:
    data: Any = load_digits()
    images = torch.tensor(data.images[:256], dtype=torch.float32)[:, None] / 16
    return DataLoader(TensorDataset(images, torch.tensor(data.target[:256])), batch_size, shuffle=shuffle)


@pytest.mark.parametrize("name", ["demo transformer", "boring", "digits"])
@pytest.mark.long
def test_modules_of_others_train_as_unsplit(name: str) -> None:
    def make() -> tuple[LightningModule, DataLoader]:
        if name == "demo transformer":
            module = DemoTransformer(vocab_size=50)
            for child in module.modules():
                if isinstance(child, nn.Dropout):
                    child.p = 0.0
                if isinstance(child, nn.MultiheadAttention):
                    child.dropout = 0.0
            rows = [(row["x"], row["x"].roll(1)) for row in tagged_rows(40)]
            return module, DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
        if name == "boring":
            return BoringModel(), DataLoader(torch.randn(64, 32), batch_size=8)  # pyright: ignore
        module = DigitsNet()
        module.net[4].p = 0.0  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        return module, digits()

    results = []
    for callbacks in ([], [MemoryBudget("1GiB", micro_batch_size=3)]):
        torch.manual_seed(5)
        module, data = make()
        module, fitted = trained(*callbacks, module=module, data=data, max_steps=5)
        results.append((module, dict(fitted.callback_metrics)))
    assert difference(results[0][0], results[1][0]) <= 2e-5
    for key, value in results[0][1].items():
        assert float(value) == pytest.approx(float(results[1][1][key]), abs=1e-5)


# The decomposability probe


class Custom(LightningModule):
    def __init__(self, kind: str, width: int = 8) -> None:
        super().__init__()
        self.kind, self.net = kind, nn.Linear(32, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.net(batch)
        if self.kind == "contrastive":
            out = F.normalize(out)
            return F.cross_entropy(out @ out.roll(1, 1).T / 0.1, torch.arange(len(out)))
        return out.square().sum() if self.kind == "sum" else out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def vectors() -> DataLoader:
    rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    return DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]


def test_losses_that_do_not_decompose_are_refused_with_cause_and_remedy() -> None:
    module = Custom("contrastive")
    before = weights(module).clone()
    with pytest.raises(BudgetError, match="act on each other.*keep the batch whole"):
        trained(MemoryBudget("1GiB", micro_batch_size=2), module=module, data=vectors())
    assert torch.equal(weights(module), before)


class Recurrent(LightningModule):
    """Keeps the state of each row's sequence from batch to batch, as truncated backpropagation does."""

    def __init__(self, rows: int | None = None) -> None:
        super().__init__()
        self.cell, self.rows, self.steps = nn.GRUCell(32, 8), rows, 0
        self.hidden: Tensor | None = None
        self.last_loss: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        state = self.hidden if self.hidden is not None else torch.zeros(self.rows or len(batch), 8)
        hidden = self.cell(batch, state[: len(batch)])
        self.hidden = hidden.detach()
        self.last_loss = loss = hidden.square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("rows", [None, 8])
def test_a_state_that_is_handed_on_from_batch_to_batch_is_refused_by_name(rows: int | None) -> None:
    """Without rows the second part fails on the first one's shape; with them it would silently go on with it."""
    with pytest.raises(
        BudgetError, match=r"hands values on to the next one, in .*hidden.*keep the batch whole"
    ):
        trained(
            MemoryBudget("1GiB", micro_batch_size=2, within="step"),
            module=lambda: Recurrent(rows),
            data=vectors(),
            max_steps=2,
        )


def test_an_attribute_that_a_step_sets_and_none_reads_is_no_state() -> None:
    class Notes(Custom):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.last_loss = super().training_step(batch, batch_idx)
            return self.last_loss

    whole, _ = trained(module=lambda: Notes("mean"), data=vectors(), max_steps=3)
    budget = MemoryBudget("1GiB", micro_batch_size=3)
    parts, _ = trained(budget, module=lambda: Notes("mean"), data=vectors(), max_steps=3)
    assert difference(whole, parts) <= 2e-5


def test_an_unsplit_batch_may_have_any_loss() -> None:
    module, _ = trained(MemoryBudget("1GiB"), module=Custom("contrastive"), data=vectors(), max_steps=2)
    assert isinstance(module, Custom)


def test_a_sum_that_is_named_trains_as_unsplit() -> None:
    whole, _ = trained(module=lambda: Custom("sum"), data=vectors())
    parts, _ = trained(
        MemoryBudget("1GiB", micro_batch_size=3, weigh_by="sum"), module=lambda: Custom("sum"), data=vectors()
    )
    assert difference(whole, parts) <= 2e-5


def test_batch_normalization_is_named_in_a_warning_and_allowed() -> None:
    with pytest.warns(UserWarning, match=r"net\.1 normalize with statistics of the batch"):
        module, _ = trained(MemoryBudget("1GiB", micro_batch_size=4), module=DigitsNet(norm=True), data=digits(),
                            max_steps=3)  # fmt: skip
    assert int(module.net[1].num_batches_tracked) == 3 * 4  # pyright: ignore


@pytest.mark.parametrize("seed", [0, 2])
def test_a_metric_beside_dropout_is_no_reason_to_refuse(seed: int) -> None:
    torch.manual_seed(seed)  # of those with which parts get other predictions right than their whole does
    budget = MemoryBudget("1GiB", micro_batch_size=4)
    fitted = trainer(budget, max_steps=2)
    fitted.fit(DigitsNet(), digits())
    assert fitted.global_step == 2
    assert budget.history == [(0, 4)]


class CausalTagger(TokenTagger):
    """Shifts inside, as transformers' models do: each row's first label never counts."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        logits = self.head(self.mix(self.embedding(batch["x"]))[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class SampleMean(TokenTagger):
    """A mean over samples of each one's mean."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        logits = self.head(self.mix(self.embedding(batch["x"]))[0])
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        return (losses.sum(1) / (batch["labels"] != -100).sum(1)).mean()


@pytest.mark.parametrize("kind", [TokenTagger, CausalTagger, SampleMean])
@pytest.mark.long
def test_the_probe_finds_what_a_loss_is_a_mean_over(kind: type[TokenTagger]) -> None:
    whole, _ = trained(module=kind, dtype=torch.float64)
    parts, _ = trained(MemoryBudget("1GiB", micro_batch_size=3), module=kind, dtype=torch.float64)
    assert difference(whole, parts) <= 1e-12


@pytest.mark.long
def test_the_probe_takes_two_rows_where_five_are_over_the_budget() -> None:
    rows: list[int] = []

    class Notes(TokenTagger):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
            rows.append(len(batch["x"]))
            output = super().training_step(batch, batch_idx)
            self.steps.clear()  # a list that grows would be asked about in further trials
            return output

    def probed(budget: str) -> list[int]:
        rows.clear()
        data = DataLoader(tagged_rows(8, length=400), batch_size=8)  # pyright: ignore[reportArgumentType]
        trainer(MemoryBudget(budget, micro_batch_size=1), max_steps=1).fit(Notes(), data)
        return rows[:12]

    # Each for its loss; whole, twice for noise and for hooks, its parts alone, the second part after the first.
    ones = [1] * 5
    assert probed("1GiB") == [*ones, 5, 5, 5, 2, 3, 2, 3]
    assert probed("1MiB") == [*ones, 5, 2, 2, 2, 1, 1, 1]  # the five ran into the budget


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [TokenTagger, CausalTagger, SampleMean])
@pytest.mark.parametrize("first", ["all labels", "prompts masked"])
@pytest.mark.long
def test_what_the_first_batch_can_not_tell_is_found_out_later(kind: type[TokenTagger], first: str) -> None:
    """Without ignored labels, or with every row's first one ignored, several ways weigh the first batch alike."""
    rows = tagged_rows(80)
    for row in rows[:8]:
        row["labels"] = row["x"].roll(1)
        if first == "prompts masked":
            row["labels"][:3] = -100
    data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    whole, _ = trained(module=kind, dtype=torch.float64, data=data, max_steps=10)
    parts, _ = trained(
        MemoryBudget("1GiB", micro_batch_size=3), module=kind, dtype=torch.float64, data=data, max_steps=10
    )
    assert difference(whole, parts) <= 1e-12


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.long
def test_a_transformers_model_on_padded_batches_is_weighed_by_its_shifted_labels(bf16: bool) -> None:
    transformers = pytest.importorskip("transformers")

    class Llama(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=64,
            )
            self.model = transformers.LlamaForCausalLM(config)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        def pad(name: str, fill: int) -> Tensor:
            return nn.utils.rnn.pad_sequence([row[name] for row in rows], True, fill)

        return {"input_ids": pad("x", 0), "labels": pad("labels", -100), "attention_mask": pad("mask", 0)}

    generator = torch.Generator().manual_seed(4)
    rows = []
    for _ in range(48):
        length = int(torch.randint(6, 40, (1,), generator=generator))
        x = torch.randint(0, 64, (length,), generator=generator)
        labels = x.clone()
        labels[: int(torch.randint(0, length - 3, (1,), generator=generator))] = -100
        rows.append({"x": x, "labels": labels, "mask": torch.ones(length, dtype=torch.int64)})
    data = DataLoader(rows, batch_size=8, collate_fn=collate)  # pyright: ignore[reportArgumentType]
    plugins: dict[str, Any] = {"plugins": [PureBF16Precision()]} if bf16 else {}
    whole, _ = trained(module=Llama, data=data, max_steps=6, **plugins)
    budget = MemoryBudget("1GiB", micro_batch_size=3)
    parts, _ = trained(budget, module=Llama, data=data, max_steps=6, **plugins)
    assert budget._engine is not None
    assert (
        budget._engine.choice.weighing.rules is not None
    )  # the loss itself shows how many labels it is a mean over
    assert budget._engine.choice.weighing.foretold.ways[0][0].count.start == 1
    norm = weights(whole).float().norm()
    relative = float((weights(whole).float() - weights(parts).float()).norm() / norm)
    assert relative <= (5e-3 if bf16 else 1e-5)


# Verification leaves no trace; the budget is kept


def test_verification_leaves_no_trace() -> None:
    """With one part for the whole batch, a run with the callback is bitwise the run without."""
    runs = []
    for callbacks in ([], [MemoryBudget("1GiB")]):
        with pytest.warns(UserWarning, match="normalize") if callbacks else nullwarns():
            torch.manual_seed(3)
            module = TokenTagger(dropout=0.3, norm=True)
            module, fitted = trained(*callbacks, module=module, data=loader(shuffle=True))
        runs.append(
            (module, {k: float(v) for k, v in fitted.callback_metrics.items()}, torch.get_rng_state())
        )
    (a, logged_a, rng_a), (b, logged_b, rng_b) = runs
    assert torch.equal(weights(a), weights(b))
    assert all(torch.equal(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True))
    assert logged_a == logged_b
    assert torch.equal(rng_a, rng_b)
    assert a.steps == b.steps  # the module's own list has no entry of a trial


class nullwarns:  # noqa: N801
    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...


class Fused(TokenTagger):
    """Its optimizer's step takes no memory of its own."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


@pytest.mark.long
def test_three_budgets_are_kept_by_three_sizes_with_one_result() -> None:
    results = []
    for budget in ("185KiB", "230KiB", "1MiB"):
        callback = MemoryBudget(budget, enforce="always")
        module, _ = trained(callback, module=Fused, max_steps=10)
        assert callback.sizing is not None
        assert callback.peak_bytes <= callback.budget_bytes
        results.append((callback.sizing.micro_batch_size, weights(module)))
    assert len({size for size, _ in results}) == 3
    assert all((w - results[-1][1]).abs().max() <= 1e-5 for _, w in results)


def test_a_budget_below_one_sample_says_by_how_much_and_what_helps() -> None:
    with pytest.raises(BudgetError) as caught:
        trained(MemoryBudget("100KiB"))
    text = str(caught.value)
    assert re.search(
        r"micro-batch of 1 needs [\d.]+ KiB at its peak, [\d.]+ KiB more than the budget's usable 95.00 KiB",
        text,
    )
    assert "PureBF16Precision" in text
    assert "optimizer states" in text


def test_a_given_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BudgetError, match='smaller micro_batch_size, or "auto"'):
        trained(MemoryBudget("300KiB", micro_batch_size=8))


@pytest.mark.long
def test_the_longest_samples_are_verified_not_the_first() -> None:
    rows = tagged_rows(64, length=4) + tagged_rows(64, length=40)

    def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {key: nn.utils.rnn.pad_sequence([i[key] for i in items], True, -100 if key == "labels" else 0)
                for key in items[0]}  # fmt: skip

    data = DataLoader(rows, batch_size=8, collate_fn=collate)  # pyright: ignore[reportArgumentType]
    callback = MemoryBudget("600KiB", enforce="always")
    trained(callback, data=data, max_steps=16)
    assert callback.retries == 0
    assert 1 <= callback.sizing.micro_batch_size < 8  # pyright: ignore[reportOptionalMemberAccess]
    assert callback.peak_bytes <= callback.budget_bytes


# Recovery

# Which allocations fail in turn; the fault sweep takes each.
a_failure_every = pytest.mark.parametrize("apart", [120, pytest.param(40, marks=pytest.mark.slow)])


class Faulty(MemoryBudget):
    """Fails one allocation of batch 2's step; `fail_at=None` only shrinks there: the oracle."""

    def __init__(self, fail_at: int | None, **options: Any) -> None:
        super().__init__("1GiB", micro_batch_size=8, **options)
        self.fail_at, self.meter = fail_at, ByteMeter(fail_at=fail_at)

    def drive(self, step: Any, optimize: Any) -> Any:
        if step.batch_idx != 2 or self._engine is None:
            return super().drive(step, optimize)
        if self.fail_at is None:
            self._engine.runner.partition.resize(4)
            step.run.set_gradient_parts(2)
        with self.meter:  # it fails once: the retry goes on
            return super().drive(step, optimize)


def faulty_run(fail_at: int | None) -> tuple[Faulty, TokenTagger, dict[str, float], Tensor]:
    callback = Faulty(fail_at)
    with pytest.warns(UserWarning, match="normalize"):
        fitted_module, fitted = trained(
            callback, module=lambda: TokenTagger(dropout=0.2, norm=True), max_steps=4
        )
    assert isinstance(fitted_module, TokenTagger)
    logged = {name: float(value) for name, value in fitted.callback_metrics.items()}
    return callback, fitted_module, logged, torch.get_rng_state()


@a_failure_every
@pytest.mark.long
def test_a_step_that_runs_out_of_memory_is_retried_bitwise(apart: int) -> None:
    """Against a fault-free run that uses the retry's partition from that step on."""
    whole, parts = faulty_run(10**9), faulty_run(None)
    counted = whole[0]
    assert counted.retries == 0
    repaired = 0
    points = range(0, counted.meter.allocations, apart)
    for index in points:
        callback, module, logged, rng = faulty_run(index)
        _, reference, expected, expected_rng = parts if callback.retries else whole
        repaired += not callback.retries  # the optimizer's own step goes on where it was
        assert torch.equal(weights(module), weights(reference)), index
        assert all(torch.equal(x, y) for x, y in zip(module.buffers(), reference.buffers(), strict=True))
        assert logged == expected
        assert torch.equal(rng, expected_rng)
        assert module.steps == reference.steps
    assert 0 < repaired < len(points)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before.*")
@pytest.mark.long
def test_larger_parts_are_tried_again_after_calm_steps_and_a_resume_goes_on_waiting(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_sizes, "_CALM_STEPS", 4)
    callback = Faulty(20)
    _, fitted = trained(callback, max_steps=10)
    assert callback.history == [(0, 8), (2, 4), (7, 8)]
    assert callback.retries == 1
    halted = Faulty(20)
    _, fitted = trained(halted, max_steps=5)
    fitted.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Faulty(10**9)
    resumed.micro_batch_size = "auto"  # else what the user says holds
    again = trainer(resumed, max_steps=10, gradient_clip_val=0.5)
    again.fit(TokenTagger(), loader(), ckpt_path=tmp_path / "half.ckpt")
    assert resumed.history == [(5, 4), (7, 8)]


class Hooked(TokenTagger):
    """Its optimizer's hook lowers the rate with every call; it runs out of memory where it is told to."""

    def __init__(self, fault: Mock) -> None:
        super().__init__()
        self._fault = (fault,)

    def configure_optimizers(self) -> Any:
        optimizer, calls = torch.optim.SGD(self.parameters(), 0.1), 0

        def pre_hook(*_: Any) -> None:
            nonlocal calls
            calls += 1
            optimizer.param_groups[0]["lr"] = 0.1 / calls
            self._fault[0]()

        optimizer.register_step_pre_hook(pre_hook)
        return optimizer


def test_a_retry_finds_what_an_optimizer_s_step_hooks_count_as_it_was() -> None:
    fault = Mock(side_effect=[None, torch.OutOfMemoryError("mine"), None, None])
    plain, _ = trained(MemoryBudget("1GiB", micro_batch_size=4), module=lambda: Hooked(Mock()), max_steps=3)
    retried = MemoryBudget("1GiB", micro_batch_size=4)
    module, _ = trained(retried, module=lambda: Hooked(fault), max_steps=3)
    assert (retried.retries, fault.call_count) == (1, 4)
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-5, atol=1e-7)


def test_a_retry_in_bf16_sums_its_parts_in_float32() -> None:
    """Against a fault-free run that uses the retry's partition, and so its gradients' dtype, from that step on."""
    runs = []
    for fail_at in (20, None):
        callback = Faulty(fail_at)
        module, _ = trained(callback, max_steps=4, plugins=[PureBF16Precision()])
        runs.append((callback.retries, weights(module)))
    assert (runs[0][0], runs[1][0]) == (1, 0)
    assert torch.equal(runs[0][1], runs[1][1])


class Raises(TokenTagger):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.armed = error, False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.armed = batch_idx == 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.armed:
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), KeyError("x"), RuntimeError("NCCL error: out of memory")]
)
@pytest.mark.long
def test_other_errors_surface_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        trained(MemoryBudget("1GiB"), module=Raises(error))
    assert caught.value is error


def test_an_interrupt_is_no_reason_to_retry() -> None:
    """Lightning turns it into an exit of its own."""
    without, budget = Raises(KeyboardInterrupt()), MemoryBudget("1GiB")
    with pytest.raises(BaseException) as plain:  # noqa: PT011
        trained(module=without)
    module = Raises(KeyboardInterrupt())
    with pytest.raises(type(plain.value)):
        trained(budget, module=module)
    assert budget.retries == 0
    assert len(module.steps) == len(without.steps) == 2


def test_at_a_micro_batch_of_one_the_error_names_remedies() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"micro-batch of 1 runs out .*ActivationCheckpointing"):
        trained(MemoryBudget("1GiB", micro_batch_size=2), module=Raises(torch.OutOfMemoryError("dry")))
    with pytest.raises(torch.OutOfMemoryError, match="dry"):
        trained(MemoryBudget("1GiB", recover=False), module=Raises(torch.OutOfMemoryError("dry")))


# Bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": -1.0}, "outside"),
        ({"budget": "many"}, "no positive size"),
        ({"micro_batch_size": 0}, "1 or more"),
        ({"effective_batch_size": 0}, "1 or more"),
        ({"weigh_by": "tokens"}, "causal_labels"),
        ({"headroom": 5}, "write 0.05"),
        ({"enforce": "never"}, "always"),
    ],
)
def test_bad_options_are_refused_at_construction(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MemoryBudget(**options)


def test_manual_optimization_is_left_alone_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"micro_batches\(batch, size\)"):
        _, fitted = trained(MemoryBudget("1GiB"), module=ManualOptimBoringModel(), max_steps=2, gradient_clip_val=None,
                            data=DataLoader(torch.randn(64, 32), batch_size=8))  # fmt: skip  # pyright: ignore
    assert fitted.global_step == 2


def test_unweighted_accumulation_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="effective_batch_size"):
        trained(MemoryBudget("1GiB"), max_steps=2, accumulate_grad_batches=2)


def test_a_batch_that_can_not_be_split_names_the_remedy() -> None:
    class Odd(Custom):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch["a"]).mean() + batch["b"].mean()

    rows = [{"a": torch.randn(8, 32), "b": torch.randn(3)} for _ in range(4)]
    data = DataLoader(rows, batch_size=None)  # pyright: ignore[reportArgumentType]
    with pytest.warns(UserWarning, match=r"runs batches whole: .*disagree on the leading size"):
        _, fitted = trained(MemoryBudget("1GiB"), module=Odd("mean"), data=data, max_steps=2)
    assert fitted.global_step == 2
    with pytest.warns(
        UserWarning, match=r"not in micro-batches of 2: .*Collate it .* `rows`, `split\(sizes\)`"
    ):
        _, fitted = trained(
            MemoryBudget("1GiB", micro_batch_size=2), module=Odd("mean"), data=data, max_steps=2
        )
    assert fitted.global_step == 2
    with (
        pytest.warns(UserWarning, match="whole"),
        pytest.raises(BudgetError, match="disagree on the leading size"),
    ):
        trained(MemoryBudget("64KiB"), module=lambda: Odd("mean", 4096), data=data)


def test_effective_batches_must_be_whole_loader_batches() -> None:
    with pytest.raises(ValueError, match="write 8"):
        trained(MemoryBudget("1GiB", effective_batch_size=12))


@pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch:UserWarning"
)
@pytest.mark.long
def test_the_chosen_size_is_part_of_the_checkpoint(tmp_path: Any) -> None:
    callback = MemoryBudget("300KiB")
    _, fitted = trained(callback, max_steps=3)
    path = tmp_path / "last.ckpt"
    fitted.save_checkpoint(path)
    resumed = MemoryBudget("1GiB")
    trainer(resumed, max_steps=5, gradient_clip_val=0.5).fit(TokenTagger(), loader(), ckpt_path=path)
    assert callback.sizing is not None
    assert resumed.sizing is not None
    assert resumed.sizing.micro_batch_size == callback.sizing.micro_batch_size < 8


# What a review by adversaries has found


@pytest.mark.long
def test_an_error_gives_the_seams_back_and_the_next_fit_is_right() -> None:
    class Augmented(TokenTagger):
        transferred = 0

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            Augmented.transferred += 1
            return {**batch, "x": batch["x"].flip(0), "labels": batch["labels"].flip(0)}

    fitted = trainer(MemoryBudget("64KiB"), max_steps=2)
    with pytest.raises(BudgetError):
        fitted.fit(Augmented(), loader())
    assert "batch_to_device" not in vars(fitted.strategy)
    fitted.callbacks[0].budget = "1GiB"  # pyright: ignore[reportAttributeAccessIssue]
    Augmented.transferred = 0
    fitted.fit(Augmented(), loader())
    assert Augmented.transferred >= 2
    assert fitted.fit_loop.epoch_loop.automatic_optimization.__class__.__name__ == "_AutomaticOptimization"


def test_validation_before_the_fit_leaves_inference_tensors_that_are_no_obstacle() -> None:
    class Measured(TokenTagger):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.seen = batch["x"].float().mean() * 1.0

    fitted = trainer(MemoryBudget("1GiB", micro_batch_size=3), max_steps=2)
    module = Measured()
    fitted.validate(module, loader(count=16), verbose=False)
    fitted.fit(module, loader(), loader(count=16))
    assert fitted.global_step == 2


class InWindow(MemoryBudget):
    """Fails one allocation of forward or backward in batch 6, the window's third; None only shrinks there."""

    def __init__(self, fail_at: int | None) -> None:
        super().__init__("1GiB", micro_batch_size=2, effective_batch_size=8)
        self.fail_at, self.meter = fail_at, ByteMeter(fail_at=fail_at)

    def run(self, step: Any) -> Any:
        if step.batch_idx != 6 or self._engine is None:
            return super().run(step)
        if self.fail_at is None:
            self._engine.runner.partition.resize(1)
        with self.meter:
            return super().run(step)


def in_window(fail_at: int | None) -> tuple[InWindow, TokenTagger, Tensor]:
    budget = InWindow(fail_at)
    with pytest.warns(UserWarning, match="normalize"):
        module, _ = trained(
            budget,
            module=lambda: TokenTagger(dropout=0.2, norm=True),
            dtype=torch.float64,
            max_steps=4,
            data=loader(batch_size=2),
        )
    assert isinstance(module, TokenTagger)
    return budget, module, torch.get_rng_state()


@a_failure_every
@pytest.mark.long
def test_a_retry_late_in_an_accumulation_window_repeats_its_earlier_batches_bitwise(apart: int) -> None:
    """Backward has mixed the failed part's gradients into the window's: they are made anew, each as it was."""
    counted, *_ = in_window(10**9)
    _, reference, rng = in_window(None)
    for index in range(0, counted.meter.allocations, apart):
        budget, module, also_rng = in_window(index)
        assert budget.retries == 1
        assert torch.equal(weights(module), weights(reference)), index
        assert all(torch.equal(x, y) for x, y in zip(module.buffers(), reference.buffers(), strict=True))
        assert torch.equal(also_rng, rng)
        assert module.steps == reference.steps


class MaskedMean(TokenTagger):
    """A mean written by hand, which is nan where nothing counts."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
        logits = self.head(self.mix(self.embedding(batch["x"]))[0])
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        counted = batch["labels"] != -100
        return losses[counted].sum() / counted.sum()


def test_a_window_may_begin_with_a_batch_without_labels() -> None:
    rows = tagged_rows(160)
    for row in rows[16:18]:
        row["labels"][:] = -100
    data = [DataLoader(rows, batch_size=size) for size in (8, 2)]  # pyright: ignore[reportArgumentType]
    whole, _ = trained(module=MaskedMean, dtype=torch.float64, max_steps=5, data=data[0])
    budget = MemoryBudget("1GiB", micro_batch_size=2, effective_batch_size=8)
    parts, _ = trained(budget, module=MaskedMean, dtype=torch.float64, max_steps=5, data=data[1])
    assert difference(whole, parts) <= 1e-12


def test_a_loss_that_can_not_be_split_is_refused_when_a_later_batch_has_to_be() -> None:
    rows = torch.randn(28, 32, generator=torch.Generator().manual_seed(2))
    batches = [rows[:4], rows[4:12], rows[12:20], rows[20:]]
    with pytest.raises(BudgetError, match="act on each other"):
        trained(MemoryBudget("1GiB", micro_batch_size=4), module=lambda: Custom("contrastive"), max_steps=4,
                data=DataLoader(batches, batch_size=None))  # fmt: skip  # pyright: ignore[reportArgumentType]


@pytest.mark.long
def test_samples_too_alike_in_the_first_batch_are_told_apart_by_the_next() -> None:
    """A class-weighted mean: with one class in the first samples it looks like a plain one."""

    class Weighted(TokenTagger):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:  # pyright: ignore
            x, y = batch
            logits = self.head(self.mix(self.embedding(x))[0].mean(1))
            return F.cross_entropy(logits, y, weight=torch.linspace(0.1, 5, 50, dtype=logits.dtype))

    rows = [
        (row["x"], row["x"][0] * 0 + (3 if i < 6 else int(row["x"][1])))
        for i, row in enumerate(tagged_rows(80))
    ]
    data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    whole, _ = trained(module=Weighted, dtype=torch.float64, data=data)
    parts, _ = trained(
        MemoryBudget("1GiB", micro_batch_size=3), module=Weighted, dtype=torch.float64, data=data
    )
    assert difference(whole, parts) <= 1e-12


def test_a_data_set_and_an_optimizer_that_draw_see_the_same_numbers() -> None:
    class Augmenting(torch.utils.data.Dataset):
        rows = tagged_rows(80)

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            row = self.rows[index]
            return {"x": (row["x"] + torch.randint(0, 3, (1,))) % 50, "labels": row["labels"]}

    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.add_(torch.randn_like(p), alpha=1e-3)
            return result

    class Drawing(TokenTagger):
        calls = 0

        def configure_optimizers(self) -> Any:
            optimizer = Noisy(self.parameters(), lr=1e-2)
            optimizer.register_step_post_hook(lambda *_: setattr(Drawing, "calls", Drawing.calls + 1))
            return optimizer

    runs = []
    for callbacks in ([], [MemoryBudget("1GiB")]):
        Drawing.calls = 0
        data = DataLoader(Augmenting(), batch_size=8)
        runs.append((weights(trained(*callbacks, module=Drawing, data=data, max_steps=4)[0]), Drawing.calls))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1] > 0


def test_a_step_that_wants_so_many_samples_runs_whole_but_not_in_parts() -> None:
    class Views(Custom):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch.view(4, 2, 32)).square().mean()

    _, fitted = trained(MemoryBudget("1GiB"), module=lambda: Views("mean"), data=vectors(), max_steps=2)
    assert fitted.global_step == 2
    with pytest.raises(BudgetError, match="fails on a micro-batch"):
        trained(MemoryBudget("1GiB", micro_batch_size=4), module=lambda: Views("mean"), data=vectors())


def test_sparse_gradients_and_losses_with_noise_of_their_own() -> None:
    class Sparse(TokenTagger):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16, sparse=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    whole, _ = trained(module=Sparse, max_steps=5, gradient_clip_val=None)
    parts, _ = trained(MemoryBudget("1GiB", 3), module=Sparse, max_steps=5, gradient_clip_val=None)
    assert difference(whole, parts) <= 2e-5

    class Diffusing(Custom):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.net(batch + torch.randn_like(batch)) - 1).square().mean()

    budget = MemoryBudget("1GiB", 3)
    trained(budget, module=lambda: Diffusing("mean"), data=vectors(), max_steps=2)
    assert budget.history[-1].micro_batch_size == 3  # its parts were compared with the noise of their rows


def test_accumulation_that_is_asked_for_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="remove accumulate_grad_batches"):
        trained(MemoryBudget("1GiB", effective_batch_size=16), accumulate_grad_batches=2)


def test_an_effective_batch_is_known_before_schedulers_ask_for_the_number_of_steps() -> None:
    class OneCycle(TokenTagger):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.total = int(self.trainer.estimated_stepping_batches)
            return optimizer

    module, _ = trained(MemoryBudget("1GiB", effective_batch_size=8), module=OneCycle, data=loader(2, 80),
                        max_steps=-1, max_epochs=1)  # fmt: skip
    assert module.total == 10


@pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch:UserWarning"
)
def test_on_resume_what_the_user_says_holds_and_a_size_that_no_longer_fits_is_measured_anew(
    tmp_path: Any,
) -> None:
    path = tmp_path / "last.ckpt"
    _, fitted = trained(MemoryBudget("1GiB"), max_steps=2)
    fitted.save_checkpoint(path)
    explicit = MemoryBudget("1GiB", micro_batch_size=2)
    trainer(explicit, max_steps=3).fit(TokenTagger(), loader(), ckpt_path=path)
    assert explicit.sizing is not None
    assert explicit.sizing.micro_batch_size == 2
    tight = MemoryBudget("230KiB")
    with pytest.warns(UserWarning, match="another one is measured"):
        trainer(tight, max_steps=3).fit(TokenTagger(), loader(), ckpt_path=path)
    assert tight.sizing is not None
    assert tight.sizing.micro_batch_size < 8


def test_a_source_that_names_another_batch_size_than_its_loader_s_is_refused() -> None:
    class Owner(TokenTagger):
        batch_size = 2

        def train_dataloader(self) -> DataLoader:
            return loader(batch_size=4)

    with pytest.raises(ValueError, match="counts on 4 loader batches of 2.* holds 4"):
        trainer(MemoryBudget("1GiB", effective_batch_size=8), max_steps=2).fit(Owner())
