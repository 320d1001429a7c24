"""A model of eight billion parameters is built on the card; the host never holds more than a little of it."""

import pytest

from tests.gpu.card import accelerator, needs_package, on_cpu, script

pytestmark = pytest.mark.gpu
GIB = 1 << 30


@pytest.mark.parametrize("how", ["build_on", "strategy"])
def test_the_host_holds_no_copy(how: str) -> None:
    needs_package("transformers")
    found = script("built", accelerator(), how)
    assert found["devices"] == [accelerator()]
    assert found["dtypes"] == ["torch.bfloat16"]
    assert found["logits"][:2] == [1, 8]
    staged = 4 * found["largest"]  # one parameter in float32
    if on_cpu():  # where it lives is the host's memory
        assert found["grown"] <= found["bytes"] + 2 * staged + GIB // 4
        return
    assert found["bytes"] > 14 * GIB
    assert found["grown"] <= staged + GIB  # the rest is torch's kernels, which are loaded as they are used
