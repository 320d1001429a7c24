"""What a plan may choose, column by column: each choice as the Trainer's arguments, as data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from lightning_memkit.distributed.sharding import Sharding
from lightning_memkit.prediction.devices import Device

COLUMNS = ("precision", "ranks", "offload", "checkpointing", "loss")
GIVEN, DDP = "as given", "DDP"
STATES, ACTIVATIONS = "states on the host", "activations on the host"
_STAGE_2, _STAGE_3 = "FSDP2 stage 2", "FSDP2 stage 3"
# What does all that a choice does, and more.
_HEAVIER = {
    "none": ("selective", "every:2", "full"),
    "selective": ("full",),
    "every:2": ("full",),
    "own": ("chunked",),
    "": (STATES, ACTIVATIONS),
    DDP: (_STAGE_2, _STAGE_3),
    _STAGE_2: (_STAGE_3,),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A plugin or callback, as LightningCLI writes it."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def as_yaml(self) -> dict[str, Any]:
        """Its entry in a config."""
        entry: dict[str, Any] = {"class_path": f"lightning_memkit.{self.name}"}
        return {**entry, "init_args": dict(self.options)} if self.options else entry


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """One value of a column.

    Attributes:
        column: of `COLUMNS`.
        name: in the table.
        changes: what it changes in the numbers; empty where results are the same up to the order of sums.
        arguments: of the Trainer.
        plugins: of the Trainer.
        callbacks: of the Trainer.
    """

    column: str
    name: str
    changes: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[Part, ...] = ()
    callbacks: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Family:
    """One choice of each column; a micro-batch makes a configuration of it."""

    choices: tuple[Choice, ...]

    def __getitem__(self, column: str) -> Choice:
        return next(choice for choice in self.choices if choice.column == column)

    @property
    def changes(self) -> str:
        """What it changes in the numbers; empty where it changes nothing."""
        return ", ".join(choice.changes for choice in self.choices if choice.changes)

    def __str__(self) -> str:
        return ", ".join(choice.name for choice in self.choices if choice.name)


def precisions(device: Device | None) -> tuple[Choice, ...]:
    """From the user's default downwards; a device without bfloat16 has its mixed precision in float16."""
    full = Choice(column="precision", name="float32", arguments={"precision": "32-true"})
    if device is not None and not device.has_bfloat16:
        mixed = Choice(
            column="precision",
            name="mixed float16",
            changes="float16 arithmetic",
            arguments={"precision": "16-mixed"},
        )
        return full, mixed
    return (
        full,
        Choice(
            column="precision",
            name="mixed bfloat16",
            changes="bfloat16 arithmetic",
            arguments={"precision": "bf16-mixed"},
        ),
        Choice(
            column="precision",
            name="bfloat16, exact sums",
            changes="bfloat16 arithmetic and gradients",
            plugins=(Part(name="PureBF16Precision", options={"compensation": "split", "states": "exact"}),),
        ),
        Choice(
            column="precision",
            name="bfloat16, Kahan",
            changes="bfloat16 arithmetic, gradients and states",
            plugins=(Part(name="PureBF16Precision", options={"compensation": "kahan", "states": "compact"}),),
        ),
    )


def shardings() -> tuple[Choice, ...]:
    """How many ranks share what is trained, from what sends the least to what keeps the least."""
    return (
        Choice(column="ranks", name=DDP, arguments={"strategy": "ddp"}),
        Choice(column="ranks", name=_STAGE_2, arguments={"strategy": Sharding(stage=2)}),
        Choice(column="ranks", name=_STAGE_3, arguments={"strategy": Sharding(stage=3)}),
    )


def offloads(device: Device | None) -> tuple[Choice, ...]:
    """What is kept in the host's memory, from nothing on; on the CPU everything is there."""
    found = [Choice(column="offload", name="")]
    if device is not None:
        found.append(Choice(column="offload", name=ACTIVATIONS, callbacks=(Part(name="ActivationOffload"),)))
        found.append(Choice(column="offload", name=STATES, callbacks=(Part(name="OptimizerOffload"),)))
    return tuple(found)


def checkpointings() -> tuple[Choice, ...]:
    """From none to what saves the most."""
    found = [Choice(column="checkpointing", name="none")]
    for policy in ("selective", "every:2", "full"):
        part = Part(name="ActivationCheckpointing", options={"policy": policy})
        found.append(Choice(column="checkpointing", name=policy, callbacks=(part,)))
    return tuple(found)


def losses() -> tuple[Choice, ...]:
    """The module's own loss, and the same without its logits."""
    return (
        Choice(column="loss", name="own"),
        Choice(
            column="loss",
            name="chunked",
            changes="the loss in float32",
            callbacks=(Part(name="ChunkedLoss"),),
        ),
    )


def families(columns: Mapping[str, tuple[Choice, ...]]) -> Iterator[Family]:
    """All combinations; within a precision from the one that computes the least to the one that keeps the least."""
    for chosen in product(*(columns[column] for column in COLUMNS)):
        yield Family(chosen)


def is_lighter(one: Family, other: Family) -> bool:
    """Whether one computes and sends nothing that the other does not, of the same precision."""
    if one["precision"] is not other["precision"]:
        return False
    pairs = [(one[column].name, other[column].name) for column in COLUMNS]
    return all(first == second or second in _HEAVIER.get(first, ()) for first, second in pairs)
