"""The loss head without logits: peak, error against float64 and time beside float32 logits and cross-entropy.

Plain is `F.cross_entropy(F.linear(hidden, weight).float(), labels)` and its backward. Peaks are bytes above the
inputs, gradients included: counted operator by operator on fake tensors, and recorded by torch's profiler from the
allocator, which sees what an operator allocates within itself, wherever the machine has room for plain. The
fraction is the worse of the two. One CPU thread.
"""

import gc
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.__main__ import main_of
from benchmarks._gpu_rows import GpuRow
from benchmarks.harness import (
    LONG_STEP_SECONDS,
    Options,
    Ratio,
    Report,
    one_thread,
    paired_ratio,
    self_ratio_is_void,
)
from lightning_memkit.loss import linear_cross_entropy
from lightning_memkit.memory.limits import host_limits
from lightning_memkit.memory.meter import ByteMeter

MIB = 2**20
TOKENS = (2048, 8192)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FACTOR = 0.37  # a gradient that reaches the loss, and is no power of two
ONE_ROUNDING = 2.0**-24  # of a loss in float32: less than that is luck
HEAD_OPTIONS = {"softcap": 15.0, "label_smoothing": 0.1, "z_loss": 1e-4}

Loss = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One size of the problem."""

    vocabulary: int
    features: int
    tokens: int
    dtype: str

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"V={self.vocabulary} N={self.tokens} {self.dtype}"

    def make(self, seed: int = 0, device: torch.device | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, weight and labels; logits have a standard deviation of about 2."""
        torch.manual_seed(seed)
        hidden = torch.randn(self.tokens, self.features, device=device)
        weight = torch.randn(self.vocabulary, self.features, device=device) * (2 / self.features**0.5)
        labels = torch.randint(self.vocabulary, (self.tokens,), device=device)
        dtype = DTYPES[self.dtype]
        return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def run(options: Options) -> Report:
    """Peaks of all cases, errors at 2048 tokens, then time; half an hour, `--quick` a few minutes at a small size."""
    sizes, features = ((8192,), 128) if options.quick else ((32_000, 128_000), 768)
    cases = [
        Case(vocabulary=size, features=features, tokens=tokens, dtype=dtype)
        for size in sizes
        for tokens in TOKENS
        for dtype in DTYPES
    ]
    figures: dict[str, float | int | bool] = {}
    rows: list[dict[str, object]] = []
    notes: list[str] = []
    with one_thread():
        for tokens in TOKENS:
            fractions = (_peaks(case, rows, notes) for case in cases if case.tokens == tokens)
            figures[f"peak_fraction_{tokens}"] = max(chain.from_iterable(fractions))
        worst = [_errors(case, rows, options.seed) for case in cases if case.tokens == TOKENS[0]]
        figures["error_over_plain"] = max(first for first, _ in worst)
        figures["error_over_plain_scaled"] = max(second for _, second in worst)
        same = _times(cases, figures, rows, options)
    notes += _absent()
    return Report("loss_head", figures, rows, void=self_ratio_is_void(same), notes=tuple(notes))


def gpu_rows(options: Options) -> list[GpuRow]:
    """Peak, time and errors of 32,000 and 128,000 words in bfloat16 on a GPU."""
    from benchmarks._gpu_loss_head import rows_of_losses

    return rows_of_losses(options)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """What the others are measured against."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Memkit's own, whatever else is installed."""
    return linear_cross_entropy(hidden, weight, labels, backend="memkit")


def checkpointed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Plain in eight chunks of rows, each computed again in backward."""

    def chunk(rows: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows, weight).float(), targets, reduction="sum")

    pairs = zip(hidden.chunk(8), labels.chunk(8), strict=True)
    sums: list[Any] = [checkpoint(chunk, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(sums).sum() / labels.numel()


def peers() -> Iterator[tuple[str, Loss]]:
    """What else computes this loss and is installed."""
    yield "8 checkpointed chunks", checkpointed
    built_in: Any = getattr(F, "linear_cross_entropy", None)
    if built_in is not None:
        yield "F.linear_cross_entropy", built_in
        chosen = torch.nn.LinearCrossEntropyOptions()
        yield "F.linear_cross_entropy, options", lambda *given: built_in(*given, options=chosen)
    for name, module in (("liger", "liger_kernel"), ("cut_cross_entropy", "cut_cross_entropy")):
        if torch.cuda.is_available() and importlib.util.find_spec(module) is not None:
            backend: Any = name
            yield name, lambda *given, backend=backend: linear_cross_entropy(*given, backend=backend)


def _absent() -> Iterator[str]:
    for name, module in (("Liger", "liger_kernel"), ("cut-cross-entropy", "cut_cross_entropy")):
        if importlib.util.find_spec(module) is None:
            yield f"{name} is left out: it is not installed"
        elif not torch.cuda.is_available():
            yield f"{name} is left out: its kernels need a GPU"


def _step(loss: Loss, given: tuple[Tensor, Tensor, Tensor], factor: float = 1.0) -> Tensor:
    given[0].grad = given[1].grad = None
    value = loss(*given)
    (value if factor == 1 else factor * value).backward()
    return value.detach()


def _peaks(case: Case, rows: list[dict[str, object]], notes: list[str]) -> Iterator[float]:
    """A row a way; yields our fractions."""
    counted_plain = _counted(plain, case)
    free = min(limit.free_bytes for limit in host_limits())
    real = free > 1.3 * counted_plain + 2 * MIB
    recorded_plain = _recorded(plain, case) if real else 0
    if not real:
        notes.append(f"{case.name}: plain needs {counted_plain / MIB:.0f} MiB; counted, not run")
    rows.append(_peak_row("plain", case, (counted_plain, recorded_plain), (counted_plain, recorded_plain)))
    compared = peers() if case.vocabulary == 32_000 or case.features != 768 else ()
    for name, loss in (("memkit", ours), *compared):
        opaque = name.endswith("options")  # it allocates within one operator
        counted = 0 if opaque else _counted(loss, case)
        recorded = _recorded(loss, case) if real else 0
        rows.append(_peak_row(name, case, (counted, recorded), (counted_plain, recorded_plain)))
        if name == "memkit":
            yield counted / counted_plain
            if real:
                yield recorded / recorded_plain


def _peak_row(name: str, case: Case, peaks: tuple[int, int], base: tuple[int, int]) -> dict[str, object]:
    row: dict[str, object] = {"what": f"peak, {case.name}, {name}"}
    for label, peak, of in zip(("counted", "allocator"), peaks, base, strict=True):
        if peak:
            row[f"{label}_mib"] = round(peak / MIB, 1)
            row[f"{label}_fraction"] = round(peak / of, 4)
    return row


def _counted(loss: Loss, case: Case) -> int:
    with FakeTensorMode():
        given = case.make()
        with ByteMeter() as meter:
            _step(loss, given)
    return meter.peak_bytes


def _recorded(loss: Loss, case: Case) -> int:
    """The most bytes that the allocator has handed out above the inputs."""
    given = case.make()
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=activities) as profile:
        _step(loss, given)
    live = peak = 0
    results: Any = profile.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    for event in results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def _errors(
    case: Case, rows: list[dict[str, object]], seed: int, device: torch.device | None = None
) -> tuple[float, float]:
    """Our errors over plain's, the worst: without and with options; and for a factor other than 1."""
    given = case.make(seed, device)
    worst = {}
    for label, options, factor in (
        ("", {}, 1.0),
        (", options", HEAD_OPTIONS, 1.0),
        (f", times {FACTOR}", {}, FACTOR),
    ):
        truth = _truth(given, options, factor)
        chunked = partial(linear_cross_entropy, backend="memkit", **options)
        found = _distances(_evaluated(chunked, given, factor), truth)
        usual = _distances(_evaluated(partial(definition, **options), given, factor), truth)
        row: dict[str, object] = {"what": f"error, {case.name}{label}"}
        ratios = []
        for name, one, other in zip(
            ("losses", "loss", "hidden_grad", "weight_grad"), found, usual, strict=True
        ):
            ratios.append(max(one, ONE_ROUNDING) / max(other, ONE_ROUNDING))
            row |= {f"{name}_error": float(f"{one:.3g}"), f"{name}_over_plain": round(ratios[-1], 5)}
        rows.append(row)
        worst[factor] = max(*ratios, worst.get(factor, 0.0))
    return worst[1.0], worst[FACTOR]


def definition(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, reduction: str = "mean", **options: float
) -> Tensor:
    """The loss with its options by torch's functions, from logits in float32 (float64 for float64)."""
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    if softcap := options.get("softcap"):
        logits = softcap * torch.tanh(logits / softcap)
    smoothing = options.get("label_smoothing", 0.0)
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    if z_loss := options.get("z_loss"):
        losses = losses + z_loss * logits.logsumexp(1).square()
    return losses if reduction == "none" else losses.mean()


def _evaluated(loss: Loss, given: tuple[Tensor, Tensor, Tensor], factor: float) -> tuple[Tensor, ...]:
    """Losses a token, their mean, and the gradients of hidden states and weight."""
    with torch.no_grad():
        losses = loss(*given, reduction="none")
    value = _step(loss, given, factor)
    return losses, value, _gradient(given[0]), _gradient(given[1])


def _truth(
    given: tuple[Tensor, Tensor, Tensor], options: dict[str, float], factor: float
) -> tuple[Tensor, ...]:
    """The same in float64, some rows at a time."""
    hidden, weight, labels = (tensor.detach() for tensor in given)
    weight = weight.double().requires_grad_()
    losses, gradients = [], []
    for rows, targets in zip(hidden.split(256), labels.split(256), strict=True):
        rows = rows.double().requires_grad_()
        some = definition(rows, weight, targets, reduction="none", **options)
        (factor * some.sum() / labels.numel()).backward()
        losses.append(some.detach())
        gradients.append(_gradient(rows))
    whole = torch.cat(losses)
    return whole, whole.mean(), torch.cat(gradients), _gradient(weight)


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _distances(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> list[float]:
    return [
        float((one.double() - other).norm() / other.norm()) for one, other in zip(found, truth, strict=True)
    ]


def _times(
    cases: list[Case], figures: dict[str, float | int | bool], rows: list[dict[str, object]], options: Options
) -> Ratio:
    """Ours and the peers over plain in pairs; returns plain over itself."""
    smallest = min(case.vocabulary for case in cases)
    longer = [] if options.quick else [case for case in cases if case.vocabulary == smallest]
    chosen = [case for case in cases if case.tokens == TOKENS[0] or case in longer]
    same: Ratio | None = None
    ratios = []
    for case in chosen:
        given = case.make(options.seed)
        base = partial(_step, plain, given)
        pairs = _pairs(base)
        if same is None:
            same = paired_ratio(base, base, pairs=pairs, seed=options.seed, warm_up=1)
            rows.append(same.row(f"time, {case.name}, plain against itself"))
        compared = list(peers()) if case in longer and case.tokens == TOKENS[0] else []
        for name, loss in (("memkit", ours), *compared):
            ratio = paired_ratio(partial(_step, loss, given), base, pairs=pairs, seed=options.seed, warm_up=1)
            rows.append(ratio.row(f"time, {case.name}, {name}"))
            if name == "memkit":
                ratios.append(ratio.median)
                figures[f"time_ratio_{case.vocabulary}_{case.tokens}_{case.dtype}"] = ratio.median
    figures["time_ratio"] = max(ratios)
    assert same is not None
    return same


def _pairs(step: Callable[[], object]) -> int:
    """A hundred, and fewer only where a step takes clearly over a second."""
    step()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    return 100 if seconds < 1.3 * LONG_STEP_SECONDS else 15 if seconds < 10 else 5


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
