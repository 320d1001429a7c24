"""What a configuration takes at the least: a bound that needs no prediction."""

from torch import nn

from lightning_memkit.distributed.sharding import Sharding
from lightning_memkit.planning.choices import GIVEN, Family


class Floor:
    """What weights and gradients take on a rank; of released gradients the largest.

    Args:
        module: with the shapes of its parameters.
        ranks: how many there are.
        on_host: whether they may be the host's, as the strategy was given: then nothing is known of the device.
    """

    def __init__(self, module: nn.Module, ranks: int, on_host: bool = False) -> None:
        self._parameters = [] if on_host else list(module.parameters())
        self._ranks = ranks

    def __call__(self, family: Family) -> int:
        """Bytes of a rank."""
        is_16_bit = any(part.name == "PureBF16Precision" for part in family["precision"].plugins)
        most = 2 if is_16_bit or family["precision"].name == GIVEN else 4
        strategy = family["ranks"].arguments.get("strategy")
        shared = self._ranks if isinstance(strategy, Sharding) or family["ranks"].name == GIVEN else 1
        sizes = [(one.numel() * min(most, one.element_size()), one.requires_grad) for one in self._parameters]
        weights = sum(size for size, _ in sizes)
        trained = [size for size, is_trained in sizes if is_trained]
        gradients = max(trained, default=0) if family.is_released else sum(trained)
        gathered = isinstance(strategy, Sharding) and strategy.stage == 2
        return (weights if gathered else weights // shared) + gradients // shared
