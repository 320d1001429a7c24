"""The loss of a linear head without its logits: a function, and a switch for whole models."""

from lightning_memkit.loss.head import IGNORED_LABEL, Reduction, linear_cross_entropy
from lightning_memkit.loss.switch import use_chunked_loss

__all__ = ["IGNORED_LABEL", "Reduction", "linear_cross_entropy", "use_chunked_loss"]
