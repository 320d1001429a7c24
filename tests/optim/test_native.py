"""The C++ passes give the bits of their plain-torch twins."""

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import pytest
import torch
from filelock import FileLock

from lightning_memkit.optim import native
from lightning_memkit.optim.kahan import kahan_join_
from lightning_memkit.optim.modes import low_dtype_of, narrow_
from lightning_memkit.optim.split import join_
from lightning_memkit.optim.split24 import join24_
from lightning_memkit.optim.stochastic_rounding import TILE, StochasticRounding

pytestmark = pytest.mark.skipif(
    native.why_unavailable() is not None, reason=f"no kernels: {native.why_unavailable()}"
)

JOIN = {
    "kahan": (kahan_join_, torch.bfloat16),
    "split": (join_, torch.int16),
    "split24": (join24_, torch.int8),
}


def patterns(count: int = 2 * TILE + 77) -> torch.Tensor:
    """Random bit patterns as float32: every exponent, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).int()
    bits[:8] = torch.tensor([0, -(2**31), 0x7F800000, -0x800000, 0x7FC00000, -1, 0x7F7FFFFF, 1]).int()
    return bits.view(torch.float32)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal bit for bit, but for the payload of NaN."""
    if not first.is_floating_point():
        return torch.equal(first, second)
    numbers = {2: torch.int16, 4: torch.int32}[first.element_size()]
    kept = ~first.isnan()
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(
        first.view(numbers)[kept], second.view(numbers)[kept]
    )


@pytest.mark.parametrize("mode", ["kahan", "split", "split24", "stochastic", "none"])
def test_narrowing(mode, monkeypatch):
    source = patterns()
    rounding = StochasticRounding(seed=4)
    rounding.begin_step()
    results = []
    for available in (True, False):
        monkeypatch.setattr(native, "available", lambda available=available: available)
        high = torch.empty_like(source, dtype=torch.bfloat16)
        low = low_dtype_of(mode)
        rest = None if low is None else torch.empty_like(source, dtype=low)
        narrow_(mode, source, high, rest, rounding, (1, TILE))
        results.append((high, high if rest is None else rest))
    assert same(results[0][0], results[1][0])
    assert same(results[0][1], results[1][1])


@pytest.mark.parametrize("mode", JOIN)
def test_joining(mode):
    twin, dtype = JOIN[mode]
    high = patterns().bfloat16()
    low = torch.randint(-(2**15), 2**15, high.shape, generator=torch.Generator().manual_seed(1))
    low = low.to(torch.int8) if dtype == torch.int8 else low.to(torch.int16).view(dtype)
    ours, theirs = torch.empty(high.shape), torch.empty(high.shape)
    native.widen_(mode, high, low, ours)
    twin(high, low, theirs)
    assert same(ours, theirs)


@pytest.mark.parametrize("start", [0, 3 * TILE])
def test_stochastic_rounding(start, monkeypatch):
    source = patterns()
    ours, theirs = (torch.empty_like(source, dtype=torch.bfloat16) for _ in range(2))
    rounding = StochasticRounding(seed=3)
    rounding.begin_step()
    rounding.round_(source, ours, (2, "exp_avg_sq", start))
    monkeypatch.setattr(native, "available", lambda: False)
    rounding.round_(source, theirs, (2, "exp_avg_sq", start))
    assert same(ours, theirs)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing(threads):
    source, before = patterns(), torch.get_num_threads()
    high, low = torch.empty_like(source, dtype=torch.bfloat16), torch.empty_like(source, dtype=torch.int16)
    back = torch.empty_like(source)
    torch.set_num_threads(threads)
    try:
        native.narrow_("split", source, high, low, (None, 0, 0))
        native.widen_("split", high, low, back)
    finally:
        torch.set_num_threads(before)
    assert same(back, source)


def test_torchs_own_threads_are_found() -> None:
    """Beside threads that wait actively for torch's next operator, others get a part of a core only."""
    runs_on_openmp = "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()
    assert (native._openmp_of_torch() is not None) == (runs_on_openmp and sys.platform == "linux")


def test_a_fork_of_a_process_that_used_several_threads_can_use_them_too() -> None:
    """None of OpenMP's threads survives a fork, and it would wait for them without end."""
    source, before = patterns(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = rounded_by_kernel(source)
        reader, writer = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=send_rounded, args=(source, writer))
        child.start()
        assert reader.poll(300)  # a wait without end is what it would be
        assert reader.recv() == expected.view(torch.int16).tolist()
    finally:
        torch.set_num_threads(before)
        child.kill()
        child.join()


def rounded_by_kernel(source: torch.Tensor) -> torch.Tensor:
    rounded = torch.empty_like(source, dtype=torch.bfloat16)
    native.narrow_("none", source, rounded, None, (None, 0, 0))
    return rounded


def send_rounded(source: torch.Tensor, writer: Connection) -> None:
    writer.send(rounded_by_kernel(source).view(torch.int16).tolist())


def test_a_round_trip_through_the_engine_moves_autograds_versions():
    weight = torch.zeros(10, dtype=torch.bfloat16)
    before = weight._version
    narrow_("none", torch.ones(10), weight, None, StochasticRounding(), (0, 0))
    assert weight._version > before
    assert torch.equal(weight.float(), torch.ones(10))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where kernels are built; a build takes no time, and notes what it found."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    found = []

    def build(name, folder, flags):
        found.append(sorted(one.name for one in folder.iterdir()))
        (folder / f"{name}.so").touch()
        return folder / f"{name}.so"

    monkeypatch.setattr(native, "_build", build)
    return found


def test_a_build_that_was_killed_is_not_waited_for(folder):
    """It leaves torch's lock behind, for which torch would wait without end, and perhaps a part of the library."""
    library = native._built()
    (library.parent / "lock").touch()
    assert native._built() == library
    assert native._built() == library
    assert len(folder) == 2
    assert "lock" not in folder[1]


def test_a_build_under_way_is_waited_for(folder):
    library = native._built()
    library.unlink()
    reader, writer = multiprocessing.Pipe(duplex=False)
    other = multiprocessing.get_context("fork").Process(target=build_slowly, args=(library, writer))
    other.start()
    try:
        assert reader.poll(300)
        assert native._built() == library
        assert len(folder) == 1  # the other's is used
    finally:
        other.kill()
        other.join()


def build_slowly(library, writer: Connection) -> None:
    with FileLock(library.parent / "building"):
        writer.send(True)
        time.sleep(1)
        library.touch()


def test_counts_advance_as_torch_advances_them() -> None:
    counts = [torch.tensor(float(number)) for number in range(40)]
    counts.append(counts[3])  # twice the same
    expected = [count.clone() for count in counts[:40]]
    expected.append(expected[3])
    torch._foreach_add_(expected, torch.tensor(1.0), alpha=1.0)
    versions = [count._version for count in counts]
    after = native.advance_(counts)
    assert after == [float(count) for count in expected] == [float(count) for count in counts]
    assert all(count._version > version for count, version in zip(counts, versions, strict=True))
