"""A plan: what fits a budget, ranked, as a table, as the Trainer's arguments and as a config."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning_memkit
from lightning_memkit.distributed.sharding import Sharding
from lightning_memkit.errors import PlanError
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.planning.budget import Budget
from lightning_memkit.planning.choices import Part
from lightning_memkit.planning.search import Row

_MIB = 1 << 20
_NAMED_TOGETHER = 4  # configurations of one precision with one reason


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The configurations that were weighed for a budget; the first is the one to take.

    Attributes:
        budget: what had to be kept.
        rows: those that fit, the best first; then those that were rejected, with the reason.
        rows_of_batch: samples of the loader's batch.
        given: the Trainer's arguments that were given, which are kept.
        notes: what was not considered, and why.
    """

    budget: Budget
    rows: tuple[Row, ...]
    rows_of_batch: int
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Row:
        """The configuration to take.

        Raises:
            PlanError: none fits.
        """
        if not self.fitting:
            least = min(
                (row for row in self.rows if row.taken_bytes), key=lambda row: row.taken_bytes, default=None
            )
            floor = (
                "nothing could be predicted"
                if least is None
                else f"the least is {least.family}: {least.rejected}"
            )
            raise PlanError(
                f"Nothing fits {self.budget} less {self.budget.headroom:.0%} headroom; {floor}. Train fewer of the "
                "parameters (adapters), a smaller model, shorter rows, or on more devices."
            )
        return self.rows[0]

    @property
    def fitting(self) -> tuple[Row, ...]:
        """The configurations that fit, the best first."""
        return tuple(row for row in self.rows if row.fits)

    def parts(self, row: Row | None = None) -> dict[str, list[Part]]:
        """The plugins and callbacks of a row, the best by default."""
        row = row or self.best
        plugins = [part for choice in row.family.choices for part in choice.plugins]
        callbacks = [part for choice in row.family.choices for part in choice.callbacks]
        return {"plugins": plugins, "callbacks": [*callbacks, *self._memory_budget(row)]}

    def trainer_kwargs(self, row: Row | None = None) -> dict[str, Any]:
        """The Trainer's arguments: `Trainer(**plan.trainer_kwargs())`; those that were given are among them."""
        kwargs = self._arguments(row or self.best)
        for kind, parts in self.parts(row).items():
            built = [getattr(lightning_memkit, part.name)(**part.options) for part in parts]
            kept = self.given.get(kind) or []
            kept = list(kept) if isinstance(kept, (list, tuple)) else [kept]
            if kept or built:
                kwargs[kind] = [*kept, *built]
        return kwargs

    def config(self, config: Mapping[str, Any] | None = None, row: Row | None = None) -> dict[str, Any]:
        """A LightningCLI config with the plan in its `trainer` section; what was there is kept.

        Args:
            config: the config that was planned for; without one the `trainer` section alone is made.
            row: another row than the best.
        """
        found: dict[str, Any] = copy.deepcopy(dict(config or {}))
        trainer = found.setdefault("trainer", {}) or {}
        for name, value in self._arguments(row or self.best).items():
            if name not in self.given:
                trainer[name] = value
        for kind, parts in self.parts(row).items():
            kept = trainer.get(kind) or []
            kept = kept if isinstance(kept, list) else [kept]
            entries = [*kept, *(part.as_yaml() for part in parts)]
            if entries:
                trainer[kind] = entries
        found["trainer"] = trainer
        return found

    def __str__(self) -> str:
        lines = [
            f"Budget {self.budget} less {self.budget.headroom:.0%}; a batch of {self.rows_of_batch} rows."
        ]
        fastest = min((row.seconds for row in self.fitting), default=1.0) or 1.0
        table = [("", "configuration", "micro-batch", "takes", "step", "changes")]
        for number, row in enumerate(self.fitting, 1):
            size = f"{row.micro_batch_size} x {row.parts}"
            table.append(
                (
                    str(number),
                    str(row.family),
                    size,
                    f"{'' if row.exact else '~'}{format_bytes(row.taken_bytes)}",
                    f"{row.seconds / fastest:.2f}",
                    row.family.changes or "nothing",
                )
            )
        lines += list(_aligned(table))
        rejected = [row for row in self.rows if not row.fits]
        if rejected:
            lines += ["", "Rejected:"]
            lines += [f"  {which}: {reason}" for reason, which in _by_reason(rejected).items()]
        lines += ["", *self.notes] if self.notes else []
        return "\n".join(line.rstrip() for line in lines)

    def _arguments(self, row: Row) -> dict[str, Any]:
        if any(isinstance(choice.arguments.get("strategy"), Sharding) for choice in row.family.choices):
            raise PlanError(
                f"{row.family} shards the module over ranks, which no strategy here does by itself yet: write "
                "configure_model with lightning_memkit.distributed.sharding.shard_blocks(self, "
                'self.device_mesh["data_parallel"], Sharding(stage=...)), and train with ModelParallelStrategy.'
            )
        arguments = {
            name: value for name, value in self.given.items() if name not in ("plugins", "callbacks")
        }
        for choice in row.family.choices:
            arguments.update(choice.arguments)
        return arguments

    def _memory_budget(self, row: Row) -> Iterator[Part]:
        """What keeps the plan while training; the user's own stays alone."""
        own = {type(callback).__name__ for callback in _listed(self.given.get("callbacks"))}
        if own & {"MemoryBudget", "GradientRelease"}:  # the latter takes steps that can't be repeated
            return
        size = self.budget.bytes()
        yield Part(
            name="MemoryBudget",
            options={
                "budget": f"{size // _MIB}MiB" if size % _MIB == 0 else size,
                "micro_batch_size": row.micro_batch_size,
                "headroom": self.budget.headroom,
            },
        )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _by_reason(rows: list[Row]) -> dict[str, str]:
    """Which configurations each reason is of, those of one precision said together."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.rejected, []).append(row)
    return {reason: _together(of) for reason, of in found.items()}


def _together(rows: list[Row]) -> str:
    """Precision by precision; the other choices where they are few."""
    said: dict[str, list[str]] = {}
    for row in rows:
        precision, *others = row.family.choices
        said.setdefault(precision.name, []).append(", ".join(choice.name for choice in others if choice.name))
    return "; ".join(
        f"{precision}, {' | '.join(others)}"
        if len(others) <= _NAMED_TOGETHER
        else f"{precision}, all {len(others)}"
        for precision, others in said.items()
    )


def _aligned(table: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
