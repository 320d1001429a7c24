"""What runs have measured over what was predicted for them."""

from importlib import metadata
from typing import Any, NoReturn

import pytest

from lightning_memkit.prediction.residuals import keep_residual, residual_of


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("MEMKIT_TUNING_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_median_of_the_latest_runs_is_known_to_a_package_that_was_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run from source it has no metadata, which raised PackageNotFoundError."""

    def not_installed(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    assert residual_of("rtx4090") == 1.0
    for ratio in (1.02, 1.04, 1.3):
        keep_residual("rtx4090", ratio)
    assert residual_of("rtx4090") == 1.04
    assert residual_of("h200") == 1.0
