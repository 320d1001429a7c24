"""What a plan may choose, by column; each choice gives Trainer arguments as plain data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from lightning_memkit.distributed.sharding import Sharding
from lightning_memkit.planning.eight_bit import EightBit
from lightning_memkit.prediction.devices import Device

COLUMNS = ("precision", "ranks", "offload", "gradients", "states", "checkpointing", "loss")
GIVEN, DDP = "as given", "DDP"
STATES, ACTIVATIONS = "states on the host", "activations on the host"
STATES_AND_ACTIVATIONS = "states and activations on the host"
RELEASED, EIGHT_BIT = "gradients released", "8-bit states"
ON_HOST = "FSDP2 stage 3 with shards on the host"
_STAGE_2, _STAGE_3, _MIXED_16 = "FSDP2 stage 2", "FSDP2 stage 3", "mixed float16"
_SEVEN_BYTES = "bfloat16, 24 bits"
# By choice, those that do at least as much work. An 8-bit step moves fewer bytes, but counts as heavier: its
# rounding is not needed if everything fits without it.
_HEAVIER = {
    "none": ("selective", "every:2", "full"),
    "selective": ("full",),
    "every:2": ("full",),
    "own": ("chunked",),
    "": (STATES, ACTIVATIONS, STATES_AND_ACTIVATIONS, RELEASED, EIGHT_BIT),
    STATES: (STATES_AND_ACTIVATIONS,),
    ACTIVATIONS: (STATES_AND_ACTIVATIONS,),
    DDP: (_STAGE_2, _STAGE_3, ON_HOST),
    _STAGE_2: (_STAGE_3, ON_HOST),
    _STAGE_3: (ON_HOST,),
}


def listed(value: Any) -> list[Any]:
    """A Trainer argument that may be one value or several, as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


@dataclass(frozen=True, kw_only=True, eq=False)
class PluginSpec:
    """A plugin or callback as LightningCLI writes it."""

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
        column: one of `COLUMNS`.
        name: what it is asked for by.
        words: what the table says; None for its name, empty if it does nothing.
        changes: what it changes numerically; empty if results are the same up to the order of sums.
        arguments: Trainer arguments.
        plugins: Trainer plugins.
        callbacks: Trainer callbacks.
        optimizer: replaces the module's own.
        shards: whether each rank holds only a shard of the weights.
    """

    column: str
    name: str
    changes: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[PluginSpec, ...] = ()
    callbacks: tuple[PluginSpec, ...] = ()
    optimizer: EightBit | None = None
    shards: bool = False
    words: str | None = None


@dataclass(frozen=True)
class Family:
    """One choice for each column; together with a micro-batch it is a configuration."""

    choices: tuple[Choice, ...]

    def __getitem__(self, column: str) -> Choice:
        return next(choice for choice in self.choices if choice.column == column)

    @property
    def changes(self) -> str:
        """What it changes numerically; empty if nothing."""
        return ", ".join(choice.changes for choice in self.choices if choice.changes)

    @property
    def is_released(self) -> bool:
        """Whether the optimizer steps within the backward, which needs the whole batch at once."""
        return self["gradients"].name in (RELEASED, GIVEN)

    @property
    def optimizer(self) -> EightBit | None:
        """The optimizer that replaces the module's own; None if that stays."""
        return self["states"].optimizer

    @property
    def words(self) -> list[str]:
        """What it does, as the table says it; nothing of what does nothing, or was given."""
        said = [choice.name if choice.words is None else choice.words for choice in self.choices]
        return [words for words in said if words not in ("", GIVEN)]

    def __str__(self) -> str:
        return ", ".join(self.words) or GIVEN


def precisions(device: Device | None, *, states_open: bool = False) -> tuple[Choice, ...]:
    """Choices from the user's default downwards; without bfloat16, mixed precision is in float16.

    Args:
        device: which will train; None for the CPU.
        states_open: whether the optimizer's states may take 8 bits.
    """
    full = Choice(column="precision", name="float32", arguments={"precision": "32-true"})
    if device is not None and not device.has_bfloat16:
        mixed = Choice(
            column="precision",
            name=_MIXED_16,
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
            words="bfloat16 with exact sums",
            changes="bfloat16 arithmetic and gradients",
            plugins=(
                PluginSpec(name="PureBF16Precision", options={"compensation": "split", "states": "exact"}),
            ),
        ),
        Choice(
            column="precision",
            name="bfloat16, Kahan",
            words="bfloat16 with Kahan summation",
            changes="bfloat16 arithmetic, gradients and states",
            plugins=(
                PluginSpec(name="PureBF16Precision", options={"compensation": "kahan", "states": "compact"}),
            ),
        ),
        *((seven_bytes(),) if states_open else ()),
    )


def seven_bytes() -> Choice:
    """The precision that takes least: seven bytes a parameter, of which states have two."""
    return Choice(
        column="precision",
        name=_SEVEN_BYTES,
        words="bfloat16 with 24 bits and 8-bit states",
        changes="bfloat16 arithmetic and gradients, states in 8 bits",
        plugins=(
            PluginSpec(name="PureBF16Precision", options={"compensation": "split24", "states": "8-bit"}),
        ),
    )


def shardings(device: Device | None) -> tuple[Choice, ...]:
    """Ways to distribute training over ranks, from the least communication to the least memory of the device."""
    on_host = Sharding(stage=3, cpu_offload=True)
    found = (
        Choice(column="ranks", name=DDP, arguments={"strategy": "ddp"}),
        Choice(column="ranks", name=_STAGE_2, arguments={"strategy": Sharding(stage=2)}, shards=True),
        Choice(column="ranks", name=_STAGE_3, arguments={"strategy": Sharding(stage=3)}, shards=True),
    )
    if device is None:
        return found
    return (*found, Choice(column="ranks", name=ON_HOST, arguments={"strategy": on_host}, shards=True))


def offloads(device: Device | None) -> tuple[Choice, ...]:
    """What may be kept in host memory, from nothing on; on the CPU everything is there already."""
    plain = Choice(column="offload", name="")
    if device is None:
        return (plain,)
    states, activations = PluginSpec(name="OptimizerOffload"), PluginSpec(name="ActivationOffload")
    return (
        plain,
        Choice(column="offload", name=ACTIVATIONS, callbacks=(activations,)),
        Choice(column="offload", name=STATES, callbacks=(states,)),
        Choice(column="offload", name=STATES_AND_ACTIVATIONS, callbacks=(states, activations)),
    )


def releases() -> tuple[Choice, ...]:
    """Gradients that wait for the optimizer step, or are released within the backward."""
    return (
        Choice(column="gradients", name=""),
        Choice(column="gradients", name=RELEASED, callbacks=(PluginSpec(name="GradientRelease"),)),
    )


def optimizer_states(instead: EightBit) -> tuple[Choice, ...]:
    """The optimizer's own states, or 8-bit ones with one byte a moment."""
    return (
        Choice(column="states", name=""),
        Choice(column="states", name=EIGHT_BIT, changes="states in 8 bits", optimizer=instead),
    )


def checkpointings() -> tuple[Choice, ...]:
    """Activation checkpointing policies, from none to the one that saves most memory."""
    found = [Choice(column="checkpointing", name="none", words="")]
    said = {"every:2": "every second block checkpointed"}
    for policy in ("selective", "every:2", "full"):
        part = PluginSpec(name="ActivationCheckpointing", options={"policy": policy})
        words = said.get(policy, f"{policy} checkpointing")
        found.append(Choice(column="checkpointing", name=policy, callbacks=(part,), words=words))
    return tuple(found)


def losses() -> tuple[Choice, ...]:
    """The module's own loss, or the same without logits."""
    return (
        Choice(column="loss", name="own", words=""),
        Choice(
            column="loss",
            name="chunked",
            words="the loss without logits",
            changes="the loss in float32",
            callbacks=(PluginSpec(name="ChunkedLoss"),),
        ),
    )


def families(columns: Mapping[str, tuple[Choice, ...]]) -> Iterator[Family]:
    """All combinations; within a precision from the least computation to the least memory."""
    choices = ({column: (Choice(column=column, name=""),) for column in COLUMNS}) | dict(columns)
    for chosen in product(*(choices[column] for column in COLUMNS)):
        yield Family(chosen)


def refusal(family: Family) -> str:
    """Why two of its choices can't be combined; empty if they can."""
    shards = family["ranks"].shards
    released = family["gradients"].name == RELEASED
    if released and family["ranks"].name == DDP:
        return "DDP reduces gradients after the hooks that would step on them"
    if released and family["precision"].name == _MIXED_16:
        return "float16's scaler looks for overflows in all gradients before the step"
    if family["ranks"].name == ON_HOST and released:
        return "the backward would wait for each step of the host, where the shards are"
    if shards and family["offload"].name in (STATES, STATES_AND_ACTIVATIONS):
        return "states of sharded parameters can't be offloaded here"
    if family["precision"].name == _SEVEN_BYTES and family["states"].name == EIGHT_BIT:
        return "its precision keeps states in 8 bits already"
    if shards and family["states"].name == EIGHT_BIT:
        return "bitsandbytes steps whole tensors, and FSDP2 shards them"
    return ""


def is_lighter(one: Family, other: Family) -> bool:
    """Whether one family computes and sends nothing that the other does not, at the same precision."""
    if one["precision"] is not other["precision"]:
        return False
    pairs = [(one[column].name, other[column].name) for column in COLUMNS]
    return all(first == second or second in _HEAVIER.get(first, ()) for first, second in pairs)
