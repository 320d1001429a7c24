"""Batches of other structure than the first one: a key that comes and goes, rows that can't be split."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer, weights

SIZES = (8, 8, 8, 8, 8, 8, 5)


class Batches(IterableDataset):
    def __init__(self, make: Any) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        for index, rows in enumerate(SIZES):
            generator = torch.Generator().manual_seed(index)
            x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
            y = torch.randint(0, 4, (rows,), generator=generator)
            yield self._make(index, {"x": x, "y": y}, generator)


class Net(LightningModule):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.loss = loss
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net, batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(loss: Any, make: Any, *callbacks: Any, kind: Any = Net, **options: Any) -> Any:
    torch.manual_seed(0)
    module = kind(loss).double()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(many workers|have no length|infer the `batch_size`).*")
        fit = trainer(*callbacks, max_epochs=1, max_steps=-1, **options)
        fit.fit(module, DataLoader(Batches(make), batch_size=None))
    return module


def assert_same(loss: Any, make: Any, **options: Any) -> None:
    whole = fitted(loss, make)
    split = fitted(loss, make, MemoryBudget("1GiB", **options))
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-12, atol=1e-13)
    assert split.losses == pytest.approx(whole.losses, rel=1e-12)


def with_aux(index: int, batch: dict[str, Tensor], generator: torch.Generator) -> Any:
    """A second label in some batches, before the others' tensors or after them."""
    aux = torch.where(torch.rand(len(batch["y"]), generator=generator) < 0.4, batch["y"], -100)
    aux[0] = 1
    return {"aux": aux, **batch} if index in (3, 5) else batch


def aux_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = net(batch["x"])
    loss = F.cross_entropy(scores, batch["y"])
    return loss + F.cross_entropy(scores, batch["aux"]) if "aux" in batch else loss


def with_mask(index: int, batch: dict[str, Tensor], generator: torch.Generator) -> Any:
    """A mask that some batches have, and that has more dimensions in others."""
    mask = (torch.rand(len(batch["y"]), generator=generator) < 0.6).double()
    mask[0] = 1
    return {**batch, "mask": mask} if index not in (2, 4) else batch


def masked_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(net(batch["x"]), batch["y"], reduction="none")
    mask = batch.get("mask", torch.ones_like(losses))
    return (losses * mask).sum() / mask.sum()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("loss", "make"), [(aux_loss, with_aux), (masked_loss, with_mask)])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.long
def test_a_tensor_that_only_some_batches_have_is_known_by_its_name(loss: Any, make: Any, size: int) -> None:
    assert_same(loss, make, micro_batch_size=size)


def unlabelled(index: int, batch: dict[str, Tensor], generator: torch.Generator) -> Any:
    rows = len(batch["x"]) if index not in (3, 5) else 4 + index
    return {**batch, "u": torch.randn(rows, 6, generator=generator, dtype=torch.float64)}


def half_labelled_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch["x"]), batch["y"]) + 0.1 * net(batch["u"]).square().mean()


def bags(index: int, batch: dict[str, Tensor], generator: torch.Generator) -> Any:
    """Nested rows in one batch."""
    if index != 4:
        return batch
    rows = [
        torch.randn(1 + n % 3, 6, generator=generator, dtype=torch.float64) for n in range(len(batch["y"]))
    ]
    return {**batch, "x": torch.nested.nested_tensor(rows, layout=torch.jagged)}


def bag_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"]
    return F.cross_entropy(net(x.values() if x.is_nested else x)[: len(batch["y"])], batch["y"])


def sparse(index: int, batch: dict[str, Tensor], generator: torch.Generator) -> Any:
    return {**batch, "x": batch["x"].to_sparse_csr()} if index in (3, 4) else batch


def sparse_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch["x"].to_dense()), batch["y"])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize(
    ("loss", "make", "said"),
    [
        (half_labelled_loss, unlabelled, "disagree on"),
        (bag_loss, bags, "nested"),
        (sparse_loss, sparse, "sparse_csr"),
    ],
)
@pytest.mark.parametrize("size", ["auto", 3])
@pytest.mark.long
def test_a_later_batch_that_can_not_be_split_runs_whole_with_one_warning(
    loss: Any, make: Any, said: str, size: Any
) -> None:
    whole = fitted(loss, make)
    with pytest.warns(UserWarning, match=f"batch [34] whole, as any other like it: .*{said}") as told:
        split = fitted(loss, make, MemoryBudget("1GiB", micro_batch_size=size))
    assert sum("like it" in str(one.message) for one in told) == 1
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-12, atol=1e-13)
    assert split.losses == pytest.approx(whole.losses, rel=1e-12)


def always_nested(index: int, batch: dict[str, Tensor], generator: torch.Generator) -> Any:
    return bags(4, batch, generator)


def always_sparse(index: int, batch: dict[str, Tensor], generator: torch.Generator) -> Any:
    return {**batch, "x": batch["x"].to_sparse()}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize(
    ("loss", "make", "kind"),
    [(bag_loss, always_nested, "nested"), (sparse_loss, always_sparse, "sparse_coo")],
)
def test_batches_of_tensors_without_rows_run_whole(loss: Any, make: Any, kind: str) -> None:
    whole = fitted(loss, make)
    with pytest.warns(UserWarning, match=f"not in micro-batches of 3: batch\\['x'\\] is a {kind} tensor"):
        split = fitted(loss, make, MemoryBudget("1GiB", micro_batch_size=3))
    assert torch.equal(weights(split), weights(whole))


def full_at_sparse_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if batch["x"].layout == torch.sparse_csr and torch.is_grad_enabled():
        raise torch.OutOfMemoryError("the device is full")
    return sparse_loss(net, batch)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_one_that_does_not_fit_is_said_not_to_be_split() -> None:
    """It was said that a micro-batch of 1 ran out of memory."""
    words = r"The whole batch runs out of memory .* batch\['x'\] is a sparse_csr tensor"
    with pytest.raises(RuntimeError, match=words), pytest.warns(UserWarning, match="runs batch 3 whole"):
        fitted(full_at_sparse_loss, sparse, MemoryBudget("1GiB", micro_batch_size=3))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_one_that_no_longer_fits_is_said_not_to_be_split() -> None:
    """Batch 4 is no larger than batch 3, so that it is not measured."""
    words = r"Batch 4 runs out of memory .* and can't be split. batch\['x'\] is a sparse_csr tensor"
    calls = iter(range(100))  # goes back after the trial of batch 3

    def full_later(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if batch["x"].layout == torch.sparse_csr and next(calls) > 0:
            raise torch.OutOfMemoryError("the device is full")
        return sparse_loss(net, batch)

    with (
        pytest.raises(torch.OutOfMemoryError, match=words),
        pytest.warns(UserWarning, match="runs batch 3 whole"),
    ):
        fitted(full_later, sparse, MemoryBudget("1GiB", micro_batch_size=3))
