"""The models of the matrix: each an ordinary LightningModule, without dropout, and three batches of four samples."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._prediction_models import LENGTH, VOCABULARY, WIDTH, Subject, subjects

STEPS, SAMPLES = 3, 4
_ENCODER_DECODERS, _NOT_TOKENS = ("T5", "Whisper"), ("Whisper", "ImageClassification")
_LEARNING_RATE, _EPS = 1e-3, 1e-6  # eps: gradients that are zero but for rounding must not move weights


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the matrix.

    Args:
        name: of its class, or what it is.
        module: builds the LightningModule.
        batches: builds its batches, one a step.
        packed: builds the LightningModule that takes a `PackedBatch`; None where the model reads no tokens.
        has_batch_statistics: its result depends on which samples share a forward.
        halves_add_up: its batches' halves weigh alike, and Lightning can't accumulate them: it has its own loop, or
            its state goes on from step to step.
        options: by plugin, what a user of this model names: its head, its blocks.
    """

    name: str
    module: Callable[[], LightningModule]
    batches: Callable[[], list[Any]]
    packed: Callable[[], LightningModule] | None = None
    has_batch_statistics: bool = False
    halves_add_up: bool = False
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _names(head: str = "", blocks: str = "") -> dict[str, dict[str, Any]]:
    """Names of a head and of blocks, for the plugins that ask for them."""
    by_blocks = {name: {"blocks": [blocks]} for name in ("ActivationCheckpointing", "ActivationOffload")}
    return {**({"ChunkedLoss": {"heads": [head]}} if head else {}), **(by_blocks if blocks else {})}


_OPTIONS = {
    "packed example": _names("model.head"),
    "ViTForImageClassification": _names("model.classifier"),
    "ResNetForImageClassification": _names("model.classifier.1", "ResNetBottleNeckLayer"),
    "ConvNextForImageClassification": _names("model.classifier", "ConvNextLayer"),
    "MLP": _names("model.5"),
    "CNN": _names("model.12"),
    "residual CNN": _names("model.6"),
}


class Job(LightningModule):
    """A model and its loss, trained with AdamW."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model = subject.build()
        self._loss_of = subject.loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The model's own loss."""
        return self._loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as most use it."""
        return torch.optim.AdamW(self.parameters(), lr=_LEARNING_RATE, eps=_EPS)


class PackedJob(Job):
    """The same over packed rows: a transformers model whose attention keeps documents apart."""

    def __init__(self, subject: Subject) -> None:
        from lightning_memkit.attention import use_packed_attention

        super().__init__(subject)
        use_packed_attention(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Documents side by side."""
        return self.model(**batch).loss


def models() -> Iterator[Model]:
    """All that can be built here."""
    for subject in subjects():
        reads_tokens = subject.name.endswith(("LM", "LMHeadModel", "ForConditionalGeneration"))
        packed = partial(_built, PackedJob, subject)
        if subject.name == "packed example":
            packed = partial(_built, Job, subject)
        elif not reads_tokens or any(part in subject.name for part in _NOT_TOKENS):
            packed = None
        yield Model(
            name="CausalLM of examples/" if subject.name == "packed example" else subject.name,
            module=partial(_built, Job, subject),
            batches=partial(_batches_of, subject),
            packed=packed,
            options=_OPTIONS.get(subject.name, {}),
            has_batch_statistics=subject.name in ("CNN", "residual CNN", "ResNetForImageClassification"),
        )
    if find_spec("litgpt") is not None:
        subject = Subject(name="litgpt.GPT", build=_litgpt, loss=_litgpt_loss, batch=_tokens)
        yield Model(
            name=subject.name,
            module=partial(_built, Job, subject),
            batches=partial(_batches_of, subject),
            options=_names("model.lm_head"),
        )
    yield Model(name="LightningLSTM", module=_lstm, batches=_lstm_batches, halves_add_up=True)
    yield Model(name="BoringModel", module=partial(_boring, "BoringModel"), batches=_boring_batches)
    yield Model(
        name="ManualOptimBoringModel",
        module=partial(_boring, "ManualOptimBoringModel"),
        batches=_boring_batches,
        halves_add_up=True,
    )


def rows_of(batch: Any) -> int:
    """How many samples a batch has."""
    return len(next(iter(_leaves(batch))))


def halves(batch: Any) -> tuple[Any, Any]:
    """The first and the second half of a batch's samples."""
    from lightning_memkit.data.batching.batch import PackedBatch

    half = rows_of(batch) // 2
    if isinstance(batch, PackedBatch):
        first, second = batch.split([half, half])
        return first, second
    return _slice(batch, 0, half), _slice(batch, half, 2 * half)


def _built(job: type[Job], subject: Subject) -> LightningModule:
    return _without_dropout(job(subject))


def _without_dropout(module: LightningModule) -> LightningModule:
    """Each part of a split batch draws for itself, so that no two ways to train would agree."""
    for one in module.modules():
        for name, value in list(vars(one).items()):
            if isinstance(value, float) and ("drop" in name or (isinstance(one, nn.Dropout) and name == "p")):
                setattr(one, name, 0.0)
    return module


def _batches_of(subject: Subject) -> list[Any]:
    from lightning_memkit.data.batching.batch import PackedBatch

    whole = subject.batch(STEPS * SAMPLES)
    if isinstance(whole, PackedBatch):
        return list(whole.split([SAMPLES] * STEPS))
    rows = rows_of(whole) // STEPS
    batches = [_slice(whole, step * rows, (step + 1) * rows) for step in range(STEPS)]
    for batch in batches:
        if isinstance(batch, dict) and batch["labels"].ndim == 2:
            _end_early(batch)
    return batches


def _end_early(batch: dict[str, Tensor]) -> None:
    """Rows of different lengths: parts then hold different numbers of labels."""
    rows, length = batch["labels"].shape
    for row in range(rows):
        end = length - row * (length // (2 * rows))
        batch["labels"][row, end:] = -100
        if "attention_mask" in batch:
            batch["attention_mask"][row, end:] = 0


def _slice(batch: Any, start: int, end: int) -> Any:
    if isinstance(batch, dict):
        return {name: value[start:end].clone() for name, value in batch.items()}
    if isinstance(batch, Tensor):
        return batch[start:end].clone()
    return tuple(value[start:end].clone() for value in batch)


def _leaves(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    else:
        yield from batch.values() if isinstance(batch, dict) else batch


def _shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _litgpt() -> nn.Module:
    from litgpt import GPT, Config  # pyright: ignore[reportMissingImports]

    return GPT(
        Config(
            block_size=4 * LENGTH, n_layer=2, n_head=4, n_embd=WIDTH, padded_vocab_size=VOCABULARY,
            rotary_percentage=1.0, intermediate_size=2 * WIDTH,
        )
    )  # fmt: skip


def _litgpt_loss(model: nn.Module, batch: Any) -> Tensor:
    return _shifted_loss(model(batch["input_ids"]), batch["labels"])


def _tokens(samples: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def _lstm() -> LightningModule:
    from lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM

    module = LightningLSTM(vocab_size=VOCABULARY)
    module.prepare_data = lambda: None  # it would download a corpus
    module.model = SimpleLSTM(vocab_size=VOCABULARY, ninp=WIDTH, nhid=WIDTH, nlayers=2, dropout=0.0)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.5)
    return module


def _lstm_batches() -> list[Any]:
    ids = _tokens(STEPS * SAMPLES)["input_ids"]
    pairs = [ids[step * SAMPLES : (step + 1) * SAMPLES] for step in range(STEPS)]
    return [(pair[:, :-1].contiguous(), pair[:, 1:].contiguous()) for pair in pairs]


def _boring(name: str) -> LightningModule:
    from lightning.pytorch.demos import boring_classes

    return getattr(boring_classes, name)()


def _boring_batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SAMPLES, 32, generator=generator) for _ in range(STEPS)]
