"""Training steps drawn at random: losses, masks, class weights, auxiliary terms, state and returns, from a seed.

What is drawn says by itself whether it decomposes: each term has a divisor, and a loss whose terms all have the same
one is a weighted combination of its micro-batches' losses.
"""

import copy
import random
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._exactness_later import CASES
from benchmarks._exactness_models import (
    CLASSES,
    FEATURES,
    HIDDEN,
    LATE,
    PARTS,
    ROWS_ACT,
    STATE,
    TERMS,
    VOCABULARY,
    Case,
    Trained,
    at_least_float32,
)
from lightning_memkit.micro_batching import IGNORED_LABEL

# What a term is divided by, as the truth needs it
ROWS, SUM, CONSTANT, COUPLED = "rows", "sum", "constant", "coupled"

_CLASSES = {
    "features": ("classes", "rare classes", "ignored classes"),
    "tokens": ("token classes", "ragged classes"),
}
_MASKS = {"features": ("row mask", "rare row mask", "weights"), "tokens": ("token mask",)}
_SELDOM = {"features": "seldom row mask", "tokens": "seldom token mask"}
_FUSED = ("cross_entropy", "nll", "mse", "smooth_l1", "bce", "kl_batchmean", "multi_margin", "poisson")
_ELEMENTS = ("cross_entropy", "mse", "l1", "bce", "focal", "hinge")
_REDUCTIONS = (
    "mean",
    "sum",
    "sum_over_32",
    "sum_over_rows",
    "masked",
    "masked_clamped",
    "indexed",
    "rows_then_mean",
)
# Of a mask that keeps nothing of some batches, beside terms that count without it
_OF_SELDOM = ("masked_clamped", "masked_or_1", "masked_eps")
_BESIDE_SELDOM = ((), (("weights", 0.1),), (("sum", 0.02),), (("weights", 0.1), ("sum", 0.02)))
_WRAPPERS = ("sqrt", "square", "log1p", "exp")
_TERMS = {
    "z": ROWS, "entropy": ROWS, "activity": ROWS, "other_mask": "other", "weights": CONSTANT,
    "sum": SUM, "batch_std": COUPLED, "mean_prediction": COUPLED, "train_only": COUPLED, "balance": COUPLED,
    "pairs": COUPLED, "worst": COUPLED,
}  # fmt: skip
# What has no gradient: a number, a mean over rows, or what is added to each element of the main term
_GRADIENT_FREE = ("constant", "rows", "elements")
_STATES = ("calls", "teacher", "running", "kept", "newest")
_RETURNS = ("tensor", "dict", "with_predictions", "with_scalar")
# What is logged or returned beside the loss: a mean over rows or labels, a sum, an extreme, in some batches only
_METRICS = ("rows", "labels", "sum", "largest", "returned", "sometimes")
_WEIGHED = ("task", "halved", "stacked", "dotted")
# What later batches hold and the first do not
_LATE = {
    "ignored classes": "late ignored classes", "ragged classes": "late ragged classes",
    "row mask": "late row mask", "token mask": "late token mask",
}  # fmt: skip
_OPTIMIZERS = ("adamw", "sgd", "rmsprop", "adagrad")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A training step as a list of choices.

    Args:
        seed: what it was drawn from.
        kind: rows of features, or of tokens.
        base: the loss.
        fused: one operator that reduces by itself, or elements that are reduced by hand.
        reduction: of elements, or "mean" or "sum" of a fused one.
        classes: the column of labels.
        class_weights: whether classes weigh differently.
        smoothing: of labels.
        mask: the column that masks elements.
        wrapper: what is done to the reduced loss.
        terms: more terms, with coefficients.
        free: what is added to the loss and has no gradient.
        weighed: how learned weights enter: of the main term, or of a vector of all terms; empty for none.
        state: what the step changes besides gradients.
        returns: what it returns.
        optimizer: by name.
        clip: of the gradient's norm; 0 for none.
        metric: a number of each row that is logged or returned; empty for none.
        norm: a layer between.
        names: of input, labels and masks in the batch.
        late: the first batches have all labels and full masks, and the first steps change no state.
    """

    seed: int
    kind: str
    base: str
    fused: bool
    reduction: str
    classes: str
    class_weights: bool
    smoothing: float
    mask: str
    wrapper: str
    terms: tuple[tuple[str, float], ...]
    free: str
    weighed: str
    state: str
    returns: str
    optimizer: str
    clip: float
    metric: str
    norm: str
    names: tuple[str, str, str]
    late: bool = False

    @property
    def divisor(self) -> str:
        """What the main term is divided by."""
        if not self.fused:
            masked = self.reduction in ("masked", "indexed", *_OF_SELDOM)
            by_mask = "kept rows" if self.reduction == "indexed" else "mask"
            return by_mask if masked else SUM if self.reduction in ("sum", "sum_over_32") else ROWS
        if self.reduction == "sum":
            return SUM
        labelled = self.base in ("cross_entropy", "nll")
        return "labels" if labelled and (self.class_weights or self.has_ignored) else ROWS

    @property
    def has_ignored(self) -> bool:
        """Whether some labels are -100."""
        return self.classes in ("ignored classes", "ragged classes")

    @property
    def truth(self) -> str:
        """Whether it decomposes, from its choices alone."""
        divisors = {self.divisor, *(_TERMS[name] for name, _ in self.terms)}
        if self.weighed:
            divisors.add(CONSTANT)
        if self.wrapper or COUPLED in divisors:
            return ROWS_ACT
        if self.state:
            return STATE
        constant = CONSTANT in divisors
        divisors.discard(CONSTANT)
        return PARTS if len(divisors) == 1 and not (constant and divisors == {SUM}) else TERMS

    @property
    def columns(self) -> dict[str, str]:
        """What the batch has."""
        x, y, mask = self.names
        columns = {x: "features" if self.kind == "features" else "tokens", y: self.classes}
        if not self.fused and self.divisor in ("mask", "kept rows"):
            columns[mask] = self.mask
        if any(name == "other_mask" for name, _ in self.terms):
            columns[f"{mask}_2"] = "token mask" if self.kind == "tokens" else "other row mask"
        return {name: _LATE.get(kind, kind) for name, kind in columns.items()} if self.late else columns


@cache
def cases_of(seed: int) -> list[Case]:
    """The steps written by hand, and as many drawn from the seed."""
    return [*CASES, *drawn_cases(seed, len(CASES))]


def drawn_cases(seed: int, count: int) -> list[Case]:
    """So many steps, others for each seed."""
    return [case_of(draw(random.Random(f"{seed} {index}"), 1000 * seed + index)) for index in range(count)]


def draw(rng: random.Random, seed: int) -> Drawn:
    """One step."""
    kind = rng.choice(("features", "features", "tokens"))
    fused = rng.random() < 0.5
    base = rng.choice(_FUSED if fused else _ELEMENTS)
    labelled = base in ("cross_entropy", "nll")
    classes = rng.choice(_CLASSES[kind]) if labelled and fused else _CLASSES[kind][0]
    coupled = [name for name, divisor in _TERMS.items() if divisor == COUPLED]
    harmless = [name for name, divisor in _TERMS.items() if divisor not in (COUPLED, SUM)]
    terms = [(rng.choice(coupled), rng.choice((0.001, 0.01, 0.3)))] if rng.random() < 0.2 else []
    if rng.random() < 0.3:
        terms.append((rng.choice(harmless), rng.choice((0.01, 0.1, 1.0))))
    own = random.Random(f"free {seed}")  # of its own: the other choices stay what they were
    drawn = Drawn(
        free=own.choice(_GRADIENT_FREE) if own.random() < 0.25 else "",
        weighed=own.choice(_WEIGHED) if own.random() < 0.15 else "",
        metric=own.choice(_METRICS) if own.random() < 0.6 else "",
        seed=seed, kind=kind, base=base, fused=fused,
        reduction=rng.choice(("mean", "mean", "mean", "sum") if fused else _REDUCTIONS),
        classes=classes,
        class_weights=labelled and fused and rng.random() < 0.5,
        smoothing=0.1 if base == "cross_entropy" and fused and rng.random() < 0.3 else 0.0,
        mask=rng.choice(_MASKS[kind]),
        wrapper=rng.choice(_WRAPPERS) if rng.random() < 0.12 else "",
        terms=tuple(terms),
        state=rng.choice(_STATES) if rng.random() < 0.15 else "",
        returns=rng.choice(_RETURNS), optimizer=rng.choice(_OPTIMIZERS),
        clip=rng.choice((0.0, 0.0, 0.05, 1.0)),
        norm=rng.choice(("", "", "layer", "group")),
        names=(
            rng.choice(("x", "inputs", "input_ids")), rng.choice(("y", "labels", "target", "answers")),
            rng.choice(("mask", "keep", "valid", "loss_mask", "attention_mask")),
        ),
    )  # fmt: skip
    drawn = replace(drawn, late=random.Random(f"late {seed}").random() < 0.25)
    return _seldom_masked(drawn) if drawn.divisor == "mask" else drawn


def _seldom_masked(drawn: Drawn) -> Drawn:
    """Half of the masks keep nothing of two batches in five, where the loss is kept from dividing by zero."""
    own = random.Random(f"seldom {drawn.seed}")
    if own.random() > 0.5:
        return drawn
    beside = own.choice(_BESIDE_SELDOM)
    return replace(
        drawn,
        mask=_SELDOM[drawn.kind],
        reduction=own.choice(_OF_SELDOM),
        terms=(*beside, *(term for term in drawn.terms if term[0] != "weights")),
    )


def case_of(drawn: Drawn) -> Case:
    """The case that trains it."""
    return Case(
        name=f"drawn_{drawn.seed}", truth=drawn.truth, module=partial(Composed, drawn), columns=drawn.columns,
        trainer={"gradient_clip_val": drawn.clip} if drawn.clip else {},
        named=drawn.state if drawn.truth == STATE else "",
    )  # fmt: skip


class Composed(Trained):
    """A model whose step is what was drawn."""

    running: Tensor

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn  # before `build`, and underscored: no state of the step
        super().__init__()
        if drawn.weighed:
            several = drawn.weighed in ("stacked", "dotted")
            self.weight = nn.Parameter(torch.full((1 + len(drawn.terms),) if several else (), 0.3))
        if drawn.state == "teacher":
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        elif drawn.state == "running":
            self.register_buffer("running", torch.zeros(CLASSES))
        elif drawn.state == "calls":
            self.calls = 0
        elif drawn.state == "kept":
            self.kept: list[Tensor] = []
        elif drawn.state == "newest":
            self.newest = torch.zeros(())

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_drawn":  # before nn.Module is set up
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def build(self) -> nn.Module:
        """Two linear layers, over features or embedded tokens."""
        kind, norm = self._drawn.kind, self._drawn.norm
        first = nn.Linear(FEATURES, HIDDEN) if kind == "features" else nn.Embedding(VOCABULARY, HIDDEN)
        between = {"layer": [nn.LayerNorm(HIDDEN)], "group": [_Groups()]}.get(norm, [])
        middle = [nn.Linear(HIDDEN, HIDDEN)] if kind == "tokens" else []
        return nn.Sequential(first, *middle, *between, nn.Tanh(), nn.Linear(HIDDEN, CLASSES))

    def step(self, batch: Any, batch_idx: int) -> Any:
        """What was drawn."""
        drawn = self._drawn
        x = at_least_float32(self.net(batch[drawn.names[0]]))
        loss = _main(drawn, x, batch)
        loss = {"sqrt": lambda v: (v + 1).sqrt(), "square": torch.square, "log1p": torch.log1p,
                "exp": lambda v: (v / 8).exp()}.get(drawn.wrapper, lambda v: v)(loss)  # fmt: skip
        if drawn.weighed == "task":
            loss = (-self.weight).exp() * loss + self.weight
        elif drawn.weighed == "halved":
            loss = loss / (2 * self.weight**2) + self.weight / 2
        free: Tensor | float | None = 0.75 if drawn.free == "constant" else None
        if drawn.free == "rows":
            free = _surprise(drawn, x, batch).mean()
        terms = [coefficient * _term(self, name, x, batch) for name, coefficient in drawn.terms]
        if drawn.weighed in ("stacked", "dotted"):
            stacked = torch.stack([loss, *terms])
            if drawn.weighed == "stacked":
                loss = (stacked * (-self.weight).exp() + self.weight / 2).sum()
            else:
                loss = stacked @ self.weight.softmax(0).to(stacked)
            terms = []
        loss = sum(terms, start=loss if free is None else loss + free)
        loss = self._with_state(x, batch, loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return self._returned(x, loss, self._metric(x, batch, batch_idx))

    def _metric(self, x: Tensor, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Of how sure the model is of each row: logged, or what is to be returned."""
        kind, y = self._drawn.metric, batch[self._drawn.names[1]]
        sure = x.detach().softmax(-1).amax(-1)
        counts = (y != IGNORED_LABEL).to(sure) if y.shape == sure.shape else torch.ones_like(sure)
        value = {
            "labels": lambda: (sure * counts).sum() / counts.sum(),
            "sum": sure.sum,
            "largest": sure.max,
        }.get(kind, sure.mean)()
        if kind == "returned":
            return {"sure": value}
        if kind and (kind != "sometimes" or batch_idx % 2):
            reduce_fx = {"sum": "sum", "largest": "max"}.get(kind, "mean")
            self.log("sure", value, reduce_fx=reduce_fx, on_step=kind != "sum", on_epoch=kind == "sum")
        return {}

    def _with_state(self, x: Tensor, batch: Any, loss: Tensor) -> Tensor:
        state = self._drawn.state
        if self._drawn.late and self.global_step < LATE:
            state = ""
        if state == "calls":
            self.calls += 1
            return loss * (1 + 1 / self.calls)
        if state == "teacher":
            with torch.no_grad():
                for mean, new in zip(self.teacher.parameters(), self.net.parameters(), strict=False):
                    if mean.shape == new.shape:
                        mean.lerp_(new.to(mean.dtype), 0.3)
                wanted = at_least_float32(self.teacher(batch[self._drawn.names[0]]))
            return loss + F.mse_loss(x, wanted)
        if state == "running":
            with torch.no_grad():
                self.running.lerp_(x.flatten(0, -2).mean(0).to(self.running.dtype), 0.2)
        elif state == "kept":
            self.kept.append(loss.detach())
        elif state == "newest":
            self.newest = loss.detach()
        return loss

    def _returned(self, x: Tensor, loss: Tensor, more: dict[str, Tensor]) -> Any:
        extra = {"with_predictions": {"predictions": x.detach()}, "with_scalar": {"mean": loss.detach()}}
        kind = self._drawn.returns
        return loss if kind == "tensor" and not more else {"loss": loss, **extra.get(kind, {}), **more}

    def configure_optimizers(self) -> Any:
        """By name; with an epsilon as `Trained` has it. A sum is larger than a mean: SGD would diverge on it."""
        rate = 0.05 / (48 if self._drawn.divisor == SUM else 1)
        kinds: dict[str, Any] = {
            "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),
            "sgd": partial(torch.optim.SGD, lr=rate, momentum=0.9),
            "rmsprop": partial(torch.optim.RMSprop, lr=3e-3, eps=1e-3),
            "adagrad": partial(torch.optim.Adagrad, lr=3e-2, eps=1e-3, initial_accumulator_value=0.1),
        }
        return kinds[self._drawn.optimizer](self.trainable())


class _Groups(nn.Module):
    """Group normalization over the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, HIDDEN)).view(x.shape)


def _main(drawn: Drawn, x: Tensor, batch: Any) -> Tensor:
    """The reduced main term."""
    y = batch[drawn.names[1]]
    if drawn.fused:
        return _fused(drawn, x, y)
    elements = _elements(drawn.base, x, y)
    if drawn.free == "elements":
        elements = elements + _surprise(drawn, x, batch)
    return _reduced(drawn, elements, batch)


def _surprise(drawn: Drawn, x: Tensor, batch: Any) -> Tensor:
    """A number of each row or token that has no gradient, as the entropy of soft targets has none."""
    return _hot(batch[drawn.names[1]], x).add(0.1).square().sum(-1).log() * (1 + x.detach().abs().mean(-1))


def _fused(drawn: Drawn, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 7.0, 0.25, 3.0], dtype=x.dtype) if drawn.class_weights else None
    rows, flat, reduction = x.flatten(0, -2), y.flatten(), drawn.reduction
    if drawn.base == "cross_entropy":
        return F.cross_entropy(
            rows, flat, weight=weight, reduction=reduction, label_smoothing=drawn.smoothing
        )
    if drawn.base == "nll":
        return F.nll_loss(rows.log_softmax(1), flat, weight=weight, reduction=reduction)
    hot = _hot(y, x)
    if drawn.base == "kl_batchmean":
        reduction = "batchmean" if reduction == "mean" else reduction
        return F.kl_div(rows.log_softmax(1), (hot.flatten(0, -2) + 0.1) / 1.4, reduction=reduction)
    if drawn.base == "multi_margin":
        return F.multi_margin_loss(rows, flat, reduction=reduction)
    kinds: dict[str, Any] = {
        "mse": F.mse_loss, "smooth_l1": F.smooth_l1_loss, "bce": F.binary_cross_entropy_with_logits,
        "poisson": F.poisson_nll_loss,
    }  # fmt: skip
    return kinds[drawn.base](x, hot, reduction=reduction)


def _elements(base: str, x: Tensor, y: Tensor) -> Tensor:
    """The loss of each row or token."""
    hot = _hot(y, x)
    if base == "mse":
        return (x - hot).square().mean(-1)
    if base == "l1":
        return (x - hot).abs().sum(-1)
    if base == "bce":
        return F.binary_cross_entropy_with_logits(x, hot, reduction="none").mean(-1)
    if base == "hinge":
        return (1 - x * (2 * hot - 1)).clamp(min=0).mean(-1)
    elements = -x.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return elements if base == "cross_entropy" else (1 - (-elements).exp()).square() * elements


def _hot(y: Tensor, x: Tensor) -> Tensor:
    return F.one_hot(y.clamp(min=0), CLASSES).to(x.dtype)


def _reduced(drawn: Drawn, elements: Tensor, batch: Any) -> Tensor:
    mask: Any = batch.get(drawn.names[2], elements.new_ones(())).to(elements.dtype)
    kinds: dict[str, Any] = {
        "mean": lambda: elements.mean(),
        "sum": lambda: elements.sum(),
        "sum_over_32": lambda: elements.sum() / 32,
        "sum_over_rows": lambda: elements.sum() / len(elements),
        "masked": lambda: (elements * mask).sum() / mask.sum(),
        "masked_clamped": lambda: (elements * mask).sum() / mask.sum().clamp(min=1e-6),
        "masked_or_1": lambda: (elements * mask).sum() / mask.sum().clamp(min=1),
        "masked_eps": lambda: (elements * mask).sum() / (mask.sum() + 1e-8),
        "indexed": lambda: elements[mask > 0].mean(),
        "rows_then_mean": lambda: (
            elements.flatten(1).mean(1).mean() if elements.ndim > 1 else elements.mean()
        ),
    }
    return kinds[drawn.reduction]()


def _term(module: Composed, name: str, x: Tensor, batch: Any) -> Tensor:
    """One more term of the loss."""
    rows = x.flatten(0, -2)
    shares = rows.softmax(1)
    if name == "z":
        return rows.logsumexp(1).square().mean()
    if name == "entropy":
        return (shares * rows.log_softmax(1)).sum(1).mean()
    if name == "activity":
        return x.abs().mean()
    if name == "other_mask":
        mask = batch[f"{module._drawn.names[2]}_2"].to(x.dtype)
        return (x.square().sum(-1) * mask).sum() / mask.sum()
    if name == "weights":
        return torch.stack([p.square().sum().to(x.dtype) for p in module.trainable()]).sum()
    if name == "sum":
        return x.square().sum()
    if name == "batch_std":
        return rows.std(0, correction=0).mean()
    if name == "mean_prediction" or name == "balance":
        chosen = (
            F.one_hot(shares.argmax(1), CLASSES).to(x.dtype).mean(0) if name == "balance" else shares.mean(0)
        )
        return CLASSES * (chosen * shares.mean(0)).sum()
    if name == "train_only":
        return shares.mean(0).square().sum() if module.training else x.new_zeros(())
    if name == "pairs":
        return (rows @ rows.T).square().mean()
    return rows.square().sum(1).max()  # worst


__all__ = ["Drawn", "case_of", "draw", "drawn_cases"]
