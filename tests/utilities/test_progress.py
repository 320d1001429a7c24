"""The bar on the terminal: after two seconds, gone at the end, and never in a log file."""

import io
from types import SimpleNamespace

import pytest

from lightning_memkit.utilities import progress
from lightning_memkit.utilities.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return terminal


def go(clock: Clock, *seconds: float, total: int | None = 4, unit: str = "documents") -> None:
    with ProgressBar("reading", total, unit) as bar:
        for each in seconds:
            clock.now += each
            bar.advance()


def test_what_takes_less_than_two_seconds_shows_nothing(clock: Clock, terminal: Terminal) -> None:
    go(clock, 0.5, 0.5, 0.5)
    assert terminal.getvalue() == ""


def test_what_takes_longer_says_how_far_it_is(clock: Clock, terminal: Terminal) -> None:
    go(clock, 1.0, 1.5, 1.0)
    shown = terminal.getvalue()
    assert "reading" in shown
    assert "2/4" in shown
    assert "3/4" in shown
    assert "1/4" not in shown  # that was before the two seconds


def test_without_a_total_it_says_how_many_are_done(clock: Clock, terminal: Terminal) -> None:
    go(clock, 3, 3, total=None, unit="configurations")
    assert "reading 2 configurations" in terminal.getvalue().split("reading 1")[-1]


def test_what_is_found_stands_above_the_bar_once(clock: Clock, terminal: Terminal) -> None:
    with ProgressBar("planning", 3, "configurations") as bar:
        bar.found("1 GiB fits")
        clock.now += 3
        bar.found("1 GiB fits")
        clock.now += 3
        bar.reach(2)
    # What each drawing has above its bar, and the last bar.
    *above, last = terminal.getvalue().split("planning")
    assert {text.count("1 GiB fits") for text in above} == {1}
    assert "2/3" in last


def test_the_latest_of_many_stand_above_the_bar(clock: Clock, terminal: Terminal) -> None:
    with ProgressBar("planning", 99, "configurations") as bar:
        for number in range(40):
            clock.now += 3
            bar.found(f"number {number} of 40")
    above = terminal.getvalue().split("planning")[-2]
    assert [number for number in range(40) if f"number {number} of" in above] == list(range(28, 40))


def test_bytes_are_shown_in_their_larger_units(clock: Clock, terminal: Terminal) -> None:
    with ProgressBar("loading", 8 * 2**20, "bytes") as bar:
        clock.now += 3
        bar.advance(2 * 2**20)
    assert "2.0/8.0 MiB" in terminal.getvalue()


def test_a_log_file_holds_nothing_of_it(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=log))
    go(clock, 3, 3, 3)
    assert log.getvalue() == ""


def test_other_ranks_are_silent(clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    go(clock, 3, 3, 3)
    assert terminal.getvalue() == ""


def test_items_are_given_on_and_an_error_takes_the_bar_away(clock: Clock, terminal: Terminal) -> None:
    taken, bar = [], ProgressBar("reading", 3)

    def read() -> None:
        with bar:
            for item in bar.over("abc"):
                clock.now += 3
                taken.append(item)
                if item == "c":
                    raise KeyError(item)

    with pytest.raises(KeyError):
        read()
    assert taken == ["a", "b", "c"]
    assert "2/3" in terminal.getvalue()
    assert bar._bar is None
