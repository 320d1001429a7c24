"""The object that model layers receive in place of a mask; it raises if it is used as a tensor."""

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from lightning_memkit.attention.door import Backend
from lightning_memkit.attention.refusals import MAYBE_OWN_MASK, PackingRefusedError


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The documents of the current forward."""

    cu_seqlens: Tensor
    max_seqlen: int | None
    backend: Backend


class MaskUsedError(PackingRefusedError, AttributeError):
    """A model's own code uses the mask as a tensor; also an AttributeError, so that `hasattr` works."""


@dataclass(frozen=True, kw_only=True)
class PackedMask:
    """What layers receive in place of a mask: the documents, and what a token sees in its own one.

    Raises:
        MaskUsedError: a model's own code slices it, adds to it or reads its shape, so it needs a mask tensor,
            and there is none.
    """

    forward: Forward
    causal: bool
    window: int | None

    def _refuse(self, use: str) -> NoReturn:
        raise MaskUsedError(
            f"The model's own code uses its attention mask as a tensor ({use})",
            ", and packed documents have none: only the attention knows where they end.",
            MAYBE_OWN_MASK,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying, pickling and inspecting probe for private attributes
            raise AttributeError(name)
        self._refuse(f"mask.{name}")

    def __getitem__(self, index: Any) -> Any:
        self._refuse("mask[...]")

    def __len__(self) -> int:
        self._refuse("len(mask)")

    def __bool__(self) -> bool:
        self._refuse("bool(mask)")

    def __iter__(self) -> Any:
        self._refuse("iter(mask)")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a torch function that is called with the mask."""
        known = [*args, *(kwargs or {}).values()]
        mask = next(one for one in known if isinstance(one, cls))
        mask._refuse(f"torch's {getattr(func, '__name__', func)}")


def _operator(name: str) -> Any:
    def refused(self: PackedMask, *operands: Any) -> Any:
        self._refuse(f"mask.{name}")

    return refused


for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor"):
    setattr(PackedMask, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(PackedMask, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("invert", "neg", "lt", "le", "gt", "ge"):
    setattr(PackedMask, f"__{_name}__", _operator(f"__{_name}__"))
