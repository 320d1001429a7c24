"""What a tape knows of torch's operators by their names."""

import pytest
import torch

from lightning_memkit.activations.operators import is_attention, is_matmul

# What computes something else beside an attention: its dropout's mask, or what it would choose.
_NO_ATTENTION = ("_fused_sdp_choice", "_fill_mem_eff_dropout_mask_")
_PARTS_OF_A_NAME = ("attention", "attn", "flash")


def operators_of_torch() -> list[str]:
    """All of torch's own that are some attention by their name, of whatever namespace."""
    from torch.nn.attention import flex_attention, varlen

    assert varlen
    assert flex_attention
    names = {schema.name.split("::")[-1] for schema in torch._C._jit_get_all_schemas()}
    return sorted(name for name in names if any(part in name for part in _PARTS_OF_A_NAME))


def test_all_of_torchs_attentions_are_known():
    """`selective` made `_varlen_attn` again, the most expensive operator of a block."""
    names = operators_of_torch()
    assert "_scaled_dot_product_flash_attention" in names
    assert "_varlen_attn" in names
    assert [name for name in names if not is_attention(name)] == []


@pytest.mark.parametrize("name", [*_NO_ATTENTION, "mm", "native_layer_norm", "gelu", "native_dropout"])
def test_nothing_else_is(name):
    assert not is_attention(name)


def test_an_attention_is_no_matmul():
    assert not any(map(is_matmul, operators_of_torch()))
