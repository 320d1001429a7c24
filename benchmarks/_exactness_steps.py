"""Training steps written by hand: losses, and how they reduce. Those with state are in `_exactness_states`."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._exactness_models import (
    CLASSES,
    FEATURES,
    HIDDEN,
    OUTPUTS,
    PARTS,
    ROWS_ACT,
    TERMS,
    VOCABULARY,
    Case,
    Tokens,
    Trained,
)

LABELLED = {"x": "features", "y": "classes"}
TAGGED = {"x": "tokens", "labels": "ragged classes"}
CASES: list[Case] = []


def case(truth: str, columns: dict[str, str], **options: Any) -> Callable[[type], type]:
    """Register a module class as a case; its name is the class's."""

    def register(kind: type) -> type:
        CASES.append(Case(name=kind.__name__, truth=truth, module=kind, columns=columns, **options))
        return kind

    return register


def from_loss(
    name: str, truth: str, columns: dict[str, str], loss: Callable[[Any, Any], Tensor], **options: Any
) -> None:
    """Register a loss of the model and the batch."""
    base: type[LightningModule] = options.pop("base", Trained)
    kind = type(name, (base,), {"loss": lambda self, batch: loss(self, batch)})
    case(truth, columns, **options)(kind)


class Regression(Trained):
    """Three outputs."""

    def build(self) -> nn.Module:
        """An MLP."""
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))


class NextToken(Tokens):
    """Logits over the vocabulary; tokens see those before them by a running mean."""

    def build(self) -> nn.Module:
        """An embedding and a head."""
        return nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY))

    def logits(self, batch: Any) -> Tensor:
        """Mean of the embeddings so far, then the head."""
        embedded = self.net[0](batch["x"])
        places = torch.arange(1, embedded.shape[1] + 1, device=embedded.device).view(1, -1, 1)
        return self.net[1](embedded.cumsum(1) / places)


class Pictures(Trained):
    """Logits for each pixel."""

    def build(self) -> nn.Module:
        """Two convolutions, the second of one pixel: a linear layer, so that adapters find one."""
        return nn.Sequential(nn.Conv2d(2, HIDDEN, 3, padding=1), nn.Tanh())

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, CLASSES)

    def logits(self, batch: Any) -> Tensor:
        """By pixel."""
        return self.head(self.net(batch["x"].to(self.net[0].weight.dtype)).movedim(1, -1)).movedim(-1, 1)


def weight_of(model: LightningModule, classes: int, like: Tensor) -> Tensor:
    """Class weights."""
    return torch.tensor([1.0, 7.0, 0.25, 3.0][:classes], device=like.device, dtype=like.dtype)


def masked(loss: Tensor, mask: Tensor) -> Tensor:
    """The mean over what the mask keeps."""
    return (loss * mask).sum() / mask.sum()


def each(model: Any, batch: Any) -> Tensor:
    """Cross-entropy by row."""
    return F.cross_entropy(model.logits(batch), batch["y"], reduction="none")


def penalty(model: LightningModule) -> Tensor:
    """Of the weights: it looks at no row."""
    return torch.stack([weight.square().sum() for weight in model.parameters() if weight.requires_grad]).sum()


def mined(rows: Tensor, positive: Tensor) -> Tensor:
    """The hardest negatives, three for a positive, beside the positives."""
    positives, negatives = rows[positive], rows[~positive]
    hardest = negatives.topk(min(3 * len(positives), len(negatives))).values
    return (positives.sum() + hardest.sum()) / max(len(positives), 1)


def tokens_of(model: Any, batch: Any, name: str = "labels") -> Tensor:
    """Cross-entropy by token, 0 where ignored."""
    return F.cross_entropy(model.logits(batch).movedim(-1, 1), batch[name], reduction="none")


# One divisor: decomposable

from_loss("cross_entropy", PARTS, LABELLED, lambda m, b: F.cross_entropy(m.logits(b), b["y"]))
from_loss(
    "class_weights", PARTS, LABELLED,
    lambda m, b: F.cross_entropy(x := m.logits(b), b["y"], weight=weight_of(m, CLASSES, x)),
)  # fmt: skip
from_loss(
    "rare_positives", PARTS, {"x": "features", "y": "rare classes"},
    lambda m, b: F.cross_entropy(x := m.logits(b)[:, :2], b["y"], weight=weight_of(m, 2, x)),
)  # fmt: skip
from_loss(
    "ignore_index", PARTS, {"x": "features", "target": "mostly ignored classes"},
    lambda m, b: F.cross_entropy(m.logits(b), b["target"], ignore_index=-1),
)  # fmt: skip
from_loss(
    "smoothed_with_weights", PARTS, {"x": "features", "y": "ignored classes"},
    lambda m, b: F.cross_entropy(x := m.logits(b), b["y"], weight=weight_of(m, CLASSES, x), label_smoothing=0.1),
)  # fmt: skip
from_loss(
    "ragged_labels", PARTS, TAGGED, lambda m, b: F.cross_entropy(m.logits(b).flatten(0, 1), b["labels"].flatten()),
    base=Tokens,
)  # fmt: skip
from_loss(
    "mask_of_any_name", PARTS, {**LABELLED, "valid": "row mask"}, lambda m, b: masked(each(m, b), b["valid"])
)
from_loss(
    "rare_mask", PARTS, {**LABELLED, "keep": "rare row mask"},
    lambda m, b: (each(m, b) * b["keep"]).sum() / b["keep"].sum().clamp(min=1),
)  # fmt: skip
# Detectors divide by what they find, and the background's rows count as well (Lin et al. 2017).
from_loss("by_positives", PARTS, LABELLED, lambda m, b: each(m, b).sum() / (b["y"] > 1).sum().clamp(min=1))
from_loss(
    "seldom_kept_with_penalty", PARTS, {**LABELLED, "mask": "seldom row mask"},
    lambda m, b: (each(m, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1) + 0.1 * penalty(m),
)  # fmt: skip
from_loss(
    "kept_from_2", PARTS, LABELLED, lambda m, b: 0.3 * each(m, b).sum() / (b["y"] > 1).sum().clamp(min=2)
)
# No law makes the batch's divisor of its micro-batches'.
from_loss(
    "over_the_root", PARTS, LABELLED,
    lambda m, b: each(m, b).sum() / (b["y"] > 1).sum().clamp(min=1).to(torch.float32).sqrt(),
)  # fmt: skip
from_loss(
    "normalized_weights", PARTS, {**LABELLED, "w": "weights"},
    lambda m, b: (each(m, b) * b["w"] / b["w"].sum()).sum(),
)  # fmt: skip
from_loss(
    "two_losses_by_row", PARTS, LABELLED,
    lambda m, b: (each(m, b) + m.logits(b).square().mean(1)).sum() / (b["y"] > 1).sum().clamp(min=1),
)  # fmt: skip
# A row beyond its margin has no loss, and counts.
from_loss(
    "hinge_over_rows", PARTS, LABELLED,
    lambda m, b: F.relu(0.2 - m.logits(b)[:, 0] * (2 * (b["y"] > 1) - 1)).sum() / len(b["y"]),
)  # fmt: skip
from_loss("mined_negatives", ROWS_ACT, LABELLED, lambda m, b: mined(each(m, b), b["y"] > 1))
from_loss(
    "clamped_mean_of_mask", PARTS, {**LABELLED, "keep": "row mask"},
    lambda m, b: (each(m, b) * b["keep"]).mean() / b["keep"].mean().clamp(min=0.5),
)  # fmt: skip
from_loss(
    "token_mask", PARTS, {"x": "tokens", "targets": "token classes", "span": "token mask"},
    lambda m, b: masked(tokens_of(m, b, "targets"), b["span"]), base=Tokens,
)  # fmt: skip
from_loss("sum", PARTS, LABELLED, lambda m, b: F.cross_entropy(m.logits(b), b["y"], reduction="sum"))
from_loss("sum_over_constant", PARTS, LABELLED, lambda m, b: each(m, b).sum() / 32)
from_loss("sample_weights", PARTS, {**LABELLED, "w": "weights"}, lambda m, b: masked(each(m, b), b["w"]))
from_loss(
    "mse",
    PARTS,
    {"x": "features", "y": "floats"},
    lambda m, b: F.mse_loss(m.logits(b), b["y"]),
    base=Regression,
)
from_loss(
    "smooth_l1", PARTS, {"x": "features", "y": "floats"}, lambda m, b: F.smooth_l1_loss(m.logits(b), b["y"]),
    base=Regression,
)  # fmt: skip
from_loss(
    "multi_label", PARTS, {"x": "features", "y": "binary"},
    lambda m, b: F.binary_cross_entropy_with_logits(m.logits(b), b["y"]), base=Regression,
)  # fmt: skip
from_loss(
    "pos_weight", PARTS, {"x": "features", "y": "binary"},
    lambda m, b: F.binary_cross_entropy_with_logits(
        x := m.logits(b), b["y"], pos_weight=torch.tensor([9.0, 3.0, 1.0], dtype=x.dtype)
    ), base=Regression,
)  # fmt: skip
from_loss(
    "kl_div_batchmean", PARTS, {"x": "features", "shares": "shares"},
    lambda m, b: F.kl_div(m.logits(b).log_softmax(1), b["shares"], reduction="batchmean"),
)  # fmt: skip
from_loss("nll", PARTS, LABELLED, lambda m, b: F.nll_loss(m.logits(b).log_softmax(1), b["y"]))
from_loss(
    "mean_by_row_then_mean", PARTS, {"x": "tokens", "y": "token classes", "span": "token mask"},
    lambda m, b: ((tokens_of(m, b, "y") * b["span"]).sum(1) / b["span"].sum(1).clamp(min=1)).mean(), base=Tokens,
)  # fmt: skip
from_loss(
    "two_means_of_rows", PARTS, LABELLED,
    lambda m, b: F.cross_entropy(x := m.logits(b), b["y"]) + 0.1 * x.logsumexp(1).square().mean(),
)  # fmt: skip
from_loss(
    "weight_norms", PARTS, LABELLED,
    lambda m, b: F.cross_entropy(m.logits(b), b["y"]) + 0.01 * torch.stack([p.norm() for p in m.trainable()]).sum(),
)  # fmt: skip
from_loss(
    "sum_beside_weight_norm", TERMS, LABELLED,
    lambda m, b: each(m, b).sum() / 32 + 0.01 * torch.cat([p.flatten() for p in m.trainable()]).norm(),
)  # fmt: skip
from_loss(
    "segmentation", PARTS, {"x": "images", "mask": "segments"},
    lambda m, b: F.cross_entropy(m.logits(b), b["mask"], ignore_index=255), base=Pictures,
)  # fmt: skip
from_loss(
    "causal_shift", PARTS, {"x": "tokens", "labels": "ragged tokens"},
    lambda m, b: F.cross_entropy(
        m.logits(b)[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100
    ), base=NextToken,
)  # fmt: skip
from_loss(
    "causal_float32", PARTS, {"x": "tokens", "labels": "ragged tokens"},
    lambda m, b: F.cross_entropy(m.logits(b)[:, :-1].float().flatten(0, 1), b["labels"][:, 1:].flatten()),
    base=NextToken, float32_loss=True,
)  # fmt: skip
from_loss(
    "neighbours_beside_mask", PARTS,
    {"x": "tokens", "neighbours": "neighbours", "attention_mask": "attention", "labels": "ragged classes"},
    lambda m, b: F.cross_entropy(
        (m.logits(b) + m.logits({"x": b["neighbours"]}).mean(1, keepdim=True)).flatten(0, 1), b["labels"].flatten()
    ), base=Tokens,
)  # fmt: skip

# Several divisors


@case(TERMS, {**TAGGED, "y": "classes"})
class tokens_and_samples(Tokens):  # noqa: N801
    """One mean over tokens, one over samples."""

    def loss(self, batch: Any) -> Tensor:
        """The two means."""
        x = self.logits(batch)
        return F.cross_entropy(x.flatten(0, 1), batch["labels"].flatten()) + F.cross_entropy(
            x.mean(1), batch["y"]
        )


from_loss(
    "seldom_kept_beside_sum", TERMS, {**LABELLED, "mask": "seldom row mask"},
    lambda m, b: 0.02 * (x := m.logits(b)).square().sum() + (
        F.cross_entropy(x, b["y"], reduction="none") * b["mask"]
    ).sum() / (b["mask"].sum() + 1e-8),
)  # fmt: skip
from_loss(
    "seldom_kept_beside_sum_and_penalty", TERMS, {**LABELLED, "mask": "seldom row mask"},
    lambda m, b: 0.02 * (x := m.logits(b)).square().sum() + 0.1 * penalty(m) + (
        F.cross_entropy(x, b["y"], reduction="none") * b["mask"]
    ).sum() / b["mask"].sum().clamp(min=1),
)  # fmt: skip
from_loss(
    "two_masks", TERMS, {**LABELLED, "a": "row mask", "b": "rare row mask"},
    lambda m, b: masked(each(m, b), b["a"]) + 0.3 * masked(m.logits(b).square().sum(1), b["b"]),
)  # fmt: skip

from_loss(
    "column_means", TERMS, {"x": "features", "y": "floats", "has": "binary"},
    lambda m, b: (((m.logits(b) - b["y"]).square() * b["has"]).sum(0) / b["has"].sum(0).clamp(min=1)).mean(),
    base=Regression,
)  # fmt: skip


@case(TERMS, {**LABELLED, "target": "floats"})
class rows_of_one_task(Trained):  # noqa: N801
    """Rows of four tasks, each with its own head and the mean over its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(CLASSES, OUTPUTS) for _ in range(CLASSES))

    def loss(self, batch: Any) -> Tensor:
        """The sum over the tasks that the batch has."""
        x, members = self.logits(batch), [batch["y"] == task for task in range(CLASSES)]
        pairs = [(head, own) for head, own in zip(self.heads, members, strict=True) if own.any()]
        return torch.stack([F.mse_loss(head(x[own]), batch["target"][own]) for head, own in pairs]).sum()


@case(TERMS, {**LABELLED, "target": "floats"})
class columns_of_one_head(Trained):  # noqa: N801
    """The same with a column of one head's output for each task."""

    def loss(self, batch: Any) -> Tensor:
        """The sum over the tasks that the batch has, and a penalty."""
        x = self.logits(batch)
        loss = 0.1 * x.square().mean()
        for task in range(CLASSES):
            own = batch["y"] == task
            if own.any():
                loss = loss + F.mse_loss(x[own, task], batch["target"][own, 0])
        return loss


# Rows act on each other


@case(ROWS_ACT, LABELLED)
class auxiliary_in_train_mode(Trained):  # noqa: N801
    """A penalty on the mean prediction, in train mode only."""

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy and the penalty."""
        x = self.logits(batch)
        penalty = x.softmax(1).mean(0).square().sum() if self.training else x.new_zeros(())
        return F.cross_entropy(x, batch["y"]) + penalty


@case(ROWS_ACT, LABELLED)
class router(Trained):  # noqa: N801
    """A mixture of two experts whose router is balanced with a coefficient of 0.001."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.second = nn.Linear(FEATURES, 2), nn.Linear(FEATURES, CLASSES)

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy and the balancing loss."""
        gates = self.gate(batch["x"]).float() if self.dtype != torch.float64 else self.gate(batch["x"])
        gates = gates.softmax(1)
        x = gates[:, :1] * self.logits(batch) + gates[:, 1:] * self.second(batch["x"])
        shares = F.one_hot(gates.argmax(1), 2).to(gates.dtype).mean(0)
        return F.cross_entropy(x, batch["y"]) + 0.001 * 2 * (shares * gates.mean(0)).sum()


@case(ROWS_ACT, LABELLED)
class own_batch_norm(Trained):  # noqa: N801
    """Batch statistics without a module that says so."""

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy of normalized logits."""
        x = self.logits(batch)
        if self.training:
            x = F.batch_norm(x, None, None, training=True)
        return F.cross_entropy(x, batch["y"])


from_loss(
    "contrastive", ROWS_ACT, {"x": "features", "other": "other features"},
    lambda m, b: F.cross_entropy(m.logits(b) @ m.logits({"x": b["other"]}).T, torch.arange(len(b["x"]))),
)  # fmt: skip
from_loss(
    "root_of_mean", ROWS_ACT, {"x": "features", "y": "floats"},
    lambda m, b: F.mse_loss(m.logits(b), b["y"]).sqrt(), base=Regression,
)  # fmt: skip
from_loss("square_of_mean", ROWS_ACT, LABELLED, lambda m, b: F.cross_entropy(m.logits(b), b["y"]).square())
from_loss("logsumexp_of_rows", ROWS_ACT, LABELLED, lambda m, b: each(m, b).logsumexp(0))
from_loss(
    "std_of_batch", ROWS_ACT, LABELLED,
    lambda m, b: F.cross_entropy(x := m.logits(b), b["y"]) + 0.1 * x.std(0, correction=0).mean(),
)  # fmt: skip
from_loss("worst_row", ROWS_ACT, LABELLED, lambda m, b: each(m, b).max())
from_loss(
    "ratio_of_sums", ROWS_ACT, {"x": "features", "y": "binary"},
    lambda m, b: 1 - (2 * (m.logits(b).sigmoid() * b["y"]).sum() + 1) / ((m.logits(b).sigmoid() + b["y"]).sum() + 1),
    base=Regression,
)  # fmt: skip
