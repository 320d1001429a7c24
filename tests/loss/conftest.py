"""What tests of the loss head share."""

from collections.abc import Iterator

import pytest

from lightning_memkit.loss import backends


@pytest.fixture
def proofs_forgotten() -> Iterator[None]:
    """Backends are proven anew, and what a stand-in has shown does not outlive its test."""
    forget = (backends._disproof.cache_clear, backends._automatic.cache_clear)
    for clear in forget:
        clear()
    yield
    for clear in forget:
        clear()
