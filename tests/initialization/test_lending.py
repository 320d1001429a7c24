# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
"""What is staged is not resident beside what it becomes; who holds a copy or looks at a parameter sees values."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memkit.initialization.building import build_on
from lightning_memkit.initialization.pages import drop_pages, move_values

BF16 = torch.bfloat16
ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are dropped on Linux alone")
ROWS = 2**12  # of 2**10 values: 16 MiB in float32


def resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))


@pytest.mark.parametrize("offset", [0, 1, 1000])
@pytest.mark.parametrize(("one", "other"), [(BF16, torch.float32), (torch.float32, BF16)])
def test_moved_values_are_those_of_a_copy(one, other, offset):
    source = torch.randn(2**20 + 7 + offset)[offset:].to(one)
    expected, around = source.to(other), source.new_empty(3 * len(source)).fill_(3)
    inner = around[len(source) : 2 * len(source)].copy_(source)
    target = torch.empty_like(expected)
    move_values(inner, target)
    assert torch.equal(target, expected)
    assert (around[: len(source)] == 3).all()  # neighbours on the first and the last page
    assert (around[2 * len(source) :] == 3).all()


def test_small_and_strided_tensors_are_copied():
    small, target = torch.ones(5), torch.empty(5, dtype=BF16)
    move_values(small, target)
    assert torch.equal(small, torch.ones(5))
    assert torch.equal(target, torch.ones(5, dtype=BF16))
    strided = torch.randn(2**10, 2**10).T
    kept, target = strided.clone(), torch.empty(2**10, 2**10)
    move_values(strided, target)
    assert torch.equal(target, kept)
    assert torch.equal(strided, kept)


@ON_LINUX
def test_dropped_pages_are_not_resident():
    tensor = torch.ones(2**24)
    before = resident_bytes("VmRSS")
    drop_pages(tensor)
    assert before - resident_bytes("VmRSS") >= 0.95 * tensor.nbytes
    assert torch.equal(tensor.fill_(2), torch.full((2**24,), 2.0))


class Table(nn.Module):
    """One large parameter and an initialiser, beside a little one whose initialiser is the next."""

    def __init__(self, initialise=lambda weight: nn.init.normal_(weight)):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, 2**10))
        self.little = nn.Parameter(torch.empty(4))
        nn.init.constant_(self.weight, 3)
        initialise(self.weight)
        nn.init.zeros_(self.little)


@ON_LINUX
def test_beside_a_model_half_a_float32_copy_is_resident():
    with build_on("cpu", BF16):
        Table()  # what kernels and allocators keep
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    with build_on("cpu", BF16):
        tables = [Table() for _ in range(3)]
    peak, after = resident_bytes("VmHWM") - before, resident_bytes("VmRSS") - before
    one = 2 * ROWS * 2**10
    assert after <= 3.25 * one
    assert peak <= 4.25 * one  # the copy is 2, less the parameter's own
    assert all(float(table.weight.data.float().std()) == pytest.approx(1, abs=0.01) for table in tables)


def plain(initialise) -> nn.Module:
    torch.manual_seed(5)
    return Table(initialise).to(BF16)


def through_numpy(weight):
    array = weight.detach().numpy()
    nn.init.ones_(nn.Parameter(torch.empty(3)))
    array[:] = 1 / 3


def through_the_copy_itself(weight):
    with torch.no_grad():
        held = weight.contiguous()
        torch.empty(3)  # writes copies back
        assert float(held[1, 1]) == 3
        held[1:] = 1 / 3
        held[:1] = 1 / 7


def from_each_other(weight):
    other = nn.Parameter(torch.empty(ROWS, 2**10))
    nn.init.normal_(other)
    weight.data.copy_(other * 2)


@pytest.mark.parametrize("initialise", [through_numpy, through_the_copy_itself, from_each_other])
def test_who_holds_a_copy_writes_to_the_parameter(initialise):
    torch.manual_seed(5)
    with build_on("cpu", BF16):
        ours = Table(initialise)
    assert torch.equal(ours.weight, plain(initialise).weight)


def test_a_parameter_that_is_read_while_it_is_lent_shows_its_values():
    with build_on("cpu", BF16):
        module = Table(nn.init.ones_)
        nn.init.constant_(module.weight, 3)
        assert "3." in repr(module.weight)
        nn.init.constant_(module.weight, 4)
        stored = module.weight.untyped_storage()
        with torch._C.DisableTorchFunction():
            assert torch.equal(module.weight, torch.full((ROWS, 2**10), 4, dtype=BF16))
        del stored
        held = module.weight.data  # an alias of the copy
        nn.init.constant_(module.little, 2)
        product = module.weight[:, :4] * module.little
        held.fill_(5)
        assert torch.equal(product, torch.full((ROWS, 4), 8.0))
    assert torch.equal(module.weight, torch.full((ROWS, 2**10), 5, dtype=BF16))


def test_memory_that_others_made_is_not_dropped():
    array = torch.full((ROWS, 2**10), 7, dtype=torch.float16).numpy()
    with build_on("cpu", torch.float16):
        module = Table()
        module.weight.data = torch.from_numpy(array)
        copy = module.weight.add(1)
        assert (array == 7).all()
        wide = torch.full((ROWS, 2**10), 9.0).numpy()
        module.other = nn.Parameter(torch.from_numpy(wide))
        nn.init.zeros_(module.other)
        nn.init.zeros_(module.little)
    assert (wide == 9).all()
    assert torch.equal(copy, torch.full((ROWS, 2**10), 8.0))


def test_an_initialiser_that_fails_leaves_values():
    def failing(weight):
        nn.init.constant_(weight, 2)
        weight.data[5] = 1 / 0

    kept = []
    with pytest.raises(ZeroDivisionError), build_on("cpu", BF16):
        Table(lambda weight: (kept.append(weight), failing(weight)))
    assert torch.equal(kept[0], torch.full((ROWS, 2**10), 2, dtype=BF16))
