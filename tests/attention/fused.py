"""An error wherever torch would run FlexAttention uncompiled; and batches whose masks have tables of all shapes."""

from collections.abc import Iterator

import pytest
from torch.nn.attention import flex_attention

UNFUSED = "flex_attention_performance"  # torch warns of it once a process; here it is an error each time

# Bounds of documents. Their tables have one block, as many columns as rows, fewer, and one.
LENGTHS = (
    [0, 11, 64],
    [0, 11, 300],
    [0, 640],
    [0, 128, 256, 384, 512, 640],
    [0, 300, 600, 1000],
    [0, 1000, 2048],
    [0, 100],
    [0, 384],
)
# Compiled for these, in torch 2.10 to 2.13: its compiler takes sizes of one for constants, and all others for symbols.
GRAPHS = 3


@pytest.fixture
def fused_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def warn(warning_id: str, message: str) -> None:
        assert warning_id != UNFUSED, message

    with monkeypatch.context() as patch:
        patch.setattr(flex_attention, "_warn_once", warn)
        yield
