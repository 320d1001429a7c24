import random

import pytest

from lightning_memkit.memory.sizing import Forecast, NothingFitsError, largest_fitting, part_sizes


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
    sizing = largest_fitting(peak_of, usable_bytes=usable, sizes=part_sizes(most))
    expected = max(size for size in sizes_of(most) if (peak_of(size) or 10**9) <= usable)
    assert sizing.micro_batch_size == expected
    assert sizing.peak_bytes == peak_of(expected)
    assert len(sizing.trials) <= 8


def test_out_of_memory_closes_the_interval() -> None:
    sizing = largest_fitting(
        lambda size: 100 if size <= 11 else None, usable_bytes=1000, sizes=part_sizes(32)
    )
    assert sizing.micro_batch_size == 11


def test_nothing_fits_carries_the_peak() -> None:
    with pytest.raises(NothingFitsError) as caught:
        largest_fitting(lambda size: 50 * size, usable_bytes=49, sizes=part_sizes(8))
    assert caught.value.peak_bytes == 50


@pytest.mark.parametrize("seed", range(200))
def test_a_forecast_saves_trials_and_a_wrong_one_costs_none_of_the_result(seed: int) -> None:
    """Off by 2 % it is taken at its word, by 40 % it is corrected; what is taken was measured and fits."""
    draw = random.Random(seed)
    most, base, slope = draw.randint(8, 64), draw.randint(10, 100), draw.uniform(0.5, 20)
    wrong = draw.choice([0.6, 0.98, 1.0, 1.02, 1.4])
    usable = int(base + slope * draw.randint(1, most)) + 1

    def peak_of(size: int) -> int:
        return int(base + slope * size)

    forecast = Forecast(lambda size: wrong * (base + slope * size))
    sizing = largest_fitting(peak_of, usable_bytes=usable, sizes=part_sizes(most), forecast=forecast)
    right = max(size for size in sizes_of(most) if peak_of(size) <= usable)
    assert sizing.peak_bytes == peak_of(sizing.micro_batch_size) <= usable
    if abs(wrong - 1) > 0.05 or wrong == 1:
        assert sizing.micro_batch_size == right
    else:
        assert sizing.micro_batch_size >= sizes_of(most)[max(0, sizes_of(most).index(right) - 1)]
    assert len(sizing.trials) <= (1 if wrong == 1 else 8)


def test_a_forecast_is_corrected_once() -> None:
    tried: list[int] = []

    def peak_of(size: int) -> int:
        tried.append(size)
        return 130 * size

    forecast = Forecast(lambda size: 100 * size)
    sizing = largest_fitting(peak_of, usable_bytes=3200, sizes=part_sizes(64), forecast=forecast)
    assert (tried, sizing.micro_batch_size) == ([32, 22], 22)
    assert forecast.ratio == pytest.approx(1.3)


def test_what_earlier_runs_were_off_is_expected() -> None:
    tried: list[int] = []

    def peak_of(size: int) -> int:
        tried.append(size)
        return 130 * size

    sizing = largest_fitting(
        peak_of,
        usable_bytes=3200,
        sizes=part_sizes(64),
        forecast=Forecast(lambda size: 100 * size, factor=1.3),
    )
    assert (tried, sizing.micro_batch_size) == ([22], 22)


def test_a_forecast_that_nothing_fits_is_checked_by_measuring() -> None:
    never = Forecast(lambda size: 1e12)
    assert (
        largest_fitting(
            lambda size: size, usable_bytes=8, sizes=part_sizes(8), forecast=never
        ).micro_batch_size
        == 8
    )
    with pytest.raises(NothingFitsError):
        largest_fitting(
            lambda size: None, usable_bytes=8, sizes=part_sizes(8), forecast=Forecast(lambda size: 1.0)
        )
