"""Plans of small modules: kept constraints, runs as planned, configs that run, and errors that say what is missing."""

import gc
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F

from lightning_memkit import (
    ActivationCheckpointing,
    Budget,
    ChunkedLoss,
    FSDP2Strategy,
    GradientRelease,
    MemoryBudget,
    PureBF16Precision,
    plan,
)
from lightning_memkit.cli import main
from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.memory.clocks import launched
from lightning_memkit.planning.budget import as_written
from lightning_memkit.planning.times import (
    TimesByRates,
    TimesHere,
    part_seconds,
    step_seconds,
)
from lightning_memkit.plugins.planning.prediction import predict_memory
from lightning_memkit.prediction.contained import contained
from lightning_memkit.prediction.devices import DEVICES
from lightning_memkit.prediction.work import MADE_AGAIN, RECORDED, OperatorWork, Work
from lightning_memkit.utilities.errors import PlanError
from tests.plugins.test_prediction import Language, Loader, batch

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")

ROOT = Path(__file__).resolve().parents[2]
ROWS, LENGTH = 16, 128


def given_batch() -> dict[str, torch.Tensor]:
    return batch(ROWS, LENGTH)


def on_cpu(memory: str, **options: Any) -> Budget:
    return Budget(memory, "cpu", **options)


def peak_of(kwargs: dict[str, Any]) -> int:
    """Of the steps after the first three, which MemoryBudget's trials belong to."""

    def train() -> int:
        prepare, traces, steps = MemoryBudget.prepare, [AllocatorTrace()], itertools.count(1)

        def prepared(self: MemoryBudget, step: Any) -> None:
            prepare(self, step)
            if next(steps) == 3:
                traces[0].__exit__(None, None, None)
                traces.append(AllocatorTrace().__enter__())

        MemoryBudget.prepare = prepared
        traces[0].__enter__()
        trainer = Trainer(
            **kwargs, max_steps=5, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Language(), Loader(given_batch(), 5))
        traces[-1].__exit__(None, None, None)
        return traces[0].live_bytes + traces[-1].peak_bytes

    gc.collect()
    return contained(train)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("memory", "fixed"), [("40MiB", {}), ("9MiB", {"precision": "32-true"})])
@pytest.mark.long
def test_training_as_planned_takes_what_was_predicted(memory, fixed):
    found = plan(Language(), given_batch(), on_cpu(memory), trainer=fixed)
    best = found.best
    assert best.exact
    assert best.taken_bytes <= found.budget.usable_bytes()
    real = peak_of(found.trainer_kwargs())
    assert real <= found.budget.bytes()
    assert best.taken_bytes == pytest.approx(real, rel=0.03)


@pytest.mark.long
def test_a_smaller_budget_gives_smaller_parts_and_the_table_says_why():
    fixed = {"precision": "32-true"}
    wide, tight = (
        plan(Language(), given_batch(), on_cpu(memory), trainer=fixed) for memory in ("64MiB", "7MiB")
    )
    assert wide.best.parts == 1
    assert tight.best.parts > 1
    assert tight.best.taken_bytes <= tight.budget.usable_bytes()
    assert "not needed: the whole batch fits with" in wide.reasons()
    assert " not needed: what fits above computes less" in str(wide)
    assert "changes" in str(tight)
    assert "No transformers model with an output head" in tight.reasons()  # nothing for ChunkedLoss
    assert "No choice of loss here: reasons() (memkit plan --explain) says why." in str(tight)
    seconds = [row.seconds for row in tight.fitting]
    assert seconds == sorted(seconds)
    assert len({(row.family, row.micro_batch_size) for row in tight.rows}) == len(tight.rows)


@pytest.mark.long
def test_what_is_given_is_kept():
    own = {
        "precision": "bf16-mixed",
        "callbacks": [ActivationCheckpointing("every:2"), MemoryBudget("6MiB", micro_batch_size=2)],
        "gradient_clip_val": 1.0,
    }
    found = plan(Language(), given_batch(), on_cpu("6MiB"), trainer=own)
    (row,) = found.rows
    assert (row.micro_batch_size, row.parts) == (2, 8)
    kwargs = found.trainer_kwargs()
    assert kwargs["precision"] == "bf16-mixed"
    assert kwargs["gradient_clip_val"] == 1.0
    assert kwargs["callbacks"] == own["callbacks"]  # no second MemoryBudget, no other policy
    assert "plugins" not in kwargs
    predicted = predict_memory(
        Language(),
        batch(2, LENGTH),
        trainer={
            "precision": "bf16-mixed",
            "callbacks": own["callbacks"][:1],
            "gradient_clip_val": 1.0,
            "accumulate_grad_batches": 2,
        },
    )
    others = (ROWS - 2) * LENGTH * 2 * 8  # the batch's other rows wait on the host, which is the device
    assert row.taken_bytes == predicted.peak_bytes + others
    plugin = plan(Language(), given_batch(), on_cpu("1GiB"), trainer={"plugins": PureBF16Precision()})
    assert {row.family["precision"].name for row in plugin.rows} == {"as given"}


@pytest.mark.long
def test_exact_plans_change_no_numbers():
    found = plan(Language(), given_batch(), on_cpu("14MiB", goal="exact"))
    assert {row.family.changes for row in found.rows} == {""}
    assert {row.family["precision"].name for row in found.rows} == {"float32"}
    assert found.trainer_kwargs()["precision"] == "32-true"


@pytest.mark.long
def test_the_least_memory_is_planned_for():
    fixed = {"plugins": PureBF16Precision()}
    least = plan(Language(), given_batch(), on_cpu("64MiB", goal="memory"), trainer=fixed)
    assert least.best.micro_batch_size == 1
    assert least.best.taken_bytes == min(row.taken_bytes for row in least.fitting)


@pytest.mark.long
def test_below_the_floor_it_says_the_floor_and_its_parts():
    found = plan(Language(), given_batch(), on_cpu("1MiB"))
    assert not found.fitting
    with pytest.raises(
        PlanError,
        match=r"Nothing fits 1.00 MiB on the CPU less 5% headroom. The nearest is .* too much \(.*weights",
    ):
        found.trainer_kwargs()


@pytest.mark.slow
def test_a_card_that_is_not_here():
    """The planner's page runs one like it."""

    class Wide(Language):
        def __init__(self) -> None:
            super().__init__(width=8192, layers=3)

    fixed = {"callbacks": [ActivationCheckpointing("full")]}
    found = plan(Wide, batch(8, 512), Budget("24GiB", "rtx4090"), trainer=fixed)  # 1.6 billion parameters
    on_the_card = [
        row for row in found.fitting if not row.family["offload"].name and not row.family.is_released
    ]
    assert {row.family["precision"].name for row in on_the_card} == {"bfloat16, Kahan"}
    assert len(found.fitting) > len(on_the_card)  # with states on the host others fit
    assert found.best.taken_bytes <= 0.95 * DEVICES["rtx4090"].usable_bytes
    assert "rtx4090" in str(found)


@pytest.mark.long
def test_a_transformers_model_has_its_loss_in_chunks():
    transformers = pytest.importorskip("transformers")

    class Causal(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.LlamaConfig(
                vocab_size=8192,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
            )
            self.model = transformers.LlamaForCausalLM(config)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch, use_cache=False).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    ids = torch.randint(0, 8192, (8, 64))
    fixed = {"precision": "32-true", "callbacks": [ActivationCheckpointing("full")]}
    found = plan(Causal(), {"input_ids": ids, "labels": ids}, on_cpu("32MiB", goal="memory"), trainer=fixed)
    by_loss = {row.family["loss"].name: row for row in found.fitting}
    chunked = by_loss["chunked"]
    assert chunked.taken_bytes < by_loss["own"].taken_bytes
    kwargs = found.trainer_kwargs(chunked)
    assert any(isinstance(callback, ChunkedLoss) for callback in kwargs["callbacks"])
    assert "the loss in float32" in chunked.family.changes


def test_modules_without_blocks_and_batches_without_rows():
    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.mse_loss(self.layer(batch["x"]).mean(), batch["y"].mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    found = plan(Plain(), {"x": torch.ones(4, 8), "y": torch.ones(3)}, on_cpu("1MiB"))
    assert any("The batch is taken whole: The tensors of this batch disagree" in note for note in found.notes)
    assert found.unavailable["checkpointing"].startswith("No repeated blocks")
    assert "No repeated blocks" not in str(found)
    assert "No choice of loss, checkpointing here: reasons() (memkit plan --explain) says why." in str(found)
    assert f"No choice of checkpointing here: {found.unavailable['checkpointing']}" in found.reasons()
    assert {row.parts for row in found.fitting} == {1}


class Normed(Language):
    def __init__(self) -> None:
        super().__init__(lambda *args, **kwargs: torch.optim.AdamW(*args, **kwargs, fused=True), layers=2)
        self.norm = nn.BatchNorm1d(256)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.norm(self.logits(batch["ids"]).mean(1)), batch["labels"][:, 0])


@pytest.mark.long
def test_what_can_not_run_is_a_row_that_says_so():
    fixed = {"gradient_clip_val": 1.0, "callbacks": [ActivationCheckpointing("full")]}
    found = plan(Normed(), given_batch(), on_cpu("64MiB"), trainer=fixed)
    failed = [row.rejected for row in found.rows if "a step fails" in row.rejected]
    assert failed  # Lightning refuses to clip under autocast what a fused optimizer unscales
    assert all("does not allow for gradient clipping" in reason for reason in failed)
    assert {row.family["precision"].name for row in found.fitting} >= {"float32"}
    assert any("Batch normalization takes the statistics of each micro-batch" in note for note in found.notes)

    class Broken(Language):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.logits(batch["no such key"])

    with pytest.raises(KeyError, match="no such key"):
        plan(Broken(), given_batch(), on_cpu("64MiB"), trainer=fixed)


def test_modules_that_split_by_themselves_are_planned_whole():
    class Manual(Language):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # pyright: ignore
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    fixed = {"precision": "32-true", "callbacks": [ActivationCheckpointing("full")]}
    found = plan(Manual(), given_batch(), on_cpu("64MiB"), trainer=fixed)
    assert found.best.parts == 1
    assert any("Manual optimizes manually" in note for note in found.notes)
    released = {**fixed, "callbacks": [*fixed["callbacks"], GradientRelease()]}
    found = plan(Language(), given_batch(), on_cpu("64MiB"), trainer=released)
    assert found.best.parts == 1
    assert [type(one).__name__ for one in found.trainer_kwargs()["callbacks"]] == [
        "ActivationCheckpointing",
        "GradientRelease",
    ]


@pytest.mark.long
def test_below_what_weights_and_gradients_take_one_prediction_says_the_floor():
    found = plan(Language(), given_batch(), on_cpu("70KiB"))
    assert "weights and gradients alone take" in found.reasons()
    with pytest.raises(PlanError, match="The nearest is bfloat16.* too much"):
        found.trainer_kwargs()


@pytest.mark.slow
def test_ranks_are_a_column_where_there_are_several():
    def deep():
        return Language(width=1024, layers=4)

    fixed = {"devices": 4, "plugins": PureBF16Precision(), "callbacks": [ActivationCheckpointing("full")]}
    found = plan(deep, given_batch(), Budget("1GiB", "a100-40gb"), trainer=fixed)
    assert found.best.family["ranks"].name == "DDP"  # it sends the least
    assert found.trainer_kwargs()["strategy"] == "ddp"
    least = plan(deep, given_batch(), Budget("1GiB", "a100-40gb", "memory"), trainer=fixed)
    by_name = {row.family["ranks"].name: row for row in reversed(least.rows)}
    on_device, on_host = by_name["FSDP2 stage 3"], by_name["FSDP2 stage 3 with shards on the host"]
    assert least.best is on_host  # it leaves the least on the device
    for row, options in ((on_device, {"stage": 3}), (on_host, {"stage": 3, "cpu_offload": True})):
        strategy = least.trainer_kwargs(row)["strategy"]
        assert isinstance(strategy, FSDP2Strategy)
        assert (strategy.sharding.stage, strategy.sharding.cpu_offload) == (3, "cpu_offload" in options)
        written = {"class_path": "lightning_memkit.FSDP2Strategy", "init_args": options}
        assert least.config(row=row)["trainer"]["strategy"] == written


@pytest.mark.long
def test_where_shards_do_not_fit_they_are_planned_on_the_host():
    fixed = {"devices": 4, "plugins": PureBF16Precision(), "callbacks": [ActivationCheckpointing("full")]}
    model = Language(width=1024, layers=6)
    found = plan(
        lambda: Language(width=1024, layers=6), given_batch(), Budget("180MiB", "rtx4090"), trainer=fixed
    )
    strategy = found.trainer_kwargs()["strategy"]
    assert isinstance(strategy, FSDP2Strategy)
    assert strategy.sharding.cpu_offload
    assert found.config()["trainer"]["strategy"]["init_args"] == {"stage": 3, "cpu_offload": True}
    best = found.best.prediction
    assert best is not None
    # A block's shards are gathered in the forward and in the backward, the others' once.
    of_blocks, whole = (sum(one.numel() for one in part.parameters()) for part in (model.blocks, model))
    gradients = 2 * whole
    copied = 2 * (whole + of_blocks) + gradients
    assert best.copied_bytes == pytest.approx(copied / 4, rel=0.02)
    assert best.host_bytes > 10 * whole / 4
    assert "the backward would wait for each step of the host" in str(found)


@pytest.mark.slow
def test_a_strategy_that_offloads_is_planned_with_what_it_leaves_on_the_device():
    def deep():
        return Language(width=1024, layers=12)

    def found(offloads):
        fixed = {
            "devices": 2,
            "strategy": FSDP2Strategy(cpu_offload=offloads),
            "plugins": PureBF16Precision(),
            "callbacks": [ActivationCheckpointing("full")],
        }
        return plan(deep, given_batch(), Budget("180MiB", "rtx4090"), trainer=fixed)

    assert "weights and gradients alone take" in found(offloads=False).reasons()
    within = found(offloads=True)
    best = within.best
    assert best.prediction is not None
    assert "states of sharded parameters can't be offloaded here" in str(within)
    assert "a step fails" not in str(within)
    a_rank = sum(2 * parameter.numel() for parameter in deep().parameters()) / 2
    assert best.taken_bytes < 180 * 2**20 < 2 * a_rank  # weights and gradients
    assert best.prediction.host_bytes > 5 * a_rank  # those, compensation and two moments


@pytest.mark.long
def test_nothing_of_the_users_is_touched():
    module, given = Language(), given_batch()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state, callbacks = torch.get_rng_state(), [ActivationCheckpointing("full")]
    plan(module, given, on_cpu("8MiB"), trainer={"callbacks": callbacks})
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert module._trainer is None
    assert len(callbacks) == 1
    assert all(torch.equal(given[name], value) for name, value in given_batch().items())
    fixed = {"precision": "32-true", "callbacks": [ActivationCheckpointing("full")]}
    plan(Drawing, given, on_cpu("1MiB"), trainer=fixed)
    assert torch.equal(torch.get_rng_state(), state)


class Drawing(Language):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.drawn = torch.randn((), device="cpu")  # not on "meta": the generator goes on


# The work of a step


def test_operations_are_those_of_the_formula_and_what_runs_again_counts():
    module = Language()
    tokens = ROWS * LENGTH
    matrices = sum(
        p.numel() for name, p in module.named_parameters() if p.dim() == 2 and "embedding" not in name
    )
    blocks = sum(p.numel() for name, p in module.named_parameters() if p.dim() == 2 and "blocks" in name)
    plain = predict_memory(module, given_batch()).work
    assert plain.part_flops == 6 * tokens * matrices
    again = predict_memory(
        module, given_batch(), trainer={"callbacks": [ActivationCheckpointing("full")]}
    ).work
    # The last product of a block's forward need not run again.
    down = sum(p.numel() for name, p in module.named_parameters() if name.endswith("down.weight"))
    assert plain.part_flops + 2 * tokens * (blocks - down) <= again.part_flops
    assert again.part_flops <= plain.part_flops + 2 * tokens * blocks


def test_work_of_parts_and_steps_is_told_apart():
    one = predict_memory(Language(), given_batch()).work
    three = predict_memory(Language(), given_batch(), trainer={"accumulate_grad_batches": 3}).work
    assert three.part_flops == one.part_flops
    assert {operator.name for operator in one.step} == {operator.name for operator in three.step}
    compensated = predict_memory(Language(), given_batch(), trainer={"plugins": PureBF16Precision()}).work
    count = sum(p.numel() for p in Language().parameters())
    moved = sum(operator.moved_bytes * number for operator, number in compensated.step.items())
    assert moved >= 12 * count


def test_rates_say_the_roofline():
    device = DEVICES["a100-40gb"]
    times = TimesByRates(device)
    product = OperatorWork("aten.mm.default", (), (), flops=10**15, moved_bytes=10**9, is_16_bit=True)
    copy = OperatorWork("aten.copy_.default", (), (), flops=0, moved_bytes=10**12, is_16_bit=False)
    tiny = OperatorWork("aten.add.Tensor", (), (), flops=0, moved_bytes=8, is_16_bit=False)
    assert times.seconds(product) == pytest.approx(10**15 / (0.6 * device.flops_16))
    assert times.seconds(copy) == pytest.approx(10**12 / (0.8 * device.bytes_per_second))
    assert 0 < times.seconds(tiny) < 1e-4


def test_every_operator_of_a_step_has_a_time_here():
    work = predict_memory(Language(), given_batch(), trainer={"plugins": PureBF16Precision()}).work
    times = TimesHere()
    for operator in (*work.part, *work.step):
        assert 0 < times.seconds(operator) < 10
    unknown = OperatorWork("nobody.knows.this", (), (), flops=10**9, moved_bytes=10**6, is_16_bit=False)
    assert times.seconds(unknown) > 0


@pytest.mark.slow
def test_operators_are_timed_on_the_accelerator_that_is_here():
    """In a process of its own: an accelerator stays known to the whole process."""
    code = """
import torch
from lightning_memkit import predict_memory
from lightning_memkit.planning.times import TimesHere
from tests.testing.fake_device import fake_device
from tests.plugins.test_planning import Language, given_batch

work = predict_memory(Language(), given_batch()).work
with fake_device() as device:
    kind = device.torch_device.type
    before, ran = torch.get_rng_state(), device.allocations
    times = TimesHere(kind)
    for operator in (*work.part, *work.step):
        assert operator.is_python or 0 < times.seconds(operator) < 100, operator
    assert device.allocations > ran
    assert torch.equal(torch.get_rng_state(), before)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_python_does_for_recorded_operators_is_counted():
    """A tape's own bookkeeping: once an operator of the forward, and once for each that runs again."""

    def counted(*callbacks: Any) -> tuple[float, float]:
        part = predict_memory(Language(), given_batch(), trainer={"callbacks": list(callbacks)}).work.part
        of = {name: sum(n for op, n in part.items() if op.name == name) for name in (RECORDED, MADE_AGAIN)}
        return of[RECORDED], of[MADE_AGAIN]

    assert counted() == (0, 0)
    recorded, again = counted(ActivationCheckpointing("selective"))
    assert recorded > again > 0
    assert counted(ActivationCheckpointing("full")) == (0, 0)
    both = [OperatorWork(name, (), (), 0, 0, is_16_bit=False) for name in (RECORDED, MADE_AGAIN)]
    here, there = TimesHere(), TimesByRates(DEVICES["t4"])
    assert all(0 <= here.seconds(operator) < 1e-2 for operator in both)
    assert [here.host_seconds(operator) for operator in both] == [0, 0]  # the host is the device
    assert [there.seconds(operator) for operator in both] == [0, 0]
    assert all(1e-5 < there.host_seconds(operator) < 1e-4 for operator in both)


def test_a_step_takes_as_long_as_the_slower_of_device_and_host():
    """A tape's bookkeeping costs nothing beside large products, and is all of the time beside small ones."""
    recorded = OperatorWork(RECORDED, (), (), 0, 0, is_16_bit=False)
    times = TimesByRates(DEVICES["h200"])
    for flops, is_bound_by_host in ((10**13, False), (10**6, True)):
        product = OperatorWork("aten.mm.default", (), (), flops, 0, is_16_bit=True)
        work = Work(part={product: 50.0, recorded: 50.0}, step={product: 1.0})
        device = 50 * times.seconds(product)
        host = 50 * (times.host_seconds(product) + times.host_seconds(recorded))
        assert part_seconds(work, times) == pytest.approx(max(device, host))
        assert (host > device) == is_bound_by_host
        plain = part_seconds(Work(part={product: 50.0}), times)
        assert (part_seconds(work, times) > plain) == is_bound_by_host
    assert step_seconds(work, times) == times.seconds(product)


class QueueClocks:
    """A device with a queue, and its host: a launch takes `host`, its kernel `device` seconds, side by side."""

    def __init__(self, host: float, device: float) -> None:
        self.host, self.device = host, device
        self.host_now = self.device_free = 0.0

    def launch(self, seconds: float | None = None) -> None:
        self.host_now += self.host
        self.device_free = max(self.device_free, self.host_now) + (
            self.device if seconds is None else seconds
        )

    def keep_busy(self) -> None:
        self.launch(1e-2)

    def mark(self) -> float:
        return max(self.device_free, self.host_now)

    def seconds_between(self, first: float, second: float) -> float:
        self.host_now = max(self.host_now, second)
        return second - first

    def now(self) -> float:
        return self.host_now


@pytest.mark.parametrize(("host", "device"), [(1e-5, 3e-6), (1e-5, 2e-4), (3e-5, 3e-5)])
def test_device_and_host_are_timed_without_a_wait_for_each_other(host, device):
    clocks = QueueClocks(host, device)
    took = launched(clocks.launch, clocks=clocks)
    assert took.device == pytest.approx(device)
    assert took.host == pytest.approx(host)


# The command


def config(tmp_path: Any, **trainer: Any) -> str:
    path = tmp_path / "run.yaml"
    trainer = {"plugins": [{"class_path": "lightning_memkit.PureBF16Precision"}], **trainer}
    path.write_text(
        yaml.safe_dump(
            {
                "seed_everything": 1,
                "model": {"class_path": "examples.pretrain_causal_lm.model.CausalLM",
                          "init_args": {"vocabulary_size": 259, "width": 32, "layers": 2, "heads": 2,
                                        "attention": "lightning_memkit.packed_attention"}},
                "data": {"class_path": "lightning_memkit.PackedDataModule",
                         "init_args": {"source": str(tmp_path / "text.jsonl"), "tokenizer": "bytes", "context": 64,
                                       "batch_size": 8, "long_documents": "split"}},
                "trainer": {"max_steps": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
                            "enable_progress_bar": False, "default_root_dir": str(tmp_path), **trainer},
            }
        )
    )  # fmt: skip
    lines = ['{"text": "%s"}' % (f"words and more words {index} " * 10) for index in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return str(path)


@pytest.mark.long
def test_the_planned_config_runs_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    planned = tmp_path / "planned.yaml"
    words = ["--config", config(tmp_path, gradient_clip_val=0.5), "--budget", "4MiB", "--device", "cpu"]
    assert main(["plan", *words, "--output", str(planned), "--explain"]) == 0
    said = capsys.readouterr().out
    assert "as predicted" in said
    assert "bfloat16, Kahan, compact states" in said
    assert f"memkit fit --config {planned}" in said
    written = yaml.safe_load(planned.read_text())
    assert written["trainer"]["gradient_clip_val"] == 0.5
    names = [callback["class_path"] for callback in written["trainer"]["callbacks"]]
    assert names[-1] == "lightning_memkit.MemoryBudget"
    assert written["trainer"]["callbacks"][-1]["init_args"]["budget"] == "4MiB"
    assert main(["fit", "--config", str(planned)]) == 0


@pytest.mark.long
def test_a_card_is_described_by_its_memory(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["plan", "--config", config(tmp_path), "--memory", "4GiB"]
    assert main(words) == 0
    assert "on a card of 4.00 GiB" in capsys.readouterr().out
    assert main([*words, "--device", "rtx9090"]) == 0
    said = capsys.readouterr().out
    assert "on rtx9090" in said
    assert re.search(r"Of rtx9090 no data sheet is known: the rates are \w+(-\w+)?'s, with bfloat16.\n", said)


@pytest.mark.long
def test_the_command_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = config(tmp_path)
    assert main(["plan", "--config", path, "--device", "rtx9090"]) == 2
    assert "device='rtx9090' is unknown; `memkit plan --help` lists those known." in capsys.readouterr().err
    assert main(["plan", "--config", path, "--device", "cpu", "--memory", "4GiB"]) == 2
    assert "memory='4GiB' is a card's" in capsys.readouterr().err
    assert main(["plan", "--config", path, "--output", str(tmp_path / "no such" / "plan.yaml")]) == 2
    assert "in a folder that does not exist" in capsys.readouterr().err
    assert main(["plan", "--config", path, "--budget", "70KiB", "--device", "cpu"]) == 1
    said = capsys.readouterr()
    assert said.err.count("Nothing fits 70.00 KiB on the CPU") == 1
    assert len(said.err) <= 3 * 120
    assert "too large" in said.out
    assert "Nothing fits" not in said.out
    assert (said.out + said.err).count("too much (") == 1
    assert all(len(line) <= 120 for line in said.out.splitlines())


REFUSED = {
    "": ["--config FILE.yaml", "--help"],
    "{config}": ["{config} is given without its option: write `memkit plan --config {config}`"],
    "--config": ["--config stands without its value: write `--config FILE.yaml`"],
    "--config {config} --budget": ["--budget stands without its value: write `--budget auto`"],
    "--config {config} --goal": [
        "--goal stands without its value: write `--goal speed`, or another of speed, memory"
    ],
    "--config {config} --goal fast": ["--goal 'fast' is unknown; write one of speed, memory, exact"],
    "--config {config} --headroom much": ["--headroom 'much' is not a number: write `--headroom 0.05`"],
    "--config {config} --output {config}": [
        "--output {config} would overwrite the config",
        "name another file",
    ],
    "--config {config} --output {folder}/../{folder.name}/run.yaml": [
        "would overwrite the config that is read"
    ],
    "--config {config} --device 4090 --budget 30GiB": ["budget='30GiB' is more than rtx4090 has (23.99 GiB"],
    "--config {config} --device 8xh100": ["names several cards", "--trainer.devices 8"],
    "--config {config} --device rtx4090-mobile": ["is a laptop's or a Max-Q chip", "--memory 24GiB"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_command_that_can_not_be_read_is_told_what_to_write(tmp_path, capsys, words):
    path = tmp_path / "run.yaml"
    path.write_text("model: {class_path: no.such.Model}\n")  # nothing is read before the words are refused
    told = {"config": path, "folder": tmp_path}
    try:
        code = main(["plan", *words.format(**told).split()])
    except SystemExit as exit_:
        code = exit_.code
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.startswith("memkit: error: ")
    assert said.err.count("\n") == 1
    assert len(said.err.replace(str(path), "run.yaml")) <= 3 * 120
    for part in REFUSED[words]:
        assert part.format(**told) in said.err
    assert path.read_text() == "model: {class_path: no.such.Model}\n"


def test_the_device_of_a_budget_is_an_argument_too():
    given = {"precision": "bf16-true"}
    found = plan(Language(), batch(2, 32), "1GiB", device="h200", trainer=given)
    assert found.budget == Budget("1GiB", "h200")
    with pytest.raises(
        ValueError, match=r"device='h100' stands beside a Budget, .* Budget\('1GiB', device='h100'\)"
    ):
        plan(Language(), batch(2, 32), Budget("1GiB"), device="h100")


@pytest.mark.parametrize("named", ["my.jsonl", Path("my.jsonl")])
def test_the_name_of_a_file_is_no_batch(named):
    with pytest.raises(TypeError, match="batch='my.jsonl' is a name, not a batch: give what a loader yields"):
        plan(Language(), named, Budget("1GiB", "cpu"))
    with pytest.raises(TypeError, match="batch='my.jsonl' is a name"):
        predict_memory(Language(), named)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (2**34, "16.00 GiB"),
        (21256269824, "19.80 GiB"),
        ("8GiB", "8GiB"),
        (0.5, "0.5"),
        (1.0, "1.0"),
        ("auto", "auto"),
    ],
)
def test_a_given_budget_is_told_as_a_size(written, said):
    assert as_written(written) == said
