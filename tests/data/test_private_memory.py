"""Worker processes share a corpus: what each has for itself stays as it is over an epoch of a million documents."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EPOCH = """
import re
import sys
from pathlib import Path

import numpy as np
import torch

from lightning_memkit.data.sources.cache import cached
from lightning_memkit.data.loading.loader import LoaderOptions, PackedLoader, PackedRows
from lightning_memkit.data.packing.pack import pack
from lightning_memkit.data.sources.store import TokenStore, offsets_of

torch.set_num_threads(1)


def private_bytes() -> int:
    # What this process and its workers have for themselves.
    me = Path("/proc/self")
    numbers = [number for path in (me / "task").iterdir() for number in (path / "children").read_text().split()]
    processes = (me, *(Path("/proc", number) for number in numbers))
    texts = [(process / "smaps_rollup").read_text() for process in processes]
    assert len(texts) >= 3, "two workers run"
    return 1024 * sum(int(number) for text in texts for number in re.findall(r"Private_\\w+: +(\\d+)", text))


def corpus() -> TokenStore:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(4, 0.8, documents).clip(1, 2048).astype(np.int64)
    return TokenStore(tokens=rng.integers(0, 50_000, lengths.sum(), np.uint16), offsets=offsets_of(lengths))


documents, kind = int(sys.argv[1]), sys.argv[2]
store = cached("corpus", lambda: [corpus()]) if kind == "mapped" else corpus()
rows = PackedRows(store=store, packing=pack(store.lengths, 2048, seed=0))
loader = PackedLoader(rows, LoaderOptions(batch_size=8, num_workers=2))
seen, sizes = 0, []
for number, batch in enumerate(loader):
    seen += batch.documents
    if number >= 100 and number % (len(loader) // 20) == 0:  # the workers have begun
        sizes.append(private_bytes())
assert seen == documents
# Batches under construction come and go: a few measurements at the beginning and at the end.
print(int(np.median(sizes[:5])), int(np.median(sizes[-5:])))
"""


def growth(documents: int, kind: str, folder: Path) -> float:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", EPOCH, str(documents), kind]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr
    first, last = map(int, ran.stdout.split())
    print(
        f"{documents:,} documents, {kind}: {first / 2**20:.1f} MiB private, at the end {last / 2**20:.1f} MiB"
    )
    return last / first - 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["mapped", "in memory"])
def test_two_workers_take_no_more_as_an_epoch_goes_on(tmp_path, kind):
    assert growth(1_000_000, kind, tmp_path) <= 0.1
