"""What the fault sweep trains: three tiny models, seven optimizers, batches of four in parts of two.

Four more models change other things in their steps than gradients: a teacher, counters, the batch, and all of these.
Two run modules in chunks: of rows, as their loss compares the rows of the batch, and of tokens.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler

from examples.pretrain_causal_lm.model import CausalLM
from lightning_memkit import ActivationCheckpointing, PackedBatch, PureBF16Precision, pack, packed_attention
from lightning_memkit.data.batching.collate import collate
from lightning_memkit.data.sources.store import TokenStore

MODELS = ("transformer", "cnn", "packed_lm")
CHANGING = ("ema_teacher", "counters", "batch_in_place", "everything")
IN_CHUNKS = {"contrastive": 4, "long_row": 1}  # and the rows of a micro-batch
OPTIMIZERS = ("for_loop", "foreach", "fused", "kahan", "seven_bytes", "eight_bit", "own_buffers")
_PRECISIONS = {"kahan": {}, "seven_bytes": {"compensation": "split24", "states": "8-bit"}}
BATCH, PART, STEPS = 4, 2, 3
VOCABULARY, LENGTH, WIDTH = 24, 6, 16


class Trained(LightningModule):
    """Logs its loss, clips, and steps a scheduler; the optimizer is chosen by name."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer

    def loss(self, batch: Any) -> Tensor:
        """The mean that the step minimizes."""
        raise TypeError(f"{type(self).__name__} has no loss.")

    def kept(self) -> dict[str, Any]:
        """What the step keeps in attributes."""
        return {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss, logged a step and an epoch."""
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        """The optimizer in two groups, and a learning rate that changes with every step."""
        groups = [
            {
                "params": [p for p in self.parameters() if p.requires_grad and (p.ndim > 1) is decayed],
                "weight_decay": 0.1 * decayed,
            }
            for decayed in (True, False)
        ]
        optimizer = optimizer_named(self.optimizer, groups)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, 1.0, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Transformer(Trained):
    """One encoder layer with dropout, a label a token."""

    def __init__(self, optimizer: str, dropout: float = 0.1) -> None:
        super().__init__(optimizer)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy a label that is not -100."""
        logits = self.head(self.layer(self.embedding(batch["x"])))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class CNN(Trained):
    """Two convolutions with batch normalization."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
        )  # fmt: skip

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy a picture."""
        return F.cross_entropy(self.layers(batch[0].to(self.dtype)), batch[1])


class EMATeacher(Transformer):
    """Moves a teacher towards itself within the step, and is drawn to what it says."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy, and the distance from the teacher, which has moved before it is asked."""
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        hidden = self.layer(self.embedding(batch["x"]))
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return loss + (logits - self.teacher(hidden.detach())).square().mean()


class Tally:
    """A plain object that a step counts in."""

    def __init__(self) -> None:
        self.steps, self.by_length = 0, Counter()


class Counters(Transformer):
    """Anneals by a counter of its own, and keeps lists, a plain object and a function's variable."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.losses: list[Tensor] = []
        self.tally = Tally()
        self.gradients: list[int] = []
        gradients = self.gradients
        self.head.weight.register_hook(lambda gradient: gradients.append(gradient.numel()))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The transformer's, scaled by how many steps there were."""
        self.tally.steps += 1
        self.tally.by_length[len(batch["x"])] += 1
        loss = super().loss(batch) * 0.9**self.tally.steps
        self.losses.append(loss.detach())
        return loss

    def kept(self) -> dict[str, Any]:
        """All of it."""
        lengths = dict(self.tally.by_length)
        return {"losses": self.losses, "steps": self.tally.steps, "lengths": lengths, "hook": self.gradients}


class BatchInPlace(CNN):
    """Normalizes its pictures in the batch itself."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy a picture."""
        batch[0].div_(2).sub_(0.1)
        return super().loss(batch)


class Everything(Trained):
    """A teacher, a counter, a list and the batch in one small step; with `own_buffers`, the optimizer's too."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.hidden, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        self.running = nn.Buffer(torch.zeros(4))
        self.tally, self.losses = Tally(), list[Tensor]()

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy, the distance from a teacher, and what an average and a counter make of them."""
        pictures, labels = batch
        pictures.div_(2).sub_(0.1)
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        self.tally.steps += 1
        self.tally.by_length[len(labels)] += 1
        hidden = self.hidden(pictures[:, 0, 0]).relu()
        self.running.lerp_(hidden.detach().mean(0), 0.1)
        logits = self.head(hidden - self.running)
        distance = (logits - self.teacher(hidden.detach())).square().mean()
        loss = F.cross_entropy(logits, labels % 3) + distance * 0.9**self.tally.steps
        self.losses.append(loss.detach())
        return loss

    def kept(self) -> dict[str, Any]:
        """The counters and the list."""
        lengths = dict(self.tally.by_length)
        return {"losses": self.losses, "steps": self.tally.steps, "lengths": lengths}


class OwnBuffers(torch.optim.Optimizer):
    """Normalized momentum whose buffers, average and counters are attributes of its own; `state` stays empty."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self.momenta = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]
        self.norms: dict[int, Tensor] = {}
        self.average: Tensor | None = None
        self.steps, self.history = 0, list[float]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Each parameter by its momentum, over a running average of all gradients' norm."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.steps += 1
        pairs = [(group, p) for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for _, p in pairs]).norm()
        self.average = norm if self.average is None else self.average.lerp(norm, 0.5)
        self.history.append(float(self.average))
        for place, (group, p) in enumerate(pairs):
            self.norms.setdefault(place, torch.zeros_like(norm)).add_(p.grad.square().sum())
            momentum = self.momenta[place].mul_(0.9).add_(p.grad)
            scale = group["lr"] / (self.average + self.norms[place].sqrt() + 0.1 * self.steps)
            p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum * scale)
        return loss

    def kept(self) -> dict[str, Any]:
        """All that `state_dict` has not."""
        return {
            "momenta": self.momenta, "norms": self.norms, "average": self.average, "steps": self.steps,
            "history": self.history,
        }  # fmt: skip


class CountsBackwards(Callback):
    """A callback with a counter in a hook that runs within the step."""

    def __init__(self) -> None:
        self.backwards = 0

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Count."""
        self.backwards += 1


class PackedLM(Trained, CausalLM):
    """The pretraining example on packed rows; its blocks are recomputed in the backward."""

    def __init__(self, optimizer: str) -> None:
        Trained.__init__(self, optimizer)
        CausalLM.__init__(self, VOCABULARY, WIDTH, 1, 2, packed_attention)
        self.optimizer = optimizer

    def loss(self, batch: PackedBatch) -> Tensor:
        """Cross-entropy a token."""
        logits, labels = self._logits_and_labels(batch)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Contrastive(Trained):
    """Two towers with dropout, whose negatives are the other rows of the batch."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.first, self.second = (
            nn.Sequential(
                nn.Flatten(), nn.Linear(36, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)
            )
            for _ in range(2)
        )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """CLIP's, of a picture and its mirror image."""
        one, other = (
            F.normalize(tower(pictures.to(self.dtype)), dim=1)
            for tower, pictures in ((self.first, batch[0]), (self.second, batch[0].flip(-1)))
        )
        scores = 5 * one @ other.T
        labels = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


class LongRow(Trained):
    """A block of causal attention and an MLP with dropout; the MLP takes tokens one by one."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.embedding, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1),
            nn.Linear(2 * WIDTH, WIDTH),
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy a label that is not -100."""
        hidden = self.embedding(batch["x"])
        scores, keys, values = self.qkv(hidden).chunk(3, -1)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=hidden.device).triu(1)
        weights = (scores @ keys.transpose(1, 2) / WIDTH**0.5).masked_fill(later, -1e4).softmax(-1)
        hidden = hidden + weights @ values
        logits = self.head(hidden + self.mlp(hidden))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class ShardedTransformer(Transformer):
    """Each of its layers is sharded over the ranks (FSDP2)."""

    def configure_model(self) -> None:
        """Shard once."""
        mesh: Any = self.device_mesh
        for part in (self.embedding, self.layer, self.head):
            if not isinstance(next(part.parameters()), DTensor):
                fully_shard(part, mesh=mesh["data_parallel"])


def model_named(name: str, optimizer: str) -> Trained:
    """A model with its weights from the global seed; `exact` has no dropout."""
    if name == "exact":
        return Transformer(optimizer, dropout=0.0)
    kinds: dict[str, type[Trained]] = {
        "transformer": Transformer, "cnn": CNN, "packed_lm": PackedLM, "sharded": ShardedTransformer,
        "ema_teacher": EMATeacher, "counters": Counters, "batch_in_place": BatchInPlace,
        "everything": Everything, "contrastive": Contrastive, "long_row": LongRow,
    }  # fmt: skip
    return kinds[name](optimizer)


def optimizer_named(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW in one of its kinds, all but `eight_bit` torch's; or one with buffers of its own."""
    if name == "own_buffers":
        return OwnBuffers(groups, lr=1e-2)
    if name == "eight_bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, lr=1e-2, min_8bit_size=64)  # else tensors as small as these keep 32 bits
    kind: dict[str, Any] = {"foreach": {"foreach": True}, "fused": {"fused": True}}.get(
        name, {"foreach": False}
    )
    return torch.optim.AdamW(groups, lr=1e-2, **kind)


def changing_optimizer(model: str) -> str:
    """What one of the models in `CHANGING` trains with."""
    return "own_buffers" if model == "everything" else "for_loop"


def extras(model: str, optimizer: str) -> tuple[list[Callback], list[Any]]:
    """The callbacks and the precision that make the case."""
    callbacks: list[Callback] = []
    if model == "packed_lm":
        callbacks = [
            ActivationCheckpointing("full", blocks=["Block"])
        ]  # one block repeats nothing: it is named
    if model == "counters":
        callbacks = [CountsBackwards()]
    pure = _PRECISIONS.get(optimizer)
    return callbacks, [] if pure is None else [PureBF16Precision(**pure)]


class CountedSampler(Sampler[int]):
    """A shuffled order that notes what was drawn: the loader's position."""

    def __init__(self, count: int) -> None:
        self.order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
        self.drawn: list[int] = []

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        for index in self.order:
            self.drawn.append(index)
            yield index


def loader_for(model: str, rank: int = 0) -> DataLoader:
    """One batch more than the run takes, so that the position tells."""
    samples, collate_fn = samples_for(model, rank)
    sampler = CountedSampler(len(samples))
    return DataLoader(samples, BATCH, sampler=sampler, collate_fn=collate_fn)  # pyright: ignore[reportArgumentType]


def samples_for(model: str, rank: int = 0) -> tuple[Sequence[Any], Any]:
    """Samples from a fixed seed, another one a rank, and their collate function."""
    count = BATCH * (STEPS + 1)
    generator = torch.Generator().manual_seed(11 + rank)
    if model in ("cnn", "batch_in_place", "everything", "contrastive"):
        pictures = torch.randn(count, 1, 6, 6, generator=generator)
        return [(picture, index % 4) for index, picture in enumerate(pictures)], None
    if model == "packed_lm":
        lengths = torch.randint(2, LENGTH, (4 * count,), generator=generator)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).numpy()
        tokens = torch.randint(0, VOCABULARY, (int(offsets[-1]),), generator=generator).numpy()
        store = TokenStore(tokens=tokens, offsets=offsets)
        packing = pack(store.lengths, 2 * LENGTH)
        return range(count), lambda rows: collate(store, packing, rows)
    rows = []
    for x in torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator):
        labels = x.roll(1).clone()
        labels[: int(torch.randint(0, LENGTH, (1,), generator=generator))] = -100
        rows.append({"x": x, "labels": labels})
    return rows, None
