"""The causal language model of `examples/pretrain_causal_lm`, its blocks built late: plain torch and Lightning."""

from typing import Any

from examples.pretrain_causal_lm.model import Attention, Block, CausalLM, causal_attention


class LateCausalLM(CausalLM):
    """Predicts the next token; the strategy says where and at which dtype its blocks are built.

    Args:
        width: features of a token; a multiple of `heads`.
        heads: attention heads.
        layers: blocks.
        attention: from (query, key, value, cu_seqlens=) to values.
        options: as of `CausalLM`.
    """

    def __init__(
        self,
        width: int = 256,
        heads: int = 8,
        layers: int = 6,
        attention: Attention = causal_attention,
        **options: Any,
    ) -> None:
        super().__init__(width=width, heads=heads, layers=0, attention=attention, **options)
        self._depth = layers
        self._of_a_block = (width, heads, attention)

    def configure_model(self) -> None:
        """Build the blocks, on every rank with the same random numbers; the strategy shards them afterwards."""
        if not len(self.blocks):
            self.blocks.extend(Block(*self._of_a_block) for _ in range(self._depth))
