"""Training steps written by hand whose loss is another one later in the run, or in batches of more rows.

The first batches of these steps prove nothing about the later ones: labels go missing, a first positive comes, ids
repeat, a function or a state changes with the number of steps. Others decompose in a few rows, and not in many.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._exactness_models import (
    CLASSES,
    HIDDEN,
    LATE,
    PARTS,
    ROWS_ACT,
    STATE,
    TERMS,
    VOCABULARY,
    Trained,
    at_least_float32,
)
from benchmarks._exactness_states import ADAPTERLESS, Classifier
from benchmarks._exactness_steps import CASES, LABELLED, Regression, case, each, from_loss, masked

__all__ = ["CASES"]  # those of all files

MANY = 6  # rows: more than are compared before a size is known, and fewer than a batch has


def kept_rows(model: Any, batch: Any) -> Tensor:
    """The rows whose target is known, in a loss that indexes them."""
    keep = ~batch["y"].isnan()
    return (model.logits(batch)[keep] - batch["y"][keep]).square().mean()


def known_targets(model: Any, batch: Any) -> Tensor:
    """The mean over known targets, by a mask."""
    keep = ~batch["y"].isnan()
    return masked((model.logits(batch) - batch["y"].nan_to_num()).square(), keep)


def ranked(model: Any, batch: Any) -> Tensor:
    """A hinge over pairs of a positive and a negative, once there is a positive."""
    scores, positive = model.logits(batch)[:, 0], batch["y"] > 0
    loss = scores.square().mean()
    if positive.any() and not positive.all():
        loss = loss + F.relu(1 - scores[positive, None] + scores[None, ~positive]).mean()
    return loss


def weighed_by_frequency(model: Any, batch: Any) -> Tensor:
    """Class weights made of the batch."""
    counts = torch.bincount(batch["y"], minlength=CLASSES).clamp(min=1)
    logits = model.logits(batch)
    return F.cross_entropy(logits, batch["y"], weight=(len(batch["y"]) / counts).to(logits.dtype))


def with_optional_term(model: Any, batch: Any) -> Tensor:
    """A second mean, over rows of which early batches have none."""
    loss = F.cross_entropy(model.logits(batch), batch["y"])
    if batch["extra"].any():
        loss = loss + 0.3 * masked(model.logits(batch).square().sum(1), batch["extra"])
    return loss


from_loss(
    "later_missing_targets", PARTS, {"x": "features", "y": "late holes"}, known_targets, base=Regression
)
from_loss("later_rows_by_index", PARTS, {"x": "features", "y": "late holes"}, kept_rows, base=Regression)
from_loss(
    "later_ignored_labels", PARTS, {"x": "features", "y": "late ignored classes"},
    lambda m, b: F.cross_entropy(m.logits(b), b["y"]),
)  # fmt: skip
from_loss("later_positives", ROWS_ACT, {"x": "features", "y": "late positives"}, ranked)
from_loss("weighed_by_frequency", ROWS_ACT, LABELLED, weighed_by_frequency)
from_loss("later_optional_term", TERMS, {**LABELLED, "extra": "late optional rows"}, with_optional_term)
from_loss(
    "hardest_of_many", ROWS_ACT, LABELLED, lambda m, b: each(m, b).topk(min(MANY, len(b["y"]))).values.mean()
)
from_loss(
    "hardest_later", ROWS_ACT, LABELLED,
    lambda m, b: each(m, b).mean() if m.global_step < LATE else each(m, b).sort().values[-3:].mean(),
)  # fmt: skip
from_loss(
    "centered_later", ROWS_ACT, LABELLED,
    lambda m, b: F.cross_entropy(
        (x := m.logits(b)) - (x.mean(0) if m.global_step >= LATE else 0.0), b["y"]
    ),
)  # fmt: skip


@case(ROWS_ACT, LABELLED)
class expert_of_limited_capacity(Classifier):  # noqa: N801
    """An expert that takes at most so many rows of a batch, as those of GShard do (Lepikhin et al. 2020)."""

    def logits(self, batch: Any) -> Tensor:
        """Rows beyond the expert's capacity keep their features, which are large beside its outputs."""
        taken = (torch.arange(len(batch["x"])) < MANY)[:, None]
        return at_least_float32(6 * batch["x"][:, :CLASSES] * ~taken + self.net(batch["x"]) * taken)


@case(ROWS_ACT, {"x": "late repeated ids", "y": "classes"}, dtypes=ADAPTERLESS)
class repeated_ids(Classifier):  # noqa: N801
    """An embedding that divides gradients by how often an id stands in the batch."""

    def build(self) -> nn.Module:
        """An embedding and a head."""
        embedding = nn.Embedding(VOCABULARY, HIDDEN, scale_grad_by_freq=True)
        return nn.Sequential(embedding, nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


@case(STATE, LABELLED, named="calls")
class counts_later(Classifier):  # noqa: N801
    """A counter that anneals the loss after a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy, scaled."""
        if self.global_step >= LATE:
            self.calls += 1
        return super().loss(batch) * 0.9**self.calls


@case(STATE, LABELLED, named="teacher", dtypes=ADAPTERLESS)  # a teacher with adapters would be trained
class teacher_later(Classifier):  # noqa: N801
    """A teacher that follows after a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy and the distance from the teacher."""
        with torch.no_grad():
            if self.global_step >= LATE:
                for mean, new in zip(self.teacher.parameters(), self.net.parameters(), strict=False):
                    if mean.shape == new.shape:
                        mean.lerp_(new.to(mean.dtype), 0.3)
            wanted = at_least_float32(self.teacher(batch["x"]))
        return super().loss(batch) + F.mse_loss(self.logits(batch), wanted)


@case(STATE, LABELLED, named="queue")
class queue_later(Classifier):  # noqa: N801
    """A queue of logits that fills after a warm-up."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.full((4, CLASSES), 0.1))

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy, with the queue's mean added."""
        x = self.logits(batch)
        shifted = x + self.queue.mean(0).to(x.dtype)
        if self.global_step >= LATE:
            self.queue = torch.cat([x.detach().to(self.queue.dtype), self.queue])[:4]
        return F.cross_entropy(shifted, batch["y"])


@case(STATE, LABELLED)
class passes_over_spikes(Classifier):  # noqa: N801
    """A batch whose loss is high is skipped, as guards against spikes do: those without a spike may be split."""

    def step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Cross-entropy, or nothing."""
        loss = super().step(batch, batch_idx)
        return None if loss.detach() > 1.7 else loss


@case(ROWS_ACT, LABELLED)
class one_number_a_batch(Trained):  # noqa: N801
    """A batch's rows are scaled by one random number, as mixup's weight is drawn."""

    def loss(self, batch: Any) -> Tensor:
        """Cross-entropy of scaled features."""
        scale = 0.5 + torch.rand(())
        return F.cross_entropy(self.logits({"x": batch["x"] * scale.to(batch["x"])}), batch["y"])
