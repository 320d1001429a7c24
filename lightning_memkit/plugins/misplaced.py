"""What stands among the callbacks of a Trainer and is none says where it belongs."""

from typing import ClassVar


class NoCallback:
    """A strategy or a plugin: Lightning asks each callback for its `state_key`, and gets an error with the place.

    Attributes:
        belongs: the Trainer's argument for it.
    """

    belongs: ClassVar[str] = "strategy"

    @property
    def state_key(self) -> str:
        """No callback's key.

        Raises:
            AttributeError: always, with where it belongs.
        """
        name = type(self).__name__
        raise AttributeError(
            f"{name} stands among the callbacks, and is none; write Trainer({self.belongs}={name}(...))."
        )
