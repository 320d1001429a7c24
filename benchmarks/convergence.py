"""Held-out loss of bfloat16 training minus float32's, for memkit's modes and their peers in one run.

A byte transformer of 0.875 million parameters reads the functions of Python's standard library: 1000 steps from
scratch, and 400 steps of fine-tuning that float32 checkpoint on their docstrings. AdamW with weight decay 0.1 and
β2 = 0.999 throughout. Initial weights, order of the data and schedule of the learning rate are the same in every
run; the bfloat16 runs share one cast model, so that they differ in the optimizer only. A gap is the mean of two
seeds; `gap_<variant>` is the worse of both settings. A negative gap is no quality: the runs are short, and
larger effective steps take them further.
"""

import ast
import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from benchmarks.__main__ import main_of
from benchmarks._flashoptim import FlashOptim
from benchmarks.harness import Options, Report
from lightning_memkit.data.sources.standard_library import StandardLibrary
from lightning_memkit.initialization import cast_inputs, cast_module
from lightning_memkit.optim.compensation import compensate, compensation_of
from lightning_memkit.optim.eight_bit import adapt_bitsandbytes

WIDTH, HEADS, LAYERS, CONTEXT, BYTES = 128, 4, 4, 128, 256
BATCH = 8
HYPER: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
HELD_OUT = 20  # every 20th document
SEEDS = 2

LowHalves = dict[nn.Parameter, Tensor]
Build = Callable[[nn.Module, float, LowHalves], Optimizer]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, on which text and how long; the learning rate ends at `final` of its peak."""

    name: str
    steps: int
    learning_rate: float
    warm_up: int
    final: float
    evaluated_rows: int = 1024

    def factor(self, step: int) -> float:
        """The learning rate of a step, as a share of its peak."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2


SETTINGS = (
    Setting(name="scratch", steps=1000, learning_rate=1e-3, warm_up=100, final=0.1),
    Setting(name="finetune", steps=400, learning_rate=2e-5, warm_up=20, final=1.0),
)
QUICK = tuple(
    replace(setting, steps=setting.steps // 20, warm_up=setting.warm_up // 20, evaluated_rows=128)
    for setting in SETTINGS
)


@dataclass(frozen=True)
class Variant:
    """A way to train: where weights are float32 (`"float32"`, `"autocast"`) or bfloat16, and the optimizer."""

    label: str
    build: Build
    weights: str = "bfloat16"


@dataclass(frozen=True)
class Outcome:
    """Held-out loss a row, by the forward that was trained, and by a float32 forward on the float32 weights."""

    key: str
    setting: str
    seed: int
    rows: Tensor
    float32_rows: Tensor


class Block(nn.Module):
    """Attention, then an MLP; LayerNorm before each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Features [rows, length, width] to the next block's."""
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, HEADS, width // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class ByteTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, window: Tensor) -> Tensor:
        """Cross-entropy of each row of a window [rows, CONTEXT + 1] of bytes."""
        x = self.embedding(window[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.transpose(1, 2), window[:, 1:], reduction="none").mean(1)


def variants() -> dict[str, Variant]:
    """Everything that is trained, by the key of its figures; `fp32` is what the others are compared with."""
    return {
        "fp32": Variant("float32 AdamW", _adamw, "float32"),
        "autocast": Variant("float32 AdamW under bf16 autocast", _adamw, "autocast"),
        "plain": Variant("torch AdamW on bf16", _adamw),
        "kahan": Variant("memkit kahan, compact", partial(_memkit, "kahan", "compact")),
        "split": Variant("memkit split, compact", partial(_memkit, "split", "compact")),
        "split_exact": Variant("memkit split, exact", partial(_memkit, "split", "exact")),
        "split24": Variant("memkit split24, compact", partial(_memkit, "split24", "compact")),
        "split24_8bit": Variant("memkit split24, 8-bit", partial(_memkit, "split24", "8-bit")),
        "stochastic": Variant("memkit stochastic, compact", partial(_memkit, "stochastic", "compact")),
        "8bit": Variant("memkit kahan over bitsandbytes 8-bit", _memkit_8bit),
        "8bit_states": Variant("bitsandbytes 8-bit states on float32", _adapted_8bit, "float32"),
        "optimi": Variant("optimi AdamW, Kahan", _optimi),
        "torchao": Variant("torchao AdamW, stochastic rounding", _torchao),
        "flashoptim": Variant("FlashOptim's AdamW, from its paper", _flashoptim),
        "bitsandbytes": Variant("bitsandbytes AdamW8bit on bf16", _bitsandbytes),
    }


def run(options: Options) -> Report:
    """Train every variant in both settings, a process a seed; about 25 minutes, `--quick` under 5."""
    seeds = range(options.seed, options.seed + SEEDS)
    settings = QUICK if options.quick else SETTINGS
    with ProcessPoolExecutor(SEEDS, mp_context=get_context("spawn")) as pool:
        outcomes = [outcome for found in pool.map(partial(run_seed, settings), seeds) for outcome in found]
    base = {(o.setting, o.seed): o for o in outcomes if o.key == "fp32"}
    labels = {key: variant.label for key, variant in variants().items()}
    rows = [_row(labels[o.key], o, base[o.setting, o.seed]) for o in outcomes]
    figures: dict[str, float | int | bool] = {}
    for key in labels:
        if key == "fp32":
            continue
        gaps = {}
        for setting in settings:
            pairs = [
                (o, base[o.setting, o.seed]) for o in outcomes if (o.key, o.setting) == (key, setting.name)
            ]
            gaps[setting.name] = float(np.mean([float((o.rows - b.rows).mean()) for o, b in pairs]))
            figures[f"gap_{key}_{setting.name}"] = gaps[setting.name]
        figures[f"gap_{key}"] = max(gaps.values())
    figures["parameters"] = sum(p.numel() for p in ByteTransformer().parameters())
    figures["evaluated_bytes"] = CONTEXT * settings[0].evaluated_rows
    notes = (
        "gap: held-out loss by the forward that was trained, minus float32's; fp32_gap: by a float32 forward on "
        "the weights, with their compensation where memkit keeps one; error: standard error of the gap over rows",
        "8-bit states alone change the loss: what bfloat16 adds is the 8-bit row minus that on float32 weights",
        f"batches of {BATCH} x {CONTEXT} bytes, a process of one thread for each of {SEEDS} seeds",
    )
    return Report("convergence", figures, rows, notes=notes)


def run_seed(settings: tuple[Setting, ...], seed: int) -> list[Outcome]:
    """Every variant from scratch, then every variant from the float32 run's checkpoint."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    start = {name: value.clone() for name, value in ByteTransformer().state_dict().items()}
    outcomes = []
    for setting, (text, held_out) in zip(settings, texts(), strict=True):
        following = start
        for key, variant in variants().items():
            torch.manual_seed(seed)  # what peers draw their noise from
            outcome, trained = train(key, variant, setting, seed, start, (text, held_out))
            following = trained if key == "fp32" else following
            outcomes.append(outcome)
            print(
                f"seed {seed}, {setting.name}, {key}: {outcome.rows.mean():.5f}", file=sys.stderr, flush=True
            )
        start = following
    return outcomes


def train(
    key: str,
    variant: Variant,
    setting: Setting,
    seed: int,
    start: dict[str, Tensor],
    data: tuple[Tensor, Tensor],
) -> tuple[Outcome, dict[str, Tensor]]:
    """One run; returns its held-out losses and its float32 weights."""
    model = ByteTransformer()
    model.load_state_dict(start)
    low_halves: LowHalves = {}
    if variant.weights == "bfloat16":
        cast_module(model, torch.bfloat16, low_halves=low_halves)
        cast_inputs(model, torch.bfloat16)
    optimizer = variant.build(model, setting.learning_rate, low_halves)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, setting.factor)
    text, held_out = data
    forward = partial(_forward, model, variant.weights == "autocast")
    for window in _windows(text, setting.steps, seed):
        forward(window).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    weights = float32_weights(model, optimizer)
    twin = ByteTransformer()
    twin.load_state_dict(weights)
    evaluated = [
        _evaluate(model_forward, held_out, setting.evaluated_rows) for model_forward in (forward, twin)
    ]
    return Outcome(key, setting.name, seed, *evaluated), weights


def texts() -> Iterator[tuple[Tensor, Tensor]]:
    """Training and held-out bytes of each setting: functions, then their docstrings."""
    library = StandardLibrary()
    functions = [
        text.encode(errors="replace") for part in library.parts() for _, text in library.records(part)
    ]
    for documents in (functions, [_docstring(source) for source in functions]):
        parts = ([], [])
        for index, document in enumerate(documents):
            parts[index % HELD_OUT == 0].append(document)
        train_text, held_out = (np.frombuffer(b"".join(part), np.uint8).copy() for part in parts)
        yield torch.from_numpy(train_text), torch.from_numpy(held_out)


def float32_weights(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The weights by name; with what their compensation adds where memkit trains them."""
    handle = compensation_of(optimizer)
    exact = dict(handle.float32_weights()) if handle else {}
    if isinstance(optimizer, FlashOptim):
        exact = {one: optimizer.float32_weight(one) for one in model.parameters()}
    return {name: exact.get(p, p.detach()).float().clone() for name, p in model.named_parameters()}


def _forward(model: nn.Module, autocast: bool, window: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model(window)


def _windows(text: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - CONTEXT, (BATCH, 1), generator=generator)
        yield text[starts + torch.arange(CONTEXT + 1)].long()


def _evaluate(forward: Callable[[Tensor], Tensor], text: Tensor, rows: int) -> Tensor:
    starts = torch.linspace(0, len(text) - CONTEXT - 1, rows).long()[:, None]
    with torch.no_grad():
        losses = [forward(text[part + torch.arange(CONTEXT + 1)].long()) for part in starts.split(64)]
    return torch.cat(losses).double()


def _docstring(source: bytes) -> bytes:
    try:
        node = ast.parse(source).body[0]
    except SyntaxError:  # a function with a string at the margin keeps its indentation
        return b""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    docstring = ast.get_docstring(node)
    return f"{docstring}\n".encode() if docstring else b""


def _row(label: str, outcome: Outcome, base: Outcome) -> dict[str, object]:
    gaps = outcome.rows - base.rows
    return {
        "what": label,
        "setting": outcome.setting,
        "seed": outcome.seed,
        "loss": round(float(outcome.rows.mean()), 5),
        "gap": round(float(gaps.mean()), 5),
        "fp32_gap": round(float((outcome.float32_rows - base.float32_rows).mean()), 5),
        "error": round(float(gaps.std() / len(gaps) ** 0.5), 5),
    }


def _adamw(model: nn.Module, learning_rate: float, _: LowHalves) -> Optimizer:
    return AdamW(model.parameters(), lr=learning_rate, **HYPER)


def _memkit(mode: Any, states: Any, model: nn.Module, learning_rate: float, low: LowHalves) -> Optimizer:
    optimizer = AdamW(model.parameters(), lr=learning_rate, **HYPER)
    compensate(optimizer, mode=mode, states=states, low_halves=low)
    return optimizer


def _adapted_8bit(model: nn.Module, learning_rate: float, low: LowHalves) -> Optimizer:
    optimizer = _bitsandbytes(model, learning_rate, low)
    adapt_bitsandbytes(optimizer, model)
    return optimizer


def _memkit_8bit(model: nn.Module, learning_rate: float, low: LowHalves) -> Optimizer:
    optimizer = _adapted_8bit(model, learning_rate, low)
    compensate(optimizer, mode="kahan", low_halves=low)
    return optimizer


def _optimi(model: nn.Module, learning_rate: float, _: LowHalves) -> Any:
    from optimi import AdamW as OptimiAdamW

    return OptimiAdamW(model.parameters(), lr=learning_rate, kahan_sum=True, **HYPER)


def _torchao(model: nn.Module, learning_rate: float, _: LowHalves) -> Any:
    from torchao.optim import _AdamW

    return _AdamW(model.parameters(), lr=learning_rate, bf16_stochastic_round=True, **HYPER)


def _flashoptim(model: nn.Module, lr: float, low_halves: LowHalves) -> Optimizer:
    return FlashOptim(model.parameters(), lr=lr, **HYPER)


def _bitsandbytes(model: nn.Module, learning_rate: float, _: LowHalves) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=learning_rate, **HYPER)


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
