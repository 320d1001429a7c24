"""What every test gets: a fixed seed, one thread, a cache folder, and a check that it leaves no trace."""

import gc
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.card import why_skipped
from tests.sampling import TURNS, leave_out, turn_of


def pytest_configure(config: pytest.Config) -> None:
    """Point every cache at one folder under .pytest_cache and keep the Hugging Face libraries offline."""
    # One folder for all runs: reading the standard library's sources takes seconds and changes nothing.
    cache = config.cache
    assert cache is not None
    os.environ["XDG_CACHE_HOME"] = str(cache.mkdir("user-cache"))
    os.environ["MEMKIT_TUNING_CACHE"] = "0"  # one run's answers must not decide another's
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pytest_report_header(config: pytest.Config) -> str:
    """Say which of the long tests run: two commits take other ones."""
    turn = turn_of(config.rootpath)
    return f"long tests: part {turn + 1} of {TURNS}, by the commit (all: -m 'long or not slow', or by name)"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that ask a card where there is none; from this one line, so that pytest counts them in one."""
    if item.get_closest_marker("gpu") is not None and (why := why_skipped()) is not None:
        pytest.skip(why)


def pytest_collection_finish() -> None:
    """Keep garbage collections short: each fit makes some, among half a million objects of pytest's and torch's."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand where the README's commands are given."""
    monkeypatch.chdir(Path(__file__).parent.parent)


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments have 8 bits in rows of four values, too, so that small models have them."""
    monkeypatch.setattr("lightning_memkit.optim.quantised.SHORTEST_ROW", 4)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Keep what the test modules before have imported out of garbage collections, too."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed every generator; a test that needs other numbers seeds again."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture(autouse=True)
def command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide pytest's own arguments: LightningCLI warns where it is given others."""
    monkeypatch.setattr(sys, "argv", ["memkit"])


@pytest.fixture(autouse=True)
def environment_survives():
    """Take back what a test leaves in the environment: Lightning notes there where ranks meet, and never forgets it.

    A run that a later test starts in a process of its own would meet at a port that is still in use here.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Keep sums in one order, whatever the number of cores; tiny tensors are also quicker so."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def global_state_survives():
    """Fail a test that leaves torch's global settings changed: the next one would test something else."""
    before = _global_state()
    yield
    after = _global_state()
    torch.set_default_dtype(before["default_dtype"])
    torch.use_deterministic_algorithms(before["deterministic"])
    assert after == before, f"the test changed torch's global state: {before} became {after}"


def _global_state() -> dict:
    return {
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad_enabled": torch.is_grad_enabled(),
        "dispatch_modes": torch._C._len_torch_dispatch_stack(),
    }


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what a sample leaves out as slow; tests that fork go first, then those of torch's distributed checkpoints.

    Autograd works in no fork of a process that has used an accelerator, and checkpoints ask the one that is known for
    streams, which the device "fake" has not all of. Those that use a card go last: no fork survives CUDA.
    """
    # Whoever names tests means these.
    if not any("::" in argument for argument in config.args):
        leave_out(items, turn_of(config.rootpath))
    orders = (
        ("prediction", "planning", "forecast", "foreseen", "report_failed", "zero_redundancy"),
        ("initialization/test_loading", "tests/checkpoints", "distributed/test_weights"),
    )

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("gpu") is not None:
            return len(orders) + 1
        path = item.nodeid.partition("::")[0]
        return next(
            (index for index, names in enumerate(orders) if any(name in path for name in names)), len(orders)
        )

    items.sort(key=place)
