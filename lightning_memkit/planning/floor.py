"""A lower bound on the memory of a configuration, known without a prediction."""

from torch import nn

from lightning_memkit.distributed.sharding import Sharding
from lightning_memkit.planning.choices import GIVEN, Family


class Floor:
    """The bytes of weights and gradients on a rank; with released gradients only the largest gradient.

    Args:
        module: gives the shapes of the parameters.
        ranks: the number of ranks.
        on_host: whether the given strategy may keep weights on the host; then nothing is known about the
            device.
    """

    def __init__(self, module: nn.Module, ranks: int, on_host: bool = False) -> None:
        self._parameters = [] if on_host else list(module.parameters())
        self._ranks = ranks

    def __call__(self, family: Family) -> int:
        """The least bytes on a rank."""
        is_16_bit = any(part.name == "PureBF16Precision" for part in family["precision"].plugins)
        most = 2 if is_16_bit or family["precision"].name == GIVEN else 4
        strategy = family["ranks"].arguments.get("strategy")
        if isinstance(strategy, Sharding) and strategy.cpu_offload:
            return 0
        shared = self._ranks if isinstance(strategy, Sharding) or family["ranks"].name == GIVEN else 1
        sizes = [(one.numel() * min(most, one.element_size()), one.requires_grad) for one in self._parameters]
        weights = sum(size for size, _ in sizes)
        trained = [size for size, is_trained in sizes if is_trained]
        gradients = max(trained, default=0) if family.is_released else sum(trained)
        gathered = isinstance(strategy, Sharding) and strategy.stage == 2
        return (weights if gathered else weights // shared) + gradients // shared
