"""How fast training goes, from one line of the report to the next."""

from time import perf_counter
from typing import Any

from lightning_memkit.micro_batching import SplitError, batch_size


class Rates:
    """Tokens or samples a second, real tokens and loader stall since the last line."""

    def __init__(self) -> None:
        self._since, self._waited_before = perf_counter(), 0.0
        self._tokens = self._real = self._samples = 0

    def count(self, batch: Any) -> None:
        """Add a batch: its tokens where it is packed, else its samples."""
        real = getattr(batch, "real_tokens", None)
        if real is not None:
            self._real += int(real)
            self._tokens += batch["input_ids"].numel()
            return
        try:
            self._samples += batch_size(batch)
        except SplitError:
            self._samples += 1

    def take(self, waited: float) -> dict[str, float]:
        """The rates since the last call, by the names they are logged under; `waited` as counted from the start."""
        now = perf_counter()
        seconds = max(now - self._since, 1e-9)
        values = {"loader_stall": min(1.0, (waited - self._waited_before) / seconds)}
        if self._tokens:
            values["tokens_per_second"] = self._real / seconds
            values["real_tokens"] = self._real / self._tokens
        if self._samples:
            values["samples_per_second"] = self._samples / seconds
        self.restart(waited, now)
        return values

    def restart(self, waited: float, now: float | None = None) -> None:
        """Count anew from here; what came in between is not training."""
        self._since, self._waited_before = perf_counter() if now is None else now, waited
        self._tokens = self._real = self._samples = 0
