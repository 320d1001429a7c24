"""Activation checkpointing by policy: saved bytes, peak, time and FLOPs against none, with the same gradients.

A Llama of 34M weights (2 x 512 tokens, float32), a ViT and a CNN. A step is zero_grad, forward and backward; an
optimizer's step would bring every ratio nearer to 1. Saved bytes are those alive when the forward ends, the loss
apart; the peak is above the weights. Compiled blocks are compared with compiled blocks that nothing bounds.

`over_floor_1_04_pct` is how much more than the least possible a budget saves whose recomputation takes 4 % of the
step, by the measured times of operators, the worst of the three models: an integer solver says what is possible, and
the rows "by measured operators" give both, and the floor if a tape took no time. Of compiled blocks torch's knapsack
chooses; `compiled_over_least_pct` is how many more FLOPs it recomputes than the exact answer to its question.
"""

import gc
import os
from dataclasses import dataclass, replace

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.__main__ import main_of
from benchmarks._activation_models import CASES, HAND_MADE, Case
from benchmarks._checkpointing_floor import AtPrice, at_price
from benchmarks._compiled_floor import Recomputed, recomputed
from benchmarks._gpu_offload import rows_of_activations
from benchmarks._gpu_rows import GpuRow
from benchmarks.harness import MINIMUM_PAIRS, Options, Ratio, Report, paired_ratio, self_ratio_is_void
from lightning_memkit import checkpoint_modules
from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.memory.meter import ByteMeter

PRICES = (4, 15)  # percent of a step
COMPILED_NONE, COMPILED = "compile:1", ("compile:0.5", "compile:0.2", "compile:0")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One policy on one model; bytes are above the weights, flops those of a whole step."""

    saved_bytes: int
    peak_bytes: int
    flops: int
    same_bits: bool
    ratio: Ratio


class Subject:
    """A model under one policy, with its step."""

    def __init__(self, case: Case, policy: str) -> None:
        self.model, self._case = case.build(), case
        if policy != "none":
            checkpoint_modules(self.model, policy)
        for _ in range(3):  # measure, plan, run as planned
            self.step()

    def step(self) -> Tensor:
        """One forward and backward."""
        self.model.zero_grad(set_to_none=True)
        loss = self._case.loss(self.model)
        loss.backward()
        return loss

    def result(self, seed: int) -> list[Tensor]:
        """Loss and gradients from one state of the generator."""
        torch.manual_seed(seed)
        loss = self.step()
        return [loss.detach(), *(p.grad.clone() for p in self.model.parameters() if p.grad is not None)]

    def bytes(self) -> tuple[int, int]:
        """Saved bytes and peak, counted operator by operator."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        with ByteMeter() as meter:
            loss = self._case.loss(self.model)
            saved = meter.live_bytes - loss.nbytes
            loss.backward()
        return saved, meter.peak_bytes

    def flops(self) -> int:
        """FLOPs of a step."""
        with FlopCounterMode(display=False) as counter:
            self.step()
        return counter.get_total_flops()


class CompiledSubject(Subject):
    """The same where kernels allocate without the dispatcher: the profiler's account of the allocator."""

    def bytes(self) -> tuple[int, int]:
        """Saved bytes and peak, from the allocator's own events."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        with AllocatorTrace() as trace:
            loss = self._case.loss(self.model)
            trace.mark()
            loss.backward()
        return trace.marked_bytes[0] - loss.nbytes, trace.peak_bytes


def run(options: Options) -> Report:
    """All policies on all models, in about half an hour; `--quick`: few pairs of the Llama, one policy of others."""
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    figures: dict[str, float | int | bool] = {"bitwise": True}
    void = False
    for name, make in CASES.items():
        case = make(options.seed)
        pairs = (4 if options.quick else 15) if case.steps_take_seconds else MINIMUM_PAIRS
        if options.quick and not case.steps_take_seconds:
            case = replace(case, policies=case.policies[-1:])
        found, itself = measure(case, options, pairs)
        rows += [row(name, policy, measured, found["none"]) for policy, measured in found.items()]
        rows.append({"model": name, "policy": "none, again", "time": round(itself.median, 3)})
        void |= self_ratio_is_void(itself)
        figures["bitwise"] = bool(figures["bitwise"]) and all(m.same_bits for m in found.values())
        floors = {percent: _at_price(case, percent, itself) for percent in PRICES}
        for percent, at in floors.items():
            over = f"over_floor_1_{percent:02}_pct"
            figures[over] = max(float(figures.get(over, 0.0)), 100 * (at.ours / at.floor - 1))
            rows.append(_floor_row(name, percent, at))
        if not options.quick:
            for policy in COMPILED[:2]:
                cost = recomputed(case, policy)
                over = figures.get("compiled_over_least_pct", 0.0)
                figures["compiled_over_least_pct"] = max(float(over), cost.over_pct)
                rows.append(_compiled_row(name, policy, cost))
        if name == "llama":
            figures.update(budgets_met(found))
            by_price = tuple(f"budget:{at.ours}B" for at in floors.values())
            more, _ = measure(replace(case, policies=by_price), options, pairs)
            rows += [row(name, policy, more[policy], found["none"]) for policy in by_price]
            priced = [
                (m.saved_bytes / found["none"].saved_bytes, m.ratio.median)
                for m in (*found.values(), *more.values())
            ]
            slowdown, lines = against_hand_made(case, found, options, pairs)
            rows += lines
            figures["budget_worst_slowdown_pct"] = slowdown
            if not options.quick:
                lines, others = compiled(case, options, pairs)
                rows += lines
                priced += others
            figures.update(frontier(priced))
    return Report("activations", figures, rows, void=void)


def _at_price(case: Case, percent: int, plain: Ratio) -> AtPrice:
    """Saved bytes if a step takes so many percent longer, by a fresh measurement of the model's operators."""
    model = case.build()
    plan = checkpoint_modules(model, "budget:0.5").plan
    assert plan is not None
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        case.loss(model).backward()
    return at_price(plan, percent / 100 * plain.ours_ms / 1000)


def _floor_row(model: str, percent: int, at: AtPrice) -> dict[str, object]:
    return {
        "model": model,
        "policy": f"by measured operators, 1.{percent:02}",
        "saved": round(at.ours / at.everything, 3),
        "floor": round(at.floor / at.everything, 3),
        "floor_untaped": round(at.untaped / at.everything, 3),
    }


def _compiled_row(model: str, policy: str, cost: Recomputed) -> dict[str, object]:
    return {
        "model": model,
        "policy": f"{policy}, FLOPs that are recomputed",
        "recomputed": round(cost.ours, 4),
        "least_recomputed": round(cost.least, 4),
    }


def measure(case: Case, options: Options, pairs: int) -> tuple[dict[str, Measured], Ratio]:
    """Every policy against none, and none against itself."""
    none = Subject(case, "none")
    expected = none.result(options.seed)
    found: dict[str, Measured] = {}
    itself = paired_ratio(none.step, none.step, pairs=pairs, seed=options.seed, warm_up=1)
    for policy in ("none", *case.policies):
        ours = none if policy == "none" else Subject(case, policy)
        same = all(map(torch.equal, ours.result(options.seed), expected))
        ratio = itself
        if policy != "none":
            ratio = paired_ratio(ours.step, none.step, pairs=pairs, seed=options.seed, warm_up=1)
        saved, peak = ours.bytes()
        found[policy] = Measured(
            saved_bytes=saved, peak_bytes=peak, flops=ours.flops(), same_bits=same, ratio=ratio
        )
    return found, itself


def row(model: str, policy: str, ours: Measured, none: Measured) -> dict[str, object]:
    """The table's line of a policy."""
    return {
        "model": model,
        "policy": policy,
        "saved_MiB": round(ours.saved_bytes / 2**20, 1),
        "saved": round(ours.saved_bytes / none.saved_bytes, 3),
        "peak_MiB": round(ours.peak_bytes / 2**20, 1),
        "time": round(ours.ratio.median, 3),
        "low_95": round(ours.ratio.low, 3),
        "high_95": round(ours.ratio.high, 3),
        "recomputed_GFLOP": round((ours.flops - none.flops) / 1e9, 3),
        "same_bits": ours.same_bits,
    }


def frontier(priced: list[tuple[float, float]]) -> dict[str, float]:
    """The least that any policy saves at two prices, from (saved fraction, time ratio) in each policy's own mode."""
    return {
        f"saved_at_1_{percent:02}": min(saved for saved, time in priced if time <= 1 + percent / 100)
        for percent in PRICES
    }


def budgets_met(found: dict[str, Measured]) -> dict[str, float]:
    """How far above and below its budget a policy saves, at the worst."""
    total = found["none"].saved_bytes
    budgets = {policy: float(policy.partition(":")[2]) for policy in found if policy.startswith("budget:")}
    met = [found[policy].saved_bytes / total / x - 1 for policy, x in budgets.items()]
    return {"budget_worst_overshoot_pct": 100 * max(met), "budget_worst_undershoot_pct": -100 * min(met)}


def against_hand_made(
    case: Case, found: dict[str, Measured], options: Options, pairs: int
) -> tuple[float, list[dict[str, object]]]:
    """A budget of the bytes of each hand-made policy against that policy: percent of time, the worst of all."""
    worst, rows = -100.0, []
    for policy in HAND_MADE:
        theirs = Subject(case, policy)
        ours = Subject(case, f"budget:{found[policy].saved_bytes}B")
        ratio = paired_ratio(ours.step, theirs.step, pairs=pairs, seed=options.seed, warm_up=1)
        worst = max(worst, 100 * (ratio.median - 1))
        rows.append(
            {
                "model": "llama",
                "policy": f"budget of the bytes of {policy} : {policy}",
                "saved_MiB": round(ours.bytes()[0] / 2**20, 1),
                "time": round(ratio.median, 3),
                "low_95": round(ratio.low, 3),
                "high_95": round(ratio.high, 3),
            }
        )
    return worst, rows


def compiled(
    case: Case, options: Options, pairs: int
) -> tuple[list[dict[str, object]], list[tuple[float, float]]]:
    """Compiled blocks under torch's budget against compiled blocks without one: rows, saved fractions with times."""
    none = CompiledSubject(case, COMPILED_NONE)
    saved, peak = none.bytes()
    rows: list[dict[str, object]] = [
        {"model": "llama", "policy": "compiled, none", "saved_MiB": round(saved / 2**20, 1), "saved": 1.0,
         "peak_MiB": round(peak / 2**20, 1), "time": 1.0}
    ]  # fmt: skip
    priced: list[tuple[float, float]] = []
    for policy in COMPILED:
        ours = CompiledSubject(case, policy)
        ratio = paired_ratio(ours.step, none.step, pairs=pairs, seed=options.seed, warm_up=1)
        ours_saved, ours_peak = ours.bytes()
        priced.append((ours_saved / saved, ratio.median))
        rows.append(
            {"model": "llama", "policy": f"compiled, {policy}", "saved_MiB": round(ours_saved / 2**20, 1),
             "saved": round(ours_saved / saved, 3), "peak_MiB": round(ours_peak / 2**20, 1),
             "time": round(ratio.median, 3), "low_95": round(ratio.low, 3), "high_95": round(ratio.high, 3)}
        )  # fmt: skip
    return rows, priced


def gpu_rows(options: Options) -> list[GpuRow]:
    """Activation checkpointing and activation offload of a billion parameters on a GPU, by peak and time."""
    return rows_of_activations(options)


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
