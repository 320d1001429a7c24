"""What ModelCheckpoint does while a thread still writes ends as it does without a thread."""

import copy
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_memkit import StreamingCheckpointIO
from lightning_memkit.checkpoints import files, sharded
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.plugins.strategies import _sharded_checkpoints
from tests.checkpoints.test_files import assert_same
from tests.plugins.toys import TokenTagger, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty")


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write takes so long that training goes on meanwhile."""
    plain = files.write_document

    def write(document: Any, path: Path) -> None:
        threading.Event().wait(0.05)
        plain(document, path)

    monkeypatch.setattr(files, "write_document", write)


KEEPERS: dict[str, list[dict[str, Any]]] = {
    "link": [{"save_last": "link"}],
    "copy": [{"save_last": True}],
    "link, best two": [{"save_last": "link", "monitor": "step", "mode": "max", "save_top_k": 2}],
    "removed while written": [{"monitor": "step", "mode": "max", "save_top_k": 1, "every_n_train_steps": 1}],
    "last alone": [{"save_top_k": 0, "save_last": True, "every_n_train_steps": 1}],
    "two of one name": [
        {"filename": "{epoch}", "monitor": "step", "mode": "max", "every_n_train_steps": 2},
        {"filename": "{epoch}", "monitor": "step", "mode": "min", "every_n_train_steps": 2, "save_top_k": 2},
    ],
}


def found(folder: Path, options: list[dict[str, Any]], asynchronous: bool) -> dict[str, Any]:
    """Names, steps and links of what is kept."""
    torch.manual_seed(0)
    keepers = [
        ModelCheckpoint(folder, **{"filename": "{step}", "every_n_train_steps": 2, **one}) for one in options
    ]
    fitting = trainer(
        *keepers,
        max_steps=7,
        plugins=[StreamingCheckpointIO(asynchronous=asynchronous)],
        enable_checkpointing=True,
    )
    fitting.fit(TokenTagger(), loader(count=80))
    return {
        path.name: (files.load(path)["global_step"], os.readlink(path) if path.is_symlink() else "")
        for path in folder.iterdir()
    }


@pytest.mark.usefixtures("slow_writes")
@pytest.mark.parametrize("name", KEEPERS)
@pytest.mark.long
def test_what_is_kept_is_what_is_kept_without_a_thread(name: str, tmp_path: Path) -> None:
    kept = [found(tmp_path / str(number) / "new", KEEPERS[name], bool(number)) for number in (0, 1)]
    assert kept[0]
    assert kept[0] == kept[1]
    assert "exists" not in vars(LocalFileSystem())  # what was patched is as it was


class Fails(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise ArithmeticError("on purpose")


@pytest.mark.usefixtures("slow_writes")
def test_what_is_saved_when_training_fails_is_there_afterwards(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=100, save_on_exception=True)
    plugins = [StreamingCheckpointIO(asynchronous=True)]
    fitting = trainer(keeper, Fails(), max_steps=7, plugins=plugins, enable_checkpointing=True)
    with pytest.raises(ArithmeticError, match="on purpose"):
        fitting.fit(TokenTagger(), loader(count=80))
    (kept,) = tmp_path.iterdir()
    assert files.load(kept)["global_step"] == 3


@pytest.mark.usefixtures("slow_writes")
def test_another_trainer_waits_for_what_it_resumes_from(tmp_path: Path) -> None:
    fitting = trainer(max_steps=-1, max_epochs=1, plugins=[StreamingCheckpointIO(asynchronous=True)])
    fitting.fit(TokenTagger(), loader(count=80))
    fitting.save_checkpoint(tmp_path / "x.ckpt")
    resumed = trainer(max_steps=-1, max_epochs=2, plugins=[StreamingCheckpointIO()])
    resumed.fit(TokenTagger(), loader(count=80), ckpt_path=tmp_path / "x.ckpt")
    assert resumed.global_step == 2 * fitting.global_step
    fitting.strategy.checkpoint_io.teardown()


@pytest.mark.usefixtures("slow_writes")
@pytest.mark.parametrize("again", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_trainer_is_copied_while_a_thread_writes(again: Any, tmp_path: Path) -> None:
    fitting = trainer(max_steps=2, plugins=[StreamingCheckpointIO(asynchronous=True)])
    fitting.fit(TokenTagger(), loader(count=80))
    fitting.save_checkpoint(tmp_path / "x.ckpt")
    copied = again(fitting)
    copied.save_checkpoint(tmp_path / "y.ckpt")
    for one in (fitting, copied):
        one.strategy.checkpoint_io.teardown()
    states = [files.load(tmp_path / name)["state_dict"] for name in ("x.ckpt", "y.ckpt")]
    assert_same(*states)


@pytest.mark.parametrize("scheme", ["local://{}", "file://{}", "{}"])
@pytest.mark.parametrize("as_path", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_urls_of_this_machine_are_paths(
    scheme: str, as_path: bool, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    url = scheme.format(tmp_path / "there" / "x.ckpt")
    place = Path(url) if as_path else url
    io = StreamingCheckpointIO(asynchronous=asynchronous)
    io.save_checkpoint({"epoch": 3}, place)
    assert io.load_checkpoint(place) == {"epoch": 3}
    assert files.load(tmp_path / "there" / "x.ckpt") == {"epoch": 3}
    _sharded_checkpoints.save({"state_dict": {"w": torch.ones(1)}}, Path(f"{place}.folder"), io)
    io.teardown()
    assert sharded.is_sharded(tmp_path / "there" / "x.ckpt.folder")
    io.remove_checkpoint(place)
    io.teardown()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["x.ckpt.folder"]
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_urls_that_nobody_knows_are_refused(asynchronous: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    io = StreamingCheckpointIO(asynchronous=asynchronous)
    for call in (
        lambda: io.save_checkpoint({}, "foo://x/y.ckpt"),
        lambda: io.load_checkpoint("foo://x/y.ckpt"),
    ):
        with pytest.raises(CheckpointError, match=r"foo://x/y.ckpt is no place .*foo.* or give a path"):
            call()
    for url in ("memory://run/x.ckpt", Path("memory://run/x.ckpt")):
        with pytest.raises(
            CheckpointError, match=r"is a URL, and a sharded .*save_distributed_checkpoint=False"
        ):
            _sharded_checkpoints.save({"state_dict": {}}, url, io)  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.iterdir())


def test_a_url_s_damage_names_the_url() -> None:
    io = StreamingCheckpointIO()
    io.save_checkpoint({"epoch": 1}, "memory://run/cut.ckpt")
    memory = fsspec.filesystem("memory")
    memory.pipe("/run/cut.ckpt", memory.cat("/run/cut.ckpt")[:-3])
    with pytest.raises(CheckpointError, match="^memory://run/cut.ckpt is damaged"):
        io.load_checkpoint("memory://run/cut.ckpt")
