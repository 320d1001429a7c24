"""Configurations for rows of which none fits: modules that take tokens one by one run in chunks of tokens."""

from collections.abc import Sequence

from lightning_memkit.memory.sizing import chunk_sizes
from lightning_memkit.planning.problem import Problem, Row, UnavailableError

_MOST_TRIED = 4  # configurations, the smallest ones
_HARDLY_LESS = 0.99


def long_rows(rows: Sequence[Row], problem: Problem) -> list[Row]:
    """Those that fit with the most tokens in a chunk that do, as `MemoryBudget` runs them; costs some predictions.

    Args:
        rows: the configurations, of which none fits.
        problem: the search problem.
    """
    least = min(problem.sizes)
    tried = [
        row
        for row in rows
        # A step within backward has no MemoryBudget.
        if least in (row.micro_batch_size, row.chunks.rows) and row.prediction is not None
        if not row.family.is_released
        if problem.floor(row.family) <= problem.usable_bytes
    ]
    found: list[Row] = []
    for row in sorted(tried, key=lambda one: one.taken_bytes)[:_MOST_TRIED]:
        try:
            fitting = _largest_fitting(row, least, problem)
        except UnavailableError:  # no module takes tokens one by one
            return []
        if fitting is None:  # nor will what takes more
            break
        found.append(fitting)
    return found


def _largest_fitting(row: Row, least: int, problem: Problem) -> Row | None:
    """From large chunks to small ones, each of which is predicted; no further where they hardly take less."""
    taken = row.taken_bytes
    for tokens in reversed(chunk_sizes(problem.tokens) if problem.tokens > 1 else ()):
        found = problem.row(row.family, least, tokens)
        if found.fits:
            return found
        if found.taken_bytes > _HARDLY_LESS * taken:
            break
        taken = found.taken_bytes
    return None
