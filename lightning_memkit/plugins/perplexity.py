"""Perplexity from losses alone, for models that never compute their logits."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class LossPerplexity(Metric):
    """Perplexity over all tokens seen, from losses and token counts: two numbers of state, no logits.

    It is the exponential of the mean loss a token, which `torchmetrics.text.Perplexity` computes from logits.
    Sums are kept in float64 and reduced over ranks. The loss must be plain cross-entropy: z-loss, label
    smoothing and auxiliary losses would be included.

    Example:
        >>> perplexity.update(loss=outputs.loss, tokens=(labels[:, 1:] != -100).sum())
        >>> self.log("val_perplexity", perplexity)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    loss: Tensor
    tokens: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("loss", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, tokens: Tensor | int, summed: bool = False) -> None:
        """Add a batch.

        Args:
            loss: the mean loss per token of this batch.
            tokens: the number of labels in that mean; 0 adds nothing, whatever the loss is.
            summed: `loss` is the sum over the tokens instead.
        """
        count = torch.as_tensor(tokens, device=self.tokens.device).to(self.tokens.dtype)
        total = loss.detach().to(self.loss)
        total = total if summed else total * count
        # The mean over no labels is nan, which must not spoil the rest.
        self.loss += torch.where(count > 0, total, torch.zeros_like(total))
        self.tokens += count

    def compute(self) -> Tensor:
        """The perplexity so far; nan before the first token."""
        return torch.exp(self.loss / self.tokens).float()
