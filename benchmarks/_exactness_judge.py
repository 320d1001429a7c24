"""What became of a cell: a run under MemoryBudget, judged against the unsplit run of the same seed.

In float64 everything is compared to 1e-12 of its size. In a smaller dtype the unsplit run is itself off: a run of the
same weights and batches in a larger dtype tells by how much, parameter by parameter, and so do unsplit runs whose
losses were scaled by numbers that are no powers of two, and whose gradients were scaled back: all is rounded anew in
them, as it is where micro-batches are brought to scale once their batch has run. A run in micro-batches may be off
from the unsplit one by a few times that, and no more; where the unsplit run diverges, so does it in the same batch. In
float64, too, where LBFGS or a run that diverges makes more than 1e-12 of a rounding.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks._exactness_by_hand import ADDS_IN_BFLOAT16
from benchmarks._exactness_models import ROWS_ACT, Case
from benchmarks._exactness_runs import Seen, Trace

EQUAL, WHOLE, REFUSED, WARNED, DIFFERENT = "equal", "whole", "refused", "warned", "different"
CHUNKED = "chunked"  # equal, with the batches whole and modules in chunks
SPLIT = "split"  # where a batch was split that has no weights
OUTCOMES = (WHOLE, CHUNKED, EQUAL, WARNED, REFUSED, DIFFERENT)

# What has no gradient in a loss: the warning, and what holds the loss
_UNTOLD = "The loss that is reported of a batch in micro-batches is not the whole batch's"
_NAMED = re.compile(r"(?:logs as|returns as) '([^']+)'")
_LOSS = r"(outputs (loss|mean)|logged loss|state (newest|kept))"
LOSS = "loss."  # among what a step returns
EXACT = 1e-12  # of a tensor's largest value, in float64
FLOAT32_LOSS = 2e-5  # the same, where a float64 model's loss is taken in float32
# Times the unsplit run's own error. With weights known to be right, no run in micro-batches came to a third of this
# (tests hold a sample to it).
NOISE = {"float64": 4.0, "float32": 4.0, "bf16-mixed": 3.0, "pure-bf16": 3.0, "lora": 3.0}
# Of a tensor's norm: what rounding its own elements costs, whatever the unsplit run's luck was.
STORED = {"float64": 0.0, "float32": 5e-7, "bf16-mixed": 5e-7, "pure-bf16": 2e-3, "lora": 5e-7}
VALUES = {
    "float64": 0.0,
    "float32": 5e-6,
    "bf16-mixed": 8e-3,
    "pure-bf16": 2e-2,
    "lora": 2e-2,
}  # logged values and outputs

_ROUNDED = {"float64": 1e-13, "float32": 1e-6}  # of the largest gradient: what is smaller is rounding


@dataclass(frozen=True)
class Verdict:
    """An outcome, and what there is to say of it.

    Args:
        outcome: one of OUTCOMES.
        where: the worst parameter or value.
        difference: by how many times it is off more than is allowed, or the error.
        at_step: the first batch, over all epochs, at which something differs; -1 where that is unknown.
        split: whether any batch was split.
    """

    outcome: str
    where: str = ""
    difference: str = ""
    at_step: int = -1
    split: bool = False


@dataclass(frozen=True)
class Excess:
    """How often a difference holds what is allowed; over 1 it differs."""

    ratio: float
    where: str
    at_step: int
    text: str


def judge(
    case: Case,
    dtype: str,
    run: Trace,
    plain: Trace,
    others: Sequence[Trace] = (),
    by_hand: Sequence[Trace] = (),
) -> Verdict:
    """Compare a run with the unsplit one.

    Args:
        case: what was trained.
        dtype: in what.
        run: under MemoryBudget.
        plain: without it.
        others: the unsplit run in a larger dtype, then those of scaled losses; none for float64.
        by_hand: runs whose step adds up its parts itself, with right weights.

    Raises:
        ValueError: the unsplit run failed: the case is no case.
    """
    for unsplit in (plain, *others):
        if unsplit.error is not None:
            raise ValueError(f"{case.name} in {dtype} fails without memkit: {unsplit.error!r}")
    noise = Noise(dtype, case, plain, others, by_hand)
    if run.error is not None:
        return _of_error(run, case, noise)
    found = excesses(run, noise)
    worst = max(found, key=lambda one: one.ratio)
    split = bool(run.split_at)
    if worst.ratio > 1:
        first = min((one for one in found if one.ratio > 1), key=lambda one: one.at_step)
        kind = WARNED if _was_warned(case, run, found) else DIFFERENT
        return Verdict(kind, worst.where, worst.text, first.at_step, split)
    # In float64, gradients, weights, values and state are then equal to 1e-12: what the rows of these batches do to
    # each other is nothing, as where a router chose one expert for all of them.
    shows_all = dtype == "float64" and not (case.float32_loss or others)
    if split and case.truth == ROWS_ACT and not case.warned and not shows_all:
        return Verdict(DIFFERENT, SPLIT, "rows act on each other, and no dtype hides that", 0, split)
    outcome = EQUAL if split else CHUNKED if run.in_chunks else WHOLE
    return Verdict(outcome, worst.where, worst.text, split=split)


def _of_error(run: Trace, case: Case, noise: "Noise") -> Verdict:
    said = f"{type(run.error).__name__}: {run.error}"
    if not run.ours:
        return Verdict(DIFFERENT, "crashed", said, run.at_step)
    if case.named and not re.search(case.named, said):
        return Verdict(DIFFERENT, f"refused without naming {case.named}", said, run.at_step)
    before = noise.plain.weights[run.at_step - 1] if run.at_step else noise.plain.start
    if run.start:
        found = [noise.weights(name, run.weights[-1], before, run.at_step) for name in before]
        worst = max(found, key=lambda one: one.ratio)
        if worst.ratio > 1:
            return Verdict(DIFFERENT, worst.where, f"changed before it refused: {worst.text}", run.at_step)
    return Verdict(REFUSED, "", said, run.at_step)


def _was_warned(case: Case, run: Trace, found: list[Excess]) -> bool:
    """Whether all that differs was named by a warning: batch statistics, a logged value, or the loss as reported."""
    if case.warned and any(re.search(case.warned, text) for text in run.warned):
        return True
    return all(
        one.ratio <= 1
        or any(
            one.where == f"{kind} {name}"
            for kind in ("logged", "outputs")
            for name in _NAMED.findall(" ".join(run.warned))
        )
        or (re.match(_LOSS, one.where) and any(_UNTOLD in text for text in run.warned))
        for one in found
    )


def excesses(run: Trace, noise: "Noise") -> list[Excess]:
    """Every weight after every batch, the first gradients, outputs, logged values and the state at the end."""
    plain = noise.plain
    found = [
        noise.weights(name, ours, theirs, index)
        for index, (ours, theirs) in enumerate(zip(run.weights, plain.weights, strict=True))
        for name in theirs
    ]
    found += noise.gradients(run)
    for kind in ("outputs", "logged"):
        series = list(zip(getattr(run, kind), getattr(plain, kind), strict=True))
        for index, (ours, theirs) in enumerate(series):
            found += noise.values(kind, ours, theirs, min(index, len(plain.weights) - 1))
    return found + noise.values("state", run.state, plain.state, len(plain.weights) - 1)


class Noise:
    """What the unsplit run is itself off by, and so what is allowed.

    Args:
        dtype: in what was trained.
        case: what was trained.
        plain: the unsplit run.
        others: unsplit runs that differ from it by rounding alone; none in float64.
        by_hand: those whose weights and gradients are rounded part by part.

    Attributes:
        rounded: the parameters whose gradients are rounding: their weights are not compared.
    """

    def __init__(
        self, dtype: str, case: Case, plain: Trace, others: Sequence[Trace], by_hand: Sequence[Trace] = ()
    ) -> None:
        self.plain = plain
        self._by_hand = by_hand if dtype != ADDS_IN_BFLOAT16 else ()
        self._off_loss = _off_losses(plain, by_hand) if dtype == ADDS_IN_BFLOAT16 else 0.0
        self._exact = FLOAT32_LOSS if case.float32_loss else EXACT
        self._dtype, self._others = dtype, others
        self.rounded = _rounded(plain, dtype)
        self._off: dict[str, float] = {}
        self._off_gradients: dict[str, float] = {}
        if not others:
            return
        for name in plain.weights[0]:
            off = [
                float((ours[name] - theirs[name]).norm() / (self._moved(name, ours) + 1e-12))
                for other in (*others, *self._by_hand)
                for ours, theirs in zip(plain.weights, other.weights, strict=True)
                if _is_finite(ours[name]) and _is_finite(theirs[name])
            ]
            self._off[name] = max(off, default=0.0)
        moved = [off for name, off in self._off.items() if self._moved(name, plain.weights[-1]) > 0]
        self._usual = median(moved) if moved else 0.0

    def weights(self, name: str, ours: Seen, theirs: Seen, at_step: int) -> Excess:
        """A parameter after a batch."""
        a, b = ours.get(name), theirs[name]
        if a is None or a.shape != b.shape:
            return Excess(float("inf"), name, at_step, "missing, or of another shape")
        if not _is_finite(b):  # the unsplit run has diverged: so has this one, in the same batch
            return _as_divergent(a, name, at_step)
        if name in self.rounded:
            return Excess(0.0, name, at_step, "its gradients are rounding")
        if self._dtype == "float64":
            off, allowed = _largest(a - b), self._exact * max(_largest(b), 1e-3)
            if self._others:
                allowed = max(allowed, NOISE[self._dtype] * self._off[name] * self._moved(name, theirs))
            return _excess(off, allowed, name, at_step, f"by {off:.1e}")
        off, moved = float((a - b).norm()), self._farthest(name, at_step)
        allowed = NOISE[self._dtype] * max(self._off[name], self._usual) * moved + STORED[
            self._dtype
        ] * float(b.norm())
        text = f"by {off / (moved + 1e-12):.1e} of what it moved (allowed {allowed / (moved + 1e-12):.1e})"
        return _excess(off, allowed, name, at_step, text)

    def gradients(self, run: Trace) -> list[Excess]:
        """Those that each optimizer step saw: an optimizer may hide a factor that they all share."""
        plain = self.plain
        if len(run.gradients) != len(plain.gradients):
            text = f"called {len(run.gradients)} times for {len(plain.gradients)}"
            return [Excess(float("inf"), "on_before_optimizer_step", len(plain.weights) - 1, text)]
        found = []
        for index, (ours, theirs) in enumerate(zip(run.gradients, plain.gradients, strict=True)):
            at_step = index * len(plain.weights) // len(plain.gradients)
            for name in theirs.keys() & ours.keys():
                if not _is_finite(theirs[name]):
                    found.append(_as_divergent(ours[name], f"gradient {name}", at_step))
                    continue
                off, size = float((ours[name] - theirs[name]).norm()), float(theirs[name].norm())
                allowed = self._exact * max(size, 1e-3) if self._dtype == "float64" else 0.0
                if name in self.rounded:  # whatever it is, it is to stay rounding
                    allowed = max(allowed, _ROUNDED[self._dtype] * max(map(_largest, theirs.values())))
                if self._others:
                    allowed += NOISE[self._dtype] * self._off_gradient(name) + 4 * STORED[self._dtype] * max(
                        size, 1e-3
                    )
                text = f"by {off / (size + 1e-12):.1e} of its norm (allowed {allowed / (size + 1e-12):.1e})"
                found.append(_excess(off, allowed, f"gradient {name}", at_step, text))
        return found

    def _off_gradient(self, name: str) -> float:
        if not self._others:
            return 0.0
        if name not in self._off_gradients:
            off = [
                float((a[name] - b[name]).norm())
                for other in (*self._others, *self._by_hand)
                for a, b in zip(self.plain.gradients, other.gradients, strict=False)
                if name in a and name in b and _is_finite(a[name]) and _is_finite(b[name])
            ]
            self._off_gradients[name] = max(off, default=0.0)
        return self._off_gradients[name]

    def values(self, kind: str, ours: Seen, theirs: Seen, at_step: int) -> list[Excess]:
        """Outputs, logged values, or state."""
        found = []
        for name in dict.fromkeys([*theirs, *ours]):
            label = f"{kind} {name.rstrip('.')}"
            if name not in ours or name not in theirs:
                text = "missing" if name not in ours else "not there in the unsplit run"
                found.append(Excess(float("inf"), label, at_step, text))
                continue
            a, b = ours[name], theirs[name]
            if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
                alike = type(a) is type(b) and not isinstance(a, Tensor)
                # A class that is predicted may be another one by a rounding.
                alike = alike and (a == b or any(o.get(name) != p.get(name) for o, p in self._pairs(kind)))
                shown = f"{_short(a)} for {_short(b)}"
                found.append(Excess(0.0 if alike else float("inf"), label, at_step, shown))
                continue
            if not _is_finite(b):
                found.append(_as_divergent(a, label, at_step))
                continue
            off, allowed = _largest(a - b), self._allowed(kind, name, b)
            found.append(_excess(off, allowed, label, at_step, f"{_short(a)} for {_short(b)}"))
        return found

    def _farthest(self, name: str, at_step: int) -> float:
        """How far the unsplit run had moved a parameter at most until then: it may come back to where it began."""
        return max(self._moved(name, weights) for weights in self.plain.weights[: at_step + 1])

    def _moved(self, name: str, weights: Seen) -> float:
        start = self.plain.start.get(name)  # a lazy layer has none
        return float((weights[name] - (start if start is not None else 0.0)).norm())

    def _allowed(self, kind: str, name: str, value: Tensor) -> float:
        exact = self._exact * max(_largest(value), 1e-3) if self._dtype == "float64" else 0.0
        off = [
            _largest(a[name] - b[name])
            for a, b in self._pairs(kind)
            if isinstance(a.get(name), Tensor)
            and isinstance(b.get(name), Tensor)
            and a[name].shape == b[name].shape
            and _is_finite(a[name])
            and _is_finite(b[name])
        ]
        if self._off_loss and self._is_a_loss(name, value):
            off.append(self._off_loss)
        return (
            exact
            + NOISE[self._dtype] * max(off, default=0.0)
            + VALUES[self._dtype] * max(_largest(value), 1e-3)
        )

    def _is_a_loss(self, name: str, value: Tensor) -> bool:
        """Whether a value is a batch's loss, or a mean of losses."""
        losses = [seen[LOSS] for seen in self.plain.outputs if isinstance(seen.get(LOSS), Tensor)]
        return name.startswith("loss") or any(torch.equal(value, loss) for loss in losses)

    def _pairs(self, kind: str) -> Iterator[tuple[Seen, Seen]]:
        """What the unsplit run showed, beside what each of the others did."""
        for other in self._others:
            if kind == "state":
                yield self.plain.state, other.state
            else:
                yield from zip(getattr(self.plain, kind), getattr(other, kind), strict=True)


def _rounded(plain: Trace, dtype: str) -> frozenset[str]:
    """The parameters whose gradients are nothing but rounding in all steps of the unsplit run, in float64 or float32.

    A bias before a normalization: an optimizer that divides by the gradient's own size makes steps of it.
    """
    share = _ROUNDED.get(dtype)
    names = {name for seen in plain.gradients for name in seen} if share is not None else set()
    return frozenset(
        name
        for name in names
        if all(
            0 < _largest(seen[name]) <= (share or 0.0) * max(map(_largest, seen.values()))
            for seen in plain.gradients
            if name in seen
        )
    )


def _off_losses(plain: Trace, by_hand: Sequence[Trace]) -> float:
    """How far losses are from the unsplit run's where parts are added up by hand: the most."""
    return max(
        (
            _largest(ours[LOSS] - theirs[LOSS])
            for run in by_hand
            for ours, theirs in zip(run.outputs, plain.outputs, strict=True)
            if isinstance(ours.get(LOSS), Tensor) and isinstance(theirs.get(LOSS), Tensor)
            if _is_finite(ours[LOSS]) and _is_finite(theirs[LOSS])
        ),
        default=0.0,
    )


def _excess(off: float, allowed: float, where: str, at_step: int, text: str) -> Excess:
    """NaN in one run alone is a difference."""
    off = float("inf") if off != off else off
    return Excess(off / allowed if allowed > 0 else (float("inf") if off else 0.0), where, at_step, text)


def _as_divergent(ours: Tensor, where: str, at_step: int) -> Excess:
    """What is not finite in the unsplit run isn't in this one either, in the same batch."""
    return Excess(
        float("inf") if _is_finite(ours) else 0.0, where, at_step, "finite, unlike the unsplit run's"
    )


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def _largest(values: Tensor) -> float:
    if values.numel() == 0:
        return 0.0
    largest = float(values.abs().max())
    return largest if largest == largest else float("inf")


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{float(value):.6g}" if value.numel() == 1 else f"a tensor of {tuple(value.shape)}"
    return repr(value)
