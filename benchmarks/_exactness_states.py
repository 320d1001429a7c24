"""Training steps written by hand that do more than a loss: state, returns, hooks, optimizers, own Functions."""

import copy
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from benchmarks._exactness_models import (
    CLASSES,
    FEATURES,
    HIDDEN,
    PARTS,
    ROWS_ACT,
    STATE,
    TERMS,
    VOCABULARY,
    Pair,
    Tokens,
    Trained,
    at_least_float32,
)
from benchmarks._exactness_steps import CASES, LABELLED, TAGGED, case, each, from_loss

__all__ = ["CASES"]  # those of both files

ADAPTERLESS = ("float64", "float32", "bf16-mixed", "pure-bf16")
BATCH_STATISTICS = "statistics of the batch"


class Classifier(Trained):
    """Cross-entropy of a batch with `x` and `y`."""

    def loss(self, batch: Any) -> Tensor:
        """The mean over rows."""
        return F.cross_entropy(self.logits(batch), batch["y"])


# What a step changes besides gradients


@case(STATE, LABELLED, named="calls")
class annealed_by_a_counter(Classifier):  # noqa: N801
    """A coefficient that falls with the calls of training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy and a penalty."""
        self.calls += 1
        return super().loss(batch) + self.logits(batch).square().mean() / self.calls


@case(STATE, LABELLED, named="teacher")
class moving_teacher(Classifier):  # noqa: N801
    """A teacher whose weights follow the student's in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy and the distance from the teacher, which moves first."""
        with torch.no_grad():
            for mean, new in zip(self.teacher.parameters(), self.net.parameters(), strict=False):
                if mean.shape == new.shape:
                    mean.mul_(0.7).add_(new, alpha=0.3)
            wanted = at_least_float32(self.teacher(batch["x"]))
        return super().loss(batch) + F.mse_loss(self.logits(batch), wanted)


@case(STATE, LABELLED, named="center")
class running_center(Classifier):  # noqa: N801
    """A buffer that follows the mean of the logits, and is subtracted."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES))

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy of centered logits."""
        x = self.logits(batch)
        with torch.no_grad():
            self.center.lerp_(x.mean(0).to(self.center.dtype), 0.2)
        return F.cross_entropy(x * (1 + self.center.to(x.dtype)), batch["y"])


@case(STATE, LABELLED, named="queue")
class queue_of_negatives(Classifier):  # noqa: N801
    """The last batch's logits are contrasted with."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.zeros(4, CLASSES)

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy, with the queue as more classes."""
        x = self.logits(batch)
        against = torch.cat([x, x @ self.queue.to(x.dtype).T], 1)
        self.queue = torch.cat([x.detach(), self.queue.to(x.dtype)])[:4]
        return F.cross_entropy(against, batch["y"])


@case(STATE, LABELLED, named="losses")
class appended_list(Classifier):  # noqa: N801
    """Each loss is kept, as of old for the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy, kept."""
        loss = super().loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        """The epoch's mean of the steps' losses."""
        self.log("mean_of_steps", torch.stack(self.losses).mean())
        self.losses.clear()


@case(STATE, LABELLED, named="last")
class overwritten_attribute(Classifier):  # noqa: N801
    """The last logits stay on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy."""
        self.last = self.logits(batch).detach()
        return super().loss(batch)


@case(STATE, LABELLED)
class batch_in_place(Classifier):  # noqa: N801
    """Scales the batch itself, and reads it again at the end of the batch."""

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy of the scaled batch."""
        batch["x"].div_(3.0)
        return super().loss(batch)


@case(STATE, LABELLED, batches=(8, 8, 5, 8, 8, 3))
class metric_object(Classifier):  # noqa: N801
    """An accuracy and a mean that know how to be averaged over an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.mean = MulticlassAccuracy(CLASSES, average="micro"), MeanMetric()

    def step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy, with metrics."""
        x = self.logits(batch)
        loss = F.cross_entropy(x, batch["y"])
        self.accuracy(x, batch["y"])
        self.mean(loss.detach())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


# What is logged and returned


@case(PARTS, LABELLED)
class logs_of_all_kinds(Classifier):  # noqa: N801
    """Means, sums and extremes."""

    def step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy, with its like."""
        x = self.logits(batch)
        loss = F.cross_entropy(x, batch["y"])
        right = (x.argmax(1) == batch["y"]).to(x.dtype)  # float32 means would tell their own rounding
        self.log_dict({"loss": loss, "accuracy": right.mean()}, on_step=True, on_epoch=True)
        self.log("right", right.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest", x.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("smallest", x.min(), reduce_fx="min", on_step=False, on_epoch=True)
        return loss


@case(PARTS, LABELLED)
class returns_tensors(Classifier):  # noqa: N801
    """Predictions beside the loss."""

    def step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """A dictionary."""
        x = self.logits(batch)
        return {"loss": F.cross_entropy(x, batch["y"]), "predictions": x.detach(), "labels": batch["y"]}


@case(STATE, LABELLED)
class returns_lists(Classifier):  # noqa: N801
    """Plain numbers and lists beside the loss."""

    def step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """A dictionary."""
        x = self.logits(batch)
        classes = x.argmax(1).tolist()
        return {
            "loss": F.cross_entropy(x, batch["y"]),
            "classes": classes,
            "right": int((x.argmax(1) == batch["y"]).sum()),
        }


@case(PARTS, {"x": "features", "y": "seldom labelled"})
class none_without_labels(Classifier):  # noqa: N801
    """Batches of which no row has a label are passed over."""

    def step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Cross-entropy or nothing."""
        return None if not bool((batch["y"] != -100).any()) else super().step(batch, batch_idx)


@case(PARTS, LABELLED)
class annealed_by_global_step(Classifier):  # noqa: N801
    """The trainer's counter does not change within a step."""

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy and a penalty that falls."""
        return super().loss(batch) + self.logits(batch).square().mean() / (1 + self.global_step)


# Operators that show no divisor


class _Squares(torch.autograd.Function):
    """The mean of squares, with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x - y)
        return (x - y).square().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (off,) = ctx.saved_tensors
        return grads[0] * 2 * off / off.numel(), None


from_loss(
    "own_function", PARTS, {"x": "features", "y": "shares"}, lambda m, b: _Squares.apply(m.logits(b), b["y"]),
)  # fmt: skip
from_loss(
    "own_autocast", PARTS, LABELLED,
    lambda m, b: _under_autocast(m, b), dtypes=("float32",),
)  # fmt: skip
from_loss(
    "boolean_index", PARTS, {**LABELLED, "keep": "row mask"}, lambda m, b: each(m, b)[b["keep"] > 0].mean()
)
from_loss("over_rows_by_hand", PARTS, LABELLED, lambda m, b: each(m, b).sum() / len(b["y"]))
from_loss(
    "penalty_on_weights", PARTS, LABELLED,
    lambda m, b: F.cross_entropy(m.logits(b), b["y"]) + 1e-2 * sum(p.square().sum() for p in m.trainable()),
)  # fmt: skip
from_loss(
    "sum_and_penalty_on_weights", TERMS, LABELLED,
    lambda m, b: each(m, b).sum() + 1e-1 * sum(p.square().sum() for p in m.trainable()),
)  # fmt: skip


def _under_autocast(model: Any, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model.net(batch["x"]), batch["y"])


# Layers


@case(PARTS, LABELLED, dtypes=("float64", "float32", "bf16-mixed"))
class lazy_layers(Classifier):  # noqa: N801
    """A layer that learns its width from the first batch."""

    def build(self) -> nn.Module:
        """A lazy first layer."""
        return nn.Sequential(nn.LazyLinear(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


@case(ROWS_ACT, LABELLED, warned=BATCH_STATISTICS, dtypes=ADAPTERLESS)
class batch_norm(Classifier):  # noqa: N801
    """Normalizes with batch statistics, as documented."""

    def build(self) -> nn.Module:
        """BatchNorm1d between the layers."""
        return nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )


@case(PARTS, LABELLED)
class dropout_of_nothing(Classifier):  # noqa: N801
    """A dropout layer that drops nothing."""

    def build(self) -> nn.Module:
        """Dropout between the layers."""
        return nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.Dropout(0.0), nn.Linear(HIDDEN, CLASSES)
        )


@case(PARTS, TAGGED, dtypes=("float64", "float32", "pure-bf16"))
class recurrent(Tokens):  # noqa: N801
    """A GRU over ragged rows."""

    def build(self) -> nn.Module:
        """Embedding, GRU and head are called by name."""
        return nn.ModuleDict({
            "embedding": nn.Embedding(VOCABULARY, HIDDEN), "mix": nn.GRU(HIDDEN, HIDDEN, batch_first=True),
            "head": nn.Linear(HIDDEN, CLASSES),
        })  # fmt: skip

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy a label."""
        mixed = self.net["mix"](self.net["embedding"](batch["x"]))[0]
        return F.cross_entropy(
            at_least_float32(self.net["head"](mixed)).flatten(0, 1), batch["labels"].flatten()
        )


# Batches


@case(PARTS, LABELLED, container=lambda batch: Pair(**batch))
class named_tuple(Classifier):  # noqa: N801
    """A batch with fields."""

    def loss(self, batch: Any) -> Tensor:
        """The mean over rows."""
        return F.cross_entropy(self.logits({"x": batch.x}), batch.y)


@case(PARTS, TAGGED, container=lambda batch: [batch["x"], batch["labels"]], batches=(2, 8, 8, 8, 8, 8))
class growing_batches(Tokens):  # noqa: N801
    """A small first batch, in a list."""

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy a label."""
        return F.cross_entropy(self.logits({"x": batch[0]}).flatten(0, 1), batch[1].flatten())


# Optimizers, clipping, accumulation, hooks


@case(PARTS, LABELLED, trainer={"gradient_clip_val": 0.05})
class clipped(Classifier):  # noqa: N801
    """Every gradient is clipped; the learning rate falls with each step, in two groups."""

    def configure_optimizers(self) -> Any:
        """SGD with momentum."""
        first, *others = self.trainable()
        groups = [{"params": [first], "lr": 0.1}, {"params": others, "weight_decay": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=0.3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@case(PARTS, {"x": "features", "y": "ignored classes"}, trainer={"accumulate_grad_batches": 2})
class accumulated(Classifier):  # noqa: N801
    """Lightning's own accumulation weighs its batches alike, and so does this."""


class SAM(torch.optim.SGD):
    """Sharpness-aware minimization over SGD: the closure is evaluated at the weights, and beside them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Without a closure it is SGD."""
        if closure is None:
            return super().step()
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm() + 1e-12
        moves = [p.grad * (0.1 / norm).to(p.grad.dtype) for p in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.add_(move)
        with torch.enable_grad():
            closure()
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.sub_(move)
        super().step()
        return loss


@case(PARTS, LABELLED, dtypes=("float64", "float32", "bf16-mixed"))
class sharpness_aware(Classifier):  # noqa: N801
    """Two evaluations a step."""

    def configure_optimizers(self) -> Any:
        """SAM."""
        return SAM(self.trainable(), lr=0.3, momentum=0.5)


@case(PARTS, LABELLED, dtypes=("float64", "float32"))
class lbfgs(Classifier):  # noqa: N801
    """Several evaluations a step."""

    def configure_optimizers(self) -> Any:
        """LBFGS with few evaluations."""
        return torch.optim.LBFGS(self.trainable(), lr=0.3, max_iter=3)


@case(STATE, LABELLED)
class clamped_by_hooks(Classifier):  # noqa: N801
    """A hook on each parameter's gradient that is not linear."""

    def configure_optimizers(self) -> Any:
        """SGD on clamped gradients."""
        for parameter in self.trainable():
            parameter.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
        return torch.optim.SGD(self.trainable(), lr=0.3)


class _ClampInCallback(Callback):
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.02, 0.02)


@case(STATE, LABELLED, callbacks=lambda: [_ClampInCallback()])
class clamped_by_a_callback(Classifier):  # noqa: N801
    """A callback changes gradients after the backward."""
