"""Helpful errors for what can't be predicted: checks before the steps, and translations of torch's errors."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from lightning_memkit.utilities.errors import PredictionError
from lightning_memkit.utilities.tensors import tensors_of

_NO_FAKE_KERNEL = re.compile(r"no fake impl registered for .*?\(?([\w.]+::[\w.]+)")
_OF_THE_TRAINER = re.compile(r"\b(trainer|logger|loggers|datamodule|experiment)\b")


def check_batch(batch: Any) -> None:
    """Refuse tensors for which no fake twin can be made.

    Raises:
        ValueError: one is sparse, nested or quantized.
    """
    for tensor in tensors_of(batch):
        if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized):
            continue
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ValueError(
            f"The batch holds a tensor that is {kind}, and predictions run on dense ones: give what the step computes "
            "with, such as .to_dense(), torch.nested.to_padded_tensor or .dequantize()."
        )


@contextmanager
def explained() -> Iterator[None]:
    """Translate torch's errors about fake tensors without values or shapes into helpful ones."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise PredictionError(
            f"The step asks {error.func} for what only values tell. Compute it from the batch's integers, or leave it "
            "out of the step that is predicted."
        ) from error
    except (AttributeError, TypeError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        if "NoneType" not in str(error) or not _OF_THE_TRAINER.search(where.line or ""):
            raise
        raise PredictionError(
            f"The step asks for what only the Trainer that trains has, and a prediction's has none of: datamodule, "
            f"loggers, loaders ({error}; {where.filename}:{where.lineno}: {where.line}). Keep it in the module "
            "(self.scale = ...), or ask only where it is there."
        ) from error
    except (UnsupportedOperatorException, RuntimeError) as error:
        found = _NO_FAKE_KERNEL.search(str(error))
        name = error.func if isinstance(error, UnsupportedOperatorException) else found and found[1]
        if name is None:
            raise
        raise PredictionError(
            f"torch can't tell the shape of what {name} gives: it has no fake kernel. Register one with "
            "torch.library.register_fake, or predict a module that does without."
        ) from error
