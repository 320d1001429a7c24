"""What the engine knows of a batch of a validation, test or prediction loop."""

from typing import Any, Protocol


class EvaluationStep(Protocol):
    """One batch of an evaluation loop, as operations that may run several times.

    Attributes:
        hook: the name of the user's step: `validation_step`, `test_step` or `predict_step`.
        batch: the batch as it comes from the loader, on the host.
        given: what the loop gets: the batch on the host, or on the device.
        dataloader_idx: the index of its loader.
        starts_run: this is the first batch that the loop reads.
    """

    hook: str
    batch: Any
    given: Any
    dataloader_idx: int
    starts_run: bool

    @property
    def outputs_kept(self) -> float:
        """How many batches' outputs the loop keeps of this loader; 0 if none, or if it has begun to."""
        ...

    def transfer(self, micro_batch: Any, /) -> Any:
        """A micro-batch on the device."""
        ...

    def whole(self) -> Any:
        """The unsplit batch on the device."""
        ...

    def forward(self, micro_batch: Any, /) -> Any:
        """The user's step on a micro-batch that is on the device."""
        ...
