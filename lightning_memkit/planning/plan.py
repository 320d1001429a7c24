"""A plan: configurations for a budget, ranked; as a table, as Trainer arguments and as a config."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning_memkit
from lightning_memkit.distributed.sharding import Sharding
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.planning.budget import Budget
from lightning_memkit.planning.choices import GIVEN, PluginSpec, listed
from lightning_memkit.planning.problem import Row
from lightning_memkit.utilities.columns import aligned, wrapped
from lightning_memkit.utilities.errors import PlanError

_MIB = 1 << 20
_NAMED_TOGETHER = 4  # the most configurations listed by name for one precision and reason


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The configurations that were considered for a budget; the first is the one to use.

    Attributes:
        budget: the budget.
        rows: those that fit, the best first; then those that were rejected, with the reason.
        rows_of_batch: samples in the loader's batch.
        given: the Trainer arguments that were given, which are kept.
        notes: what was not considered or is assumed, and why.
        unavailable: the columns in which nothing can be chosen here, with the reason.
        hint: what else would take less memory, if nothing fits.
    """

    budget: Budget
    rows: tuple[Row, ...]
    rows_of_batch: int
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    hint: str = ""

    @property
    def best(self) -> Row:
        """The configuration to use.

        Raises:
            PlanError: none fits.
        """
        if not self.fitting:
            raise PlanError(self.refusal + (f" {self.hint}" if self.hint else ""))
        return self.rows[0]

    @property
    def refusal(self) -> str:
        """Where nothing fits: the nearest miss, and what would take less."""
        return f"{self.answer} Train adapters, a smaller model, shorter rows, or on more devices."

    @property
    def fitting(self) -> tuple[Row, ...]:
        """The configurations that fit, the best first."""
        return tuple(row for row in self.rows if row.fits)

    def parts(self, row: Row | None = None) -> dict[str, list[PluginSpec]]:
        """The plugins and callbacks of a row, by default of the best."""
        row = row or self.best
        plugins = [part for choice in row.family.choices for part in choice.plugins]
        callbacks = [part for choice in row.family.choices for part in choice.callbacks]
        return {"plugins": plugins, "callbacks": [*callbacks, *self._memory_budget(row)]}

    def trainer_kwargs(self, row: Row | None = None) -> dict[str, Any]:
        """The Trainer's arguments for `Trainer(**plan.trainer_kwargs())`, including those that were given.

        Raises:
            PlanError: nothing fits, or Trainer arguments alone can't express the plan: the message says what
                to write.
        """
        row = row or self.best
        if row.family.optimizer is not None:
            raise PlanError(_write_the_optimizer(row))
        kwargs = {name: _built(value) for name, value in self._arguments(row).items()}
        for kind, parts in self.parts(row).items():
            built = [_built(part) for part in parts]
            kept = listed(self.given.get(kind))
            if kept or built:
                kwargs[kind] = [*kept, *built]
        return kwargs

    def config(self, config: Mapping[str, Any] | None = None, row: Row | None = None) -> dict[str, Any]:
        """A LightningCLI config with the plan in its `trainer` section; existing entries are kept.

        Args:
            config: the config that was planned for; without one only a `trainer` section is made. Its
                `optimizer` section changes only with 8-bit states, which are planned only on request.
            row: another row than the best.

        Raises:
            PlanError: nothing fits, or a config alone can't express the plan: the message says what to write.
        """
        row = row or self.best
        found: dict[str, Any] = copy.deepcopy(dict(config or {}))
        if row.family.optimizer is not None:
            found["optimizer"] = _optimizer_section(row, found.get("optimizer"))
        trainer = found.setdefault("trainer", {}) or {}
        for name, value in self._arguments(row).items():
            if name not in self.given:
                trainer[name] = value.as_yaml() if isinstance(value, PluginSpec) else value
        for kind, parts in self.parts(row).items():
            kept = trainer.get(kind) or []
            kept = kept if isinstance(kept, list) else [kept]
            entries = [*kept, *(part.as_yaml() for part in parts)]
            if entries:
                trainer[kind] = entries
        found["trainer"] = trainer
        return found

    @property
    def answer(self) -> str:
        """The best configuration as a sentence; where nothing fits, the nearest miss."""
        headroom = f"{self.budget.headroom:.0%} headroom"
        if self.fitting:
            row = self.best
            changes = f" It changes: {row.family.changes}." if row.family.changes else ""
            taken, usable = format_bytes(row.taken_bytes), format_bytes(self.budget.usable_bytes())
            return f"{row.words}: {taken} of the {usable} that {headroom} leaves of {self.budget}.{changes}"
        nearest = self._nearest_miss
        miss = "" if nearest is None else f" The nearest is {nearest.words}: {self._missed(nearest)}."
        return f"Nothing fits {self.budget} less {self.budget.headroom:.0%} headroom.{miss}"

    def __str__(self) -> str:
        return "\n\n".join(filter(None, ("\n".join(wrapped(self.answer)), self.beside_answer())))

    def beside_answer(self) -> str:
        """What follows the answer: the table of what fits, what was rejected, and notes."""
        rejected = [line for said in self._rejections() for line in wrapped(f"  {said}", indent=2)]
        notes = [line for note in self._notes() for line in wrapped(note)]
        paragraphs = self._table(), ["Rejected:", *rejected] if rejected else [], notes
        said = ("\n".join(line.rstrip() for line in lines) for lines in paragraphs)
        return "\n\n".join(paragraph for paragraph in said if paragraph)

    def _notes(self) -> Iterator[str]:
        yield from self.notes
        if self.unavailable:
            yield f"No choice of {', '.join(self.unavailable)} here: reasons() (memkit plan --explain) says why."
        if self.hint:
            yield self.hint

    def reasons(self) -> str:
        """Each reason against a configuration, with those that it stands against; and against choices of a column."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            if not row.fits:
                found.setdefault(row.rejected, []).append(row)
        lines = [f"{_together(rows)}: {reason}" for reason, rows in found.items()]
        return "\n".join(
            [*lines, *(f"No choice of {column} here: {why}" for column, why in self.unavailable.items())]
        )

    def _table(self) -> list[str]:
        fastest = min((row.seconds for row in self.fitting), default=1.0) or 1.0
        table = [("", "configuration", "of the batch", "memory", "time", "changes")]
        for number, row in enumerate(self.fitting, 1):
            table.append(
                (
                    str(number),
                    str(row.family),
                    row.amount,
                    f"{'' if row.exact else '~'}{format_bytes(row.taken_bytes)}",
                    f"{row.seconds / fastest:.2f}",
                    row.family.changes or "nothing",
                )
            )
        return aligned(table).splitlines() if self.fitting else []

    def _rejections(self) -> Iterator[str]:
        """A line for each kind of reason, with the nearest miss; of what is impossible one for each reason.

        Where nothing fits, the answer has named the nearest miss.
        """
        kinds: dict[Any, list[Row]] = {}
        for row in self.rows:
            if not row.fits:
                kind = row.rejected if row.rejected_as == "impossible" else row.rejected_as
                kinds.setdefault(kind, []).append(row)
        for kind, rows in kinds.items():
            if kind == "too large":
                nearest = self._nearest_miss
                miss = rows[0].rejected
                if nearest is not None:
                    miss = f"the nearest is {nearest.words}: {self._missed(nearest)}" if self.fitting else ""
                yield f"{len(rows)} too large{'; ' * bool(miss)}{miss}"
            elif kind == "not needed":
                less = "takes less" if self.budget.goal == "memory" else "computes less"
                yield f"{len(rows)} not needed: what fits above {less}"
            else:
                yield f"{len(rows)} impossible: {kind}"

    @property
    def _nearest_miss(self) -> Row | None:
        """Of what is too large, the predicted configuration that takes the least."""
        missed = [row for row in self.rows if row.rejected_as == "too large" and row.taken_bytes]
        return min(missed, key=lambda row: row.taken_bytes, default=None)

    def _missed(self, row: Row) -> str:
        over = row.taken_bytes - self.budget.usable_bytes()
        return f"{format_bytes(row.taken_bytes)}, {format_bytes(over)} too much ({row.largest})"

    def _arguments(self, row: Row) -> dict[str, Any]:
        """The Trainer's arguments without plugins and callbacks; memkit's strategies are `PluginSpec`s."""
        arguments = {
            name: value for name, value in self.given.items() if name not in ("plugins", "callbacks")
        }
        for choice in row.family.choices:
            arguments.update(choice.arguments)
        sharding = arguments.get("strategy")
        if isinstance(sharding, Sharding):
            options = {"stage": sharding.stage, **({"cpu_offload": True} if sharding.cpu_offload else {})}
            arguments["strategy"] = PluginSpec(name="FSDP2Strategy", options=options)
        return arguments

    def _memory_budget(self, row: Row) -> Iterator[PluginSpec]:
        """The MemoryBudget that enforces the plan while training; none if the user has one."""
        own = {type(callback).__name__ for callback in listed(self.given.get("callbacks"))}
        # None with released gradients either: its trial keeps all gradients alive, and a step within backward
        # can't be retried.
        if "MemoryBudget" in own or row.family.is_released:
            return
        size = self.budget.bytes()
        yield PluginSpec(
            name="MemoryBudget",
            options={
                "budget": f"{size // _MIB}MiB" if size % _MIB == 0 else size,
                "micro_batch_size": row.micro_batch_size,
                "headroom": self.budget.headroom,
            },
        )


def _built(value: Any) -> Any:
    return getattr(lightning_memkit, value.name)(**value.options) if isinstance(value, PluginSpec) else value


def _write_the_optimizer(row: Row) -> str:
    instead = row.family.optimizer
    assert instead is not None
    return (
        f"{row.family} takes bitsandbytes' optimizer, and the optimizer is the module's: write `{instead.line}` in "
        f"configure_optimizers in the place of {instead.replaces}, import bitsandbytes, and plan again."
    )


def _optimizer_section(row: Row, section: Any) -> dict[str, Any]:
    """The config's optimizer with 8-bit states."""
    instead = row.family.optimizer
    named = section.get("class_path", "") if isinstance(section, Mapping) else ""
    if instead is None or named.rpartition(".")[2] != instead.replaces:
        raise PlanError(_write_the_optimizer(row))
    return instead.as_yaml(section)


def _together(rows: list[Row]) -> str:
    """Configurations by name, those of a precision together; only counted if they are many."""
    said: dict[str, list[str]] = {}
    for row in rows:
        precision, *others = row.family.words or [GIVEN]
        said.setdefault(precision, []).append(", ".join(others) or "nothing else")
    return "; ".join(
        f"{precision}, {' | '.join(others)}"
        if len(others) <= _NAMED_TOGETHER
        else f"{precision}, {len(others)} configurations"
        for precision, others in said.items()
    )
