"""Terms that are the columns of a vector of quotients: each task's mean over the rows that have it.

Of `((loss * mask).sum(0) / mask.sum(0)).mean()` a graph shows one sum and a vector that scales it. The vector may
be one over counts: then each column is read as a term with its own divisor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from lightning_memkit.micro_batching.graph.learned_rules import learned
from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.loss_terms import LossTerms
from lightning_memkit.micro_batching.graph.loss_walk import terms_of
from lightning_memkit.micro_batching.graph.origins import Key
from lightning_memkit.micro_batching.graph.term_names import has_columns


def terms_and_columns_of(loss: Tensor) -> LossTerms:
    """The terms of a loss, and those by column, if it has columns."""
    columns = terms_of(loss, by_column=True)
    if not has_columns(term.name for term in columns.terms):
        return columns
    return replace(terms_of(loss), by_column=columns)


def learned_columns(
    whole: LossTerms,
    parts: Sequence[LossTerms],
    dtype: torch.dtype = torch.float32,
    *,
    known: LossRules | None = None,
    looks: bool = True,
    parameters: Mapping[Key, str] = MappingProxyType({}),
) -> LossRules | str:
    """As `learned`, of terms that `terms_and_columns_of` has read by column."""
    columns = [seen.by_column for seen in (whole, *parts) if seen.by_column is not None]
    if len(columns) <= len(parts):
        return "a vector of quotients that not all micro-batches have"
    known = known if known is not None and known.by_column else None
    return learned(columns[0], columns[1:], dtype, known=known, looks=looks, parameters=parameters)
