"""A prediction that runs few of many equal chunks is that of all of them, to the byte."""

import random
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit import PureBF16Precision, checkpoint_chunks, linear_cross_entropy, predict_memory
from lightning_memkit.activations.chunks.call import ChunkedCall
from lightning_memkit.optim import pieces
from lightning_memkit.prediction import simulation
from lightning_memkit.prediction.result import Prediction
from lightning_memkit.prediction.work import OperatorWork
from tests.prediction.test_chunks import WIDTH, Contrastive, LongRow, _Block, _Module


class _Seldom(nn.Module):
    """A block that some chunks leave out, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.block = _Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) if random.random() < 0.3 else x


class Dropping(Contrastive):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        for tower in self.towers:
            assert isinstance(tower, nn.Sequential)
            tower.insert(1, nn.Dropout(0.1))


class LeavingOut(Contrastive):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        for tower in self.towers:
            assert isinstance(tower, nn.Sequential)
            tower.insert(1, _Seldom())


class Selecting(nn.Module):
    """As many rows as the values say go through a layer, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        chosen = kind.nonzero(as_tuple=True)[0]
        return x.index_add(0, chosen, self.out(F.gelu(self.layer(x[chosen]))))


class Choosing(_Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.block, self.selecting = _Block(), Selecting()
        checkpoint_chunks(self.selecting, rows=rows)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.selecting(self.block(batch["x"]), batch["kind"]).square().mean()


class BothAxes(_Module):
    """Chunks of rows and of tokens."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        for block in self.blocks:
            checkpoint_chunks(block, rows=rows, tokens=30)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def compared(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> tuple[Prediction, Prediction]:
    """The prediction, and that of a simulation that runs all chunks and slices."""
    found = predict_memory(*args, **options)
    for name in ("few_chunks", "few_loss_chunks", "few_slices"):
        monkeypatch.setattr(simulation, name, lambda *_: nullcontext())
    return found, predict_memory(*args, **options)


def sizes(work: dict[OperatorWork, float]) -> Counter[tuple[str, int, int]]:
    """How often there is an operator of a size, whatever its numbers: the bounds of a block of columns, say."""
    found = Counter[tuple[str, int, int]]()
    for one, times in work.items():
        found[one.name, one.flops, one.moved_bytes] += round(times)
    return found


def assert_equal(found: Prediction, of_all: Prediction) -> None:
    assert found.anatomy.at_peak == of_all.anatomy.at_peak
    assert found.anatomy.largest == of_all.anatomy.largest
    assert (found.phases, found.modules, found.saved) == (of_all.phases, of_all.modules, of_all.saved)
    assert (found.allocated_bytes, found.reserved_bytes) == (of_all.allocated_bytes, of_all.reserved_bytes)
    assert found.expandable_bytes == of_all.expandable_bytes
    assert sizes(found.work.part) == sizes(of_all.work.part)
    assert sizes(found.work.step) == sizes(of_all.work.step)


ROWS = {"x": torch.randn(200, WIDTH), "y": torch.randn(200, WIDTH)}


@pytest.mark.parametrize("device", ["cpu", "a100-40gb"])
@pytest.mark.parametrize("rows", [7, 50, 100])
def test_rows(monkeypatch: pytest.MonkeyPatch, rows: int, device: str) -> None:
    found, of_all = compared(monkeypatch, Contrastive(rows), ROWS, device=device)
    assert_equal(found, of_all)
    skips = 200 // rows > 4
    assert (len(found.timeline) < len(of_all.timeline)) == skips


@pytest.mark.parametrize("policy", [None, "full"])
def test_tokens_in_bfloat16(monkeypatch: pytest.MonkeyPatch, policy: str | None) -> None:
    batch, precision = {"x": torch.randn(1, 1000, WIDTH)}, {"plugins": PureBF16Precision()}
    found, of_all = compared(monkeypatch, LongRow(90, policy), batch, trainer=precision, device="a100-40gb")
    assert_equal(found, of_all)
    assert len(found.timeline) < len(of_all.timeline)


def test_rows_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    found, of_all = compared(monkeypatch, BothAxes(3), {"x": torch.randn(20, 200, WIDTH)})
    assert_equal(found, of_all)
    assert len(found.timeline) < len(of_all.timeline) / 2


def test_rows_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    found, of_all = compared(monkeypatch, Dropping(7), ROWS)
    assert_equal(found, of_all)
    assert len(found.timeline) < len(of_all.timeline)


def test_where_random_numbers_say_what_runs_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found, of_all = compared(monkeypatch, LeavingOut(7), ROWS)
    assert_equal(found, of_all)
    assert found.timeline == of_all.timeline


def test_where_values_say_how_much_there_is_to_compute_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = torch.arange(200) > 150  # the last chunks take more
    found, of_all = compared(monkeypatch, Choosing(10), {"x": ROWS["x"], "kind": kind})
    assert_equal(found, of_all)
    assert found.timeline == of_all.timeline


class Words(_Module):
    """A head whose loss takes many chunks: of tokens, and in half precision of columns, too."""

    def __init__(self, words: int = 4096) -> None:
        super().__init__()
        self.block, self.head = _Block(), nn.Linear(WIDTH, words, bias=False)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        weight = self.head.weight
        hidden = self.block(batch["x"]).to(weight.dtype)
        return linear_cross_entropy(hidden.flatten(0, 1), weight, batch["labels"].flatten())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", ["cpu", "a100-40gb"])
@pytest.mark.parametrize("tokens", [5_000, 21_001])
@pytest.mark.parametrize("pure", [False, True])
def test_losses_without_logits(monkeypatch: pytest.MonkeyPatch, device: str, tokens: int, pure: bool) -> None:
    batch = {"x": torch.randn(1, tokens, WIDTH), "labels": torch.zeros(1, tokens, dtype=torch.int64)}
    trainer = {"plugins": PureBF16Precision()} if pure else {}
    found, of_all = compared(monkeypatch, Words(), batch, trainer=trainer, device=device)
    assert_equal(found, of_all)
    assert (len(found.timeline) < len(of_all.timeline)) == (tokens > 20_000)


@pytest.mark.parametrize("mode", ["kahan", "split24"])
@pytest.mark.parametrize("device", ["cpu", "a100-40gb"])
def test_low_halves_that_take_another_form(monkeypatch: pytest.MonkeyPatch, device: str, mode: Any) -> None:
    """Weights of several slices; on a GPU set-up is not planned for."""
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS_CPU", 1000)
    trainer = {"plugins": PureBF16Precision(mode)}
    batch = {"x": torch.randn(1, 20, WIDTH), "labels": torch.zeros(1, 20, dtype=torch.int64)}
    assert_equal(*compared(monkeypatch, Words(256), batch, trainer=trainer, device=device))


def test_the_core_runs_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = Contrastive(7).towers[0]
    seen: list[int] = []
    plain = ChunkedCall.run

    def run(call: ChunkedCall, tensors: Any) -> Any:
        seen.append(len(tensors[0]))
        return plain(call, tensors)

    x = ROWS["x"].clone().requires_grad_()
    tower(x)  # asks the module, too
    monkeypatch.setattr(ChunkedCall, "run", run)
    tower(x)
    assert len(seen) == 29
    assert sum(seen) == 200
