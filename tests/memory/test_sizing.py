import random

import pytest

from lightning_memkit.memory.sizing import NothingFitsError, largest_fitting


def sizes_of(most: int) -> list[int]:
    return sorted({-(-most // parts) for parts in range(1, most + 1)})


@pytest.mark.parametrize("seed", range(200))
def test_finds_the_largest_of_any_growing_peak(seed: int) -> None:
    """The oracle tries every size; the peak is the larger of two lines, as phases make it."""
    draw = random.Random(seed)
    most = draw.randint(1, 64)
    base, slope, step = draw.randint(10, 100), draw.uniform(0.5, 20), draw.randint(0, 300)

    def peak_of(size: int) -> int | None:
        peak = int(max(base + slope * size, step))
        return peak if draw.random() < 2 and peak <= 5000 else None

    usable = int(peak_of(1) or 0) + draw.randint(0, 800)
    sizing = largest_fitting(peak_of, usable_bytes=usable, most=most)
    expected = max(size for size in sizes_of(most) if (peak_of(size) or 10**9) <= usable)
    assert sizing.micro_batch_size == expected
    assert sizing.peak_bytes == peak_of(expected)
    assert len(sizing.trials) <= 8


def test_out_of_memory_closes_the_interval() -> None:
    sizing = largest_fitting(lambda size: 100 if size <= 11 else None, usable_bytes=1000, most=32)
    assert sizing.micro_batch_size == 11


def test_nothing_fits_carries_the_peak() -> None:
    with pytest.raises(NothingFitsError) as caught:
        largest_fitting(lambda size: 50 * size, usable_bytes=49, most=8)
    assert caught.value.peak_bytes == 50
