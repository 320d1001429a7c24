"""Fits resumed from checkpoints of an older version (commit a224f13) end with the weights that it ended with."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.data.a224f13.write import CASES, FOLDER, ON_TWO_RANKS, arithmetic, consolidated, fitted
from tests.plugins.noise import NOISE

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 480  # of one launch on a busy machine
# A processor that rounds otherwise may move each of two steps of lr=1e-2 by some of bfloat16's 2**-8.
RTOL, ATOL = 2**-6, 2e-2

pytestmark = [
    *NOISE,
    pytest.mark.filterwarnings("ignore:.*`weights_only` was not set.*"),
    pytest.mark.filterwarnings("ignore:.*8-bit states"),
    pytest.mark.filterwarnings("ignore:.*but have no `validation_step`"),
    pytest.mark.filterwarnings(
        "ignore:The loader's state is of an earlier version"
    ),  # and it says what that means
    pytest.mark.filterwarnings(
        "ignore:.*ended before the epoch"
    ),  # the loader of plain cases repeats one batch
]


def compare(name: str, weights: dict[str, torch.Tensor]) -> None:
    """Check for the older version's weights, bit for bit if this machine computes as that one did."""
    then = torch.load(FOLDER / f"{name}.after.pt", weights_only=True)
    is_alike = torch.equal(then["arithmetic"], arithmetic())
    assert weights.keys() == then["weights"].keys()
    for key, value in then["weights"].items():
        rtol, atol = (0.0, 0.0) if is_alike else (RTOL, ATOL)
        torch.testing.assert_close(weights[key], value, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_an_older_checkpoint_goes_on(name: str, tmp_path: Path) -> None:
    path = shutil.copy(FOLDER / f"{name}.ckpt", tmp_path)
    compare(name, fitted(CASES[name](), resume=Path(path)))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """All cases come from one launch, which takes longer than they do."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in ON_TWO_RANKS:
        saved = FOLDER / f"{name}.ckpt"
        (shutil.copytree if saved.is_dir() else shutil.copy)(saved, folder / saved.name)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
               "-m", "tests.data.two_ranks_of_a224f13", str(folder)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_an_older_checkpoint_of_two_ranks_goes_on(
    name: str, two_ranks: dict[str, dict[str, torch.Tensor]]
) -> None:
    compare(name, two_ranks[name])


@pytest.mark.parametrize("name", [*CASES, *ON_TWO_RANKS])
def test_an_older_checkpoint_is_consolidated_to_the_same_float32_weights(name: str) -> None:
    then = torch.load(FOLDER / f"{name}.after.pt", weights_only=True)["float32"]
    weights = consolidated(FOLDER / f"{name}.ckpt")
    assert weights.keys() == then.keys()
    assert all(torch.equal(weights[key], value) for key, value in then.items())


def test_every_checkpoint_that_was_written_is_resumed_from() -> None:
    assert {path.stem for path in FOLDER.glob("*.ckpt")} == {*CASES, *ON_TWO_RANKS}
