"""Whatever function looks token ids up: a table or a head too small for the data is named before the first step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]

from lightning_memkit import MemoryBudget, PackedDataModule
from lightning_memkit.data.sources.shares import DocumentOptions
from tests.plugins.noise import NOISE

pytestmark = [*NOISE, pytest.mark.filterwarnings("ignore:The `srun` command")]
TEXTS = [f"document number {number} of a few" for number in range(40)]
RARE = [[1, 2, 3, 4, 5, 6, 7, 8]] * 400 + [[1, 500, 2, 3, 4, 5, 6, 7]]
Look = Callable[["Looks", Tensor], Tensor]
LOOKUPS: dict[str, tuple[Look, str]] = {
    "F.embedding": (lambda m, ids: F.embedding(ids, m.w), r"the table w has 64 rows"),
    "torch.embedding": (lambda m, ids: torch.embedding(m.w, ids), r"the table w has 64 rows"),
    "brackets": (lambda m, ids: m.w[ids], r"the table w has 64 rows"),
    "a buffer's columns": (lambda m, ids: m.inner.columns[:, ids].movedim(0, -1), r"inner\.columns has 64 rows"),
    "index_select": (
        lambda m, ids: m.w.index_select(0, ids.flatten()).view(*ids.shape, 8), r"the table w has 64 rows"
    ),
    "gather": (
        lambda m, ids: torch.gather(m.w, 0, ids.reshape(-1, 1).expand(-1, 8)).view(*ids.shape, 8),
        r"the table w has 64 rows",
    ),
    "take_along_dim": (
        lambda m, ids: torch.take_along_dim(m.w, ids.reshape(-1, 1), 0).view(*ids.shape, 8),
        r"the table w has 64 rows",
    ),
    "EmbeddingBag": (lambda m, ids: m.bag(ids.reshape(-1, 1)).view(*ids.shape, 8), r"the embedding bag has 64 rows"),
    "F.embedding_bag": (
        lambda m, ids: F.embedding_bag(ids.clone().reshape(-1, 1), m.w).view(*ids.shape, 8),
        r"the table w has 64 rows",
    ),
    "one_hot": (lambda m, ids: F.one_hot(ids, 64).float() @ m.w, r"one_hot has 64 classes"),
    "nn.Embedding": (lambda m, ids: m.words(ids), r"the embedding words has 64 rows"),
}  # fmt: skip


class Looks(LightningModule):
    """Looks its words up by any function; its head has many classes."""

    def __init__(self, look: Look, classes: int = 600) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w, self.bag, self.words = (
            nn.Parameter(torch.randn(64, 8)),
            nn.EmbeddingBag(64, 8),
            nn.Embedding(64, 8),
        )
        self.inner: Any = nn.Module()
        self.inner.register_buffer("columns", torch.randn(8, 64))
        self.head = nn.Linear(8, classes)
        self.look, self.steps = look, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.look(self, batch["input_ids"]))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    test_step = predict_step = validation_step

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Modes(Callback):
    """What is in force at each training batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool, int]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        hooks = sum(len(part._forward_pre_hooks) for part in pl_module.modules())
        modes = len(_get_current_function_mode_stack())
        self.seen.append((hooks, "training_step" in vars(pl_module), modes))


def fit(module: LightningModule, *callbacks: Callback, source: Any = RARE, **options: Any) -> None:
    trainer = Trainer(
        accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), limit_val_batches=0,
    )  # fmt: skip
    kept_apart = DocumentOptions(kept_apart=False)
    trainer.fit(
        module, datamodule=PackedDataModule({"train": source}, context=64, documents=kept_apart, **options)
    )


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize(
    ("source", "last"), [(TEXTS, 258), (RARE, 500)], ids=["every batch", "a later batch"]
)
def test_a_table_too_small_is_named_before_the_first_step(name: str, source: Any, last: int) -> None:
    look, named = LOOKUPS[name]
    module = Looks(look)
    rule = rf"^Documents have token ids up to {last} \(tokenizer='bytes'\), and .*{named}\. Build the model with "
    with pytest.raises(ValueError, match=rf"{rule}vocab_size={last + 1} or more, or take its tokenizer\.$"):
        fit(module, source=source)
    assert module.steps == 0
    assert "training_step" not in vars(module)
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("name", ["F.embedding", "one_hot"])
@pytest.mark.parametrize("source", [TEXTS, RARE], ids=["every batch", "a later batch"])
def test_so_it_is_within_a_budget(name: str, source: Any) -> None:
    module = Looks(LOOKUPS[name][0])
    with pytest.raises(ValueError, match=LOOKUPS[name][1]):
        fit(module, MemoryBudget("1GiB"), source=source)
    assert module.steps == 0
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_so_it_is_in_an_evaluation_without_a_fit(what: str) -> None:
    module, trainer = (
        Looks(LOOKUPS["brackets"][0]),
        Trainer(accelerator="cpu", logger=False, enable_progress_bar=False),
    )
    data = PackedDataModule({"validation": RARE, "test": RARE, "predict": RARE}, context=64)
    with pytest.raises(ValueError, match="the table w has 64 rows"):
        getattr(trainer, what)(module, datamodule=data)
    assert f"{what}_step" not in vars(module)


@pytest.mark.parametrize("name", ["modulo", "clamp", "where", "in place", "offset", "first"])
def test_ids_that_a_model_changes_raise_no_alarm(name: str) -> None:
    def of_clone(ids: Tensor) -> Tensor:
        ids = ids.clone()
        ids[ids >= 64] = 0
        return ids

    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "modulo": lambda ids: ids % 64,
        "clamp": lambda ids: ids.clamp(max=63),
        "where": lambda ids: torch.where(ids < 64, ids, 0),
        "in place": of_clone,
        "offset": lambda ids: (ids + 3).clamp(max=63),
        "first": lambda ids: ids[:, :1].expand_as(ids),
    }
    module = Looks(lambda m, ids: F.embedding(changes[name](ids), m.w))
    fit(module, source=RARE)
    assert module.steps == 3


def test_what_is_beside_the_documents_is_no_alarm() -> None:
    """Positions, whose table is shorter than the vocabulary, but not too short."""
    module = Looks(lambda m, ids: F.embedding(torch.arange(ids.shape[1]), m.w).expand(len(ids), -1, -1))
    fit(module, source=RARE)
    assert module.steps == 3


def test_a_table_of_positions_that_is_too_short_is_not_called_one_of_tokens() -> None:
    short = nn.Embedding(16, 8)
    module = Looks(lambda m, ids: short(torch.arange(300, 300 + ids.shape[1])).expand(len(ids), -1, -1))
    module.short = short
    with pytest.raises(IndexError, match="out of range"):
        fit(module, source=RARE)


class Heads(Looks):
    """Its words have rows for all; its loss is taken in any way."""

    def __init__(self, loss: Callable[[Tensor, Any], Tensor], classes: int) -> None:
        super().__init__(lambda m, ids: F.embedding(ids % 64, m.w), classes)
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.head(self.look(self, batch["input_ids"])), batch)


def by_module(logits: Tensor, batch: Any) -> Tensor:
    return nn.CrossEntropyLoss()(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])


def by_likelihood(logits: Tensor, batch: Any) -> Tensor:
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), target=shifted.view(-1))


def by_ids(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].reshape(-1), ignore_index=258
    )


def by_hand(logits: Tensor, batch: Any) -> Tensor:
    labels = batch["labels"][:, 1:]
    likelihoods = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1))
    return -likelihoods.squeeze(-1)[labels != -100].mean()


@pytest.mark.parametrize("loss", [by_module, by_likelihood, by_ids, by_hand])
@pytest.mark.parametrize(
    ("source", "classes"), [(TEXTS, 64), (RARE, 300)], ids=["every batch", "a later batch"]
)
def test_a_head_too_small_for_the_labels_is_named(loss: Any, source: Any, classes: int) -> None:
    module = Heads(loss, classes)
    head = rf"the head(, in whose values.*| before (cross_entropy|nll_loss)) has {classes} classes"
    rule = rf"ids up to (258|500) .*and {head}\. Build the model"
    with pytest.raises(ValueError, match=rule):
        fit(module, source=source)
    assert module.steps == 0


def test_an_id_that_is_never_a_label_needs_no_class() -> None:
    """The first of a document, and padding, which no head predicts."""
    firsts = [[500, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5]] * 40
    module = Heads(by_module, 64)
    fit(module, source=firsts)
    assert module.steps == 3


def test_results_are_those_without_a_look_and_later_batches_are_not_looked_at(monkeypatch: Any) -> None:
    ours, seen = Looks(lambda m, ids: F.embedding(ids % 64, m.w)), Modes()
    theirs = copy.deepcopy(ours)
    torch.manual_seed(3)
    fit(ours, seen)
    drawn = torch.rand(())
    assert seen.seen == [(1, True, 0), (0, False, 0), (0, False, 0)]
    monkeypatch.setattr("lightning_memkit.plugins.data._first_ids.watch_lookups", lambda *_: lambda: None)
    torch.manual_seed(3)
    fit(theirs, unseen := Modes())
    assert unseen.seen == [(0, False, 0)] * 3
    assert torch.equal(torch.rand(()), drawn)
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))


class Encoder(Looks):
    """In evaluation torch takes another kernel for it, unless its functions are watched."""

    def __init__(self) -> None:
        super().__init__(lambda m, ids: m.get_submodule("encoder")(F.embedding(ids % 64, m.w)))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.kernels: set[str] = set()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.profiler.profile() as profile:
            found = self.look(self, batch["input_ids"])
        self.kernels |= {event.key for event in profile.key_averages()}
        return found


def test_the_kernel_of_an_encoder_in_evaluation_stays() -> None:
    module = Encoder()
    data = PackedDataModule({"predict": RARE[:8]}, context=64, documents=DocumentOptions(kept_apart=False))
    Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).predict(module, datamodule=data)
    assert "aten::_transformer_encoder_layer_fwd" in module.kernels


def test_a_compiled_function_within_the_step_runs_as_without() -> None:
    compiled: Any = torch.compile(
        lambda ids, table: F.embedding(ids.clamp(max=63), table) * 2, backend="eager", fullgraph=True
    )
    module = Looks(lambda m, ids: compiled(ids, m.w))
    fit(module, source=RARE)
    assert module.steps == 3


def test_a_stream_is_named_by_the_first_batch_that_shows_it() -> None:
    module = Looks(LOOKUPS["brackets"][0])
    with pytest.raises(ValueError, match=r"ids up to \d+ .*the table w has 64 rows"):
        fit(module, source=lambda: iter(TEXTS), packing="stream")
    assert module.steps == 0
