"""Packing from lengths to rows: seconds, fullness and memory, against TRL's best-fit packer.

TRL's side is the search in its packer, unchanged: one document after another, with a segment tree. The moving
of tokens around it in `trl.pack_dataset` is left out on both sides. `speedup_vs_trl` is of the largest
size (1 million documents with `--quick`, else 10 million) and its slower context, `speedup_vs_trl_low` the
lower end of its interval; `over_bound_pct` is the worst of that size.

Beside best fit over all documents stand `packing="stream"`, best fit in windows of 512 rows, and next fit, the
oldest packer of streams: its rows take documents in their order until the next one does not fit.
`stream_efficiency_pct` is the worst of the random sets; the standard library is two to eight windows.

Rows are then dealt to 8 ranks by attention work and at random. `rank_imbalance` is the work of the rank with the
most over the mean of the ranks, `waiting_pct` what the ranks' waiting for each other adds to the time of all
steps: both in batches of one row a rank, the worst of the sets.
"""

import inspect
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.__main__ import main_of
from benchmarks.harness import MINIMUM_PAIRS, Options, Report, paired_ratio, self_ratio_is_void
from lightning_memkit.data.batching.dealing import Balance, Deal, DealOptions, deal_rows
from lightning_memkit.data.packing.pack import Packing, pack
from lightning_memkit.data.sources.corpus import Corpus
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.memory.units import format_bytes

CONTEXTS = (2048, 8192)
RANKS = 8
LONG_PAIRS = 3  # of steps that take TRL many seconds


@dataclass(frozen=True)
class Documents:
    """A set of documents, by their lengths."""

    name: str
    lengths: NDArray[np.int64]
    context: int


@dataclass(frozen=True)
class Result:
    """What one set gave."""

    speedup: float
    speedup_low: float
    over_bound_pct: float
    rows_over_bound: int
    same_rows: bool
    stream_efficiency_pct: float
    balance: Balance
    balance_at_random: Balance
    line: dict[str, object]


def run(options: Options) -> Report:
    """Packs the standard library and lognormal lengths; TRL packs the same."""
    sizes = (10**6,) if options.quick else (10**6, 10**7)
    functions = Corpus(tokenizer_name="bytes", options=DocumentOptions()).read("python-stdlib").lengths
    library = [Documents("standard library", split(functions, context), context) for context in CONTEXTS]
    random = [lognormal(size, context, options.seed) for size in sizes for context in CONTEXTS]
    results = [compared(documents, options.seed) for documents in (*library, *random)]
    largest = results[-len(CONTEXTS) :]
    itself = paired_ratio(*[lambda: packed(random[0])] * 2, seed=options.seed)
    sides = ("packed", "streamed", "trl_rows")
    ours_peak, stream_peak, trl_peak = (peak_rss_bytes(side, sizes[-1], options.seed) for side in sides)
    dealt = [result.balance for result in results]
    at_random = [result.balance_at_random for result in results]
    return Report(
        name="packing",
        figures={
            "speedup_vs_trl": min(result.speedup for result in largest),
            "speedup_vs_trl_low": min(result.speedup_low for result in largest),
            "over_bound_pct": max(result.over_bound_pct for result in largest),
            "same_rows": all(result.same_rows for result in results),
            "documents": sizes[-1],
            "library_rows_over_bound": max(result.rows_over_bound for result in results[: len(library)]),
            "stream_efficiency_pct": min(result.stream_efficiency_pct for result in results[len(library) :]),
            "rank_imbalance": max(balance.ranks for balance in dealt),
            "rank_imbalance_at_random": max(balance.ranks for balance in at_random),
            "waiting_pct": max(100 * (balance.waiting - 1) for balance in dealt),
            "waiting_at_random_pct": max(100 * (balance.waiting - 1) for balance in at_random),
            "peak_rss_bytes": ours_peak,
            "stream_peak_rss_bytes": stream_peak,
            "trl_peak_rss_bytes": trl_peak,
        },
        rows=[*(result.line for result in results), itself.row("lognormal 1M, 2048: against itself")],
        void=self_ratio_is_void(itself),
        notes=(
            f"Peak resident memory of a process that packs {sizes[-1]:,} documents into rows of {CONTEXTS[0]}: "
            f"{format_bytes(ours_peak)}; as a stream {format_bytes(stream_peak)}; TRL's search "
            f"{format_bytes(trl_peak)}.",
            "same_rows compares what stands in every row, not only their number.",
        ),
    )


def lognormal(count: int, context: int, seed: int) -> Documents:
    """Lengths with a median of about 245 tokens, none longer than the context."""
    lengths = np.random.default_rng(seed).lognormal(5.5, 1.0, count).clip(1, context).astype(np.int64)
    return Documents(f"lognormal {count // 10**6}M", lengths, context)


def split(lengths: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    """The lengths of the pieces of at most `context` tokens."""
    return pack(lengths, context, packing="none", long_documents="split").lengths.astype(np.int64)


def packed(documents: Documents) -> Packing:
    """Our rows."""
    return pack(documents.lengths, documents.context)


def streamed(documents: Documents) -> Packing:
    """Our rows, window by window."""
    return pack(documents.lengths, documents.context, packing="stream")


def next_fit_efficiency(documents: Documents) -> float:
    """How full rows are that take documents in their order until the next one does not fit."""
    ends = np.cumsum(documents.lengths)
    rows, begin, before = 0, 0, 0
    while begin < len(ends):
        begin = int(np.searchsorted(ends, before + documents.context, side="right"))
        rows, before = rows + 1, ends[begin - 1]
    return float(ends[-1]) / (rows * documents.context)


def balances(packing: Packing, seed: int) -> tuple[Balance, Balance]:
    """Of rows dealt by attention work, and at random: one row a step and rank."""
    work = packing.row_work()
    dealt = deal_rows(work, DealOptions(batch_size=1, ranks=RANKS, seed=seed, drop_last=True))
    order = np.random.default_rng(seed).permutation(packing.rows)[: dealt.rows.size]
    at_random = Deal(rows=order.reshape(dealt.rows.shape), dropped_rows=dealt.dropped_rows)
    return dealt.balance(work), at_random.balance(work)


def trl_rows(documents: Documents) -> list[list[int]]:
    """TRL's rows, by the search that stands in its packer."""
    # Imported here: trl takes more memory than packing with ours.
    import pyarrow

    lengths = pyarrow.array(documents.lengths)
    numbers = pyarrow.array(np.arange(len(lengths)))
    pairs = pyarrow.StructArray.from_arrays([lengths, numbers], ["length", "number"]).sort("descending", by=0)
    return [row["ids"] for row in trl_search()(pairs, documents.context)]


@cache
def trl_search() -> Callable[..., list[dict[str, list[int]]]]:
    """TRL's search as a function, cut out of its packer's source: what is before and after it moves tokens."""
    from trl import data_utils

    source = inspect.getsource(data_utils._pack_bfd)
    search = source[source.index("    segment_tree =") : source.index("    examples = pc.take")]
    namespace = dict(vars(data_utils))
    exec(f"def search(lengths, seq_length):\n{search}\n    return bins\n", namespace)
    return namespace["search"]


def compared(documents: Documents, seed: int) -> Result:
    """Time and rows of both packers on one set."""
    ours = packed(documents)
    same = same_rows(ours, trl_rows(documents), documents.lengths)
    begin = time.perf_counter()
    ours.shuffled(seed)
    shuffle_ms = 1000 * (time.perf_counter() - begin)
    ratio = paired_ratio(
        lambda: packed(documents),
        lambda: trl_rows(documents),
        pairs=LONG_PAIRS if len(documents.lengths) >= 10**6 else MINIMUM_PAIRS,
        seed=seed,
        warm_up=1,
    )
    over_bound = ours.rows - ours.lower_bound_rows
    begin = time.perf_counter()
    stream = streamed(documents)
    stream_seconds = time.perf_counter() - begin
    dealt, at_random = balances(ours, seed)
    line = {
        "what": f"{documents.name}, {documents.context}",
        "documents": len(documents.lengths),
        "rows": ours.rows,
        "efficiency_pct": round(100 * ours.efficiency, 3),
        "over_bound_pct": round(100 * ours.over_bound, 4),
        "same_rows": same,
        "speedup": round(1 / ratio.median, 1),
        **{key: value for key, value in ratio.row("").items() if key != "what"},
        "shuffle_ms": round(shuffle_ms, 1),
        "stream_ms": round(1000 * stream_seconds, 1),
        "stream_efficiency_pct": round(100 * stream.efficiency, 3),
        "stream_over_bound_pct": round(100 * stream.over_bound, 4),
        "next_fit_efficiency_pct": round(100 * next_fit_efficiency(documents), 2),
        "rank_imbalance": round(dealt.ranks, 5),
        "at_random": round(at_random.ranks, 5),
        "waiting_pct": round(100 * (dealt.waiting - 1), 3),
        "waiting_at_random_pct": round(100 * (at_random.waiting - 1), 1),
    }
    return Result(
        speedup=1 / ratio.median,
        speedup_low=1 / ratio.high,
        over_bound_pct=100 * ours.over_bound,
        rows_over_bound=over_bound,
        same_rows=same,
        stream_efficiency_pct=100 * stream.efficiency,
        balance=dealt,
        balance_at_random=at_random,
        line=line,
    )


def same_rows(ours: Packing, theirs: list[list[int]], lengths: NDArray[np.int64]) -> bool:
    """Whether the two have the same rows, each taken as the lengths that stand in it, in any order."""
    # A row's mark is the sum of a random number for each of its lengths.
    marks = np.random.default_rng(0).integers(0, 2**63, ours.context + 1, dtype=np.uint64)
    their_ends = np.cumsum([len(row) for row in theirs])
    their_documents = np.fromiter((document for row in theirs for document in row), np.int64, len(lengths))
    our_marks = np.add.reduceat(marks[ours.lengths], ours.offsets[:-1])
    their_marks = np.add.reduceat(marks[lengths[their_documents]], np.concatenate(([0], their_ends[:-1])))
    return np.array_equal(np.sort(our_marks), np.sort(their_marks))


def peak_rss_bytes(side: str, count: int, seed: int) -> int:
    """Peak resident memory of a process of its own that makes `count` lengths and packs them once."""
    code = (
        "from benchmarks import packing\n"
        f"packing.{side}(packing.lognormal({count}, {CONTEXTS[0]}, {seed}))\n"
        "print(packing.own_peak_rss_bytes())\n"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def own_peak_rss_bytes() -> int:
    """Peak resident memory of this process."""
    status = Path("/proc/self/status")
    if status.exists():  # unlike getrusage, it doesn't count the memory of the parent before exec
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))
