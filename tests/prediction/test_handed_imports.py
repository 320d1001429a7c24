"""A fork's imports of known libraries are the original's afterwards, without a word; other modules stay the fork's."""

import logging
import sys

import pytest

from lightning_memkit.prediction.fake_results import contained_simulation
from lightning_memkit.prediction.handed_imports import import_all, imported_since

RARE = "transformers.models.superpoint.configuration_superpoint"


@pytest.fixture(autouse=True)
def not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, RARE, raising=False)


def test_what_a_fork_imports_the_next_one_has():
    def build() -> bool:
        known = RARE in sys.modules
        from transformers.models.superpoint import configuration_superpoint  # noqa: F401

        return known

    assert [contained_simulation(build) for _ in range(2)] == [False, True]


def test_modules_of_others_stay_the_forks(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)

    def build() -> None:
        import this  # noqa: F401, PLC0415

    contained_simulation(build)
    assert "this" not in sys.modules


def test_imports_print_nothing_and_fail_in_silence(tmp_path, monkeypatch, capsys):
    (tmp_path / "loud_of_a_fork.py").write_text(
        "import logging, sys, warnings\n"
        "warnings.warn('old')\nlogging.warning('no card')\nprint('Failed to load', file=sys.stderr)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import_all(["loud_of_a_fork", "not_here_of_a_fork"])
    assert "loud_of_a_fork" in sys.modules
    assert "not_here_of_a_fork" not in sys.modules
    assert capsys.readouterr() == ("", "")
    assert logging.root.manager.disable == logging.NOTSET
    del sys.modules["loud_of_a_fork"]


def test_only_new_modules_of_known_libraries_are_named():
    import transformers.models.superpoint.configuration_superpoint  # noqa: F401, PLC0415

    assert RARE in imported_since(set())
    assert RARE not in imported_since({RARE})
    assert not any(name.startswith("torch") for name in imported_since(set()))
