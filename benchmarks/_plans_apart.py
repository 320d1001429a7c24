"""One plan or prediction in a process of its own: its processor time, and the bytes that it predicts."""

import json
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any


def as_given() -> dict[str, Any]:
    """A precision, a policy and a loss, so that offload and release are left to choose."""
    from lightning_memkit import ActivationCheckpointing, ChunkedLoss, PureBF16Precision

    return {"plugins": PureBF16Precision(), "callbacks": [ActivationCheckpointing("full"), ChunkedLoss()]}


def planned(shape: str, rows: int, budget: tuple[str, str], given: dict[str, Any]) -> list[int]:
    """The bytes of every configuration that was predicted."""
    from benchmarks.planning import ids_and_labels
    from benchmarks.prediction_ranks import Llama
    from lightning_memkit import Budget, plan

    found = plan(partial(Llama, shape), ids_and_labels(rows), Budget(*budget), trainer=given)
    return [row.taken_bytes for row in found.rows if row.taken_bytes]


def predicted() -> list[int]:
    """The bytes of one step of 8 billion parameters."""
    from benchmarks.planning import ids_and_labels
    from benchmarks.prediction_ranks import Llama
    from lightning_memkit import predict_memory

    made = predict_memory(partial(Llama, "8b"), ids_and_labels(1), trainer=as_given(), device="rtx4090")
    return [made.total_bytes, made.peak_bytes, made.host_bytes]


CASES: dict[str, Callable[[], list[int]]] = {
    "100m": lambda: planned("100m", 8, ("24GiB", "rtx4090"), as_given()),
    "8b": lambda: planned("8b", 1, ("24GiB", "rtx4090"), as_given()),
    "1b_open": lambda: planned("1b", 8, ("16GiB", "rtx4090"), {}),
    "70b_on_64": lambda: planned(
        "70b", 8, ("auto", "h100-80gb"), {**as_given(), "devices": 8, "num_nodes": 8}
    ),
    "predict_8b": predicted,
}


@contextmanager
def without_shortcuts() -> Iterator[None]:
    """Within the context, predictions run every chunk and every slice."""
    from lightning_memkit.prediction import few_chunks, simulation
    from lightning_memkit.prediction.replaced import replaced

    with ExitStack() as stack:
        stack.enter_context(replaced(few_chunks, _RUN=sys.maxsize))
        stack.enter_context(replaced(simulation, few_slices=lambda most: nullcontext()))
        yield


def main(name: str, *whole: str) -> None:
    """One case, in this process."""
    warnings.simplefilter("ignore")
    with without_shortcuts() if whole else nullcontext():
        found = CASES[name]()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(one.ru_utime + one.ru_stime for one in used)
    print(json.dumps({"cpu_seconds": round(seconds, 2), "bytes": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
