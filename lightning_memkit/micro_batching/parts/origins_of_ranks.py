"""Check that a mean comes from one place on all ranks, which divide it by what they count together."""

from collections.abc import Mapping, Sequence
from zlib import crc32

from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.origins import Origin, ParameterNames
from lightning_memkit.micro_batching.ranks.agreement import values_of_ranks
from lightning_memkit.micro_batching.run import Run
from lightning_memkit.micro_batching.shares.foreseen import UnforeseenLossError

_KEYS = 2**20  # so that the sum of their squares over 2,048 ranks is exact in float64


class OriginsOfRanks:
    """Compares where a batch's means come from with the other ranks.

    Ranks whose rows are of other tasks would count them as one. Numbers that are added up with the batch's counts
    show whether that may be so; only then the ranks tell each other the names of parameters.

    Args:
        run: the loop.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._parameters: ParameterNames | None = None

    def numbers(self, rules: LossRules, origins: Mapping[int, Origin]) -> list[float]:
        """Three numbers a term, to be added up over ranks: 1 if it has an origin, its key, and the key's square.

        Args:
            rules: how the loss's terms add up.
            origins: those of this rank's terms, by their index.
        """
        if self._run.world_size == 1:
            return []
        named = self._named(origins)
        keys = [_key(named[index]) if index in named else None for index in range(len(rules.rules))]
        return [n for key in keys for n in ((0.0, 0.0, 0.0) if key is None else (1.0, key, key**2))]

    def check(self, rules: LossRules, origins: Mapping[int, Origin], averaged: Sequence[float]) -> None:
        """Check that a mean's origin is one on all ranks.

        Args:
            rules: as for `numbers`.
            origins: as for `numbers`.
            averaged: the numbers over all ranks, divided by how many these are.

        Raises:
            UnforeseenLossError: on all ranks, if it is not.
        """
        sums = [round(number * self._run.world_size) for number in averaged]
        triples = zip(sums[::3], sums[1::3], sums[2::3], strict=True)
        if all(count * squares == keys**2 for count, keys, squares in triples):
            return
        of_ranks = values_of_ranks(self._run, self._named(origins))
        for index, rule in enumerate(rules.rules):
            first, *others = [of_one[index] for of_one in of_ranks if index in of_one] or [None]
            if first is not None and not all(
                first.is_one_with(other) for other in others if other is not None
            ):
                raise UnforeseenLossError("terms of several heads or columns, one on each rank", rule.name)

    def _named(self, origins: Mapping[int, Origin]) -> dict[int, Origin]:
        """Those near a parameter of the module, by its name."""
        if self._parameters is None or not all(one.nearest in self._parameters for one in origins.values()):
            self._parameters = ParameterNames(self._run.module)
        named = {index: self._parameters.named(one) for index, one in origins.items()}
        return {index: one for index, one in named.items() if one.nearest}


def _key(origin: Origin) -> float:
    return float(crc32(repr((origin.nearest, sorted(origin.chosen))).encode()) % _KEYS)
