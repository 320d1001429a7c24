"""StreamingCheckpointIO under a Trainer: resumed bit for bit, in order, and nothing in a file is run."""

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from lightning_memkit import FSDP2Strategy, PureBF16Precision, StreamingCheckpointIO
from lightning_memkit.checkpoints import files, streamed
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.cli import main
from tests.plugins.toys import TokenTagger, loader, trainer


def fitted(io: StreamingCheckpointIO | None, epochs: int, resume: Any = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    plugins = [*options.pop("plugins", []), *([] if io is None else [io])]
    fitting = trainer(
        *options.pop("callbacks", []), max_steps=-1, max_epochs=epochs, plugins=plugins, **options
    )
    fitting.fit(TokenTagger(), loader(count=80), ckpt_path=resume)
    return fitting


def weights_of(fitted: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in fitted.lightning_module.state_dict().items()}


@pytest.mark.parametrize("precision", [None, "kahan", "split"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resume_is_bitwise(precision: Any, asynchronous: bool, tmp_path: Path) -> None:
    def plugins() -> dict[str, Any]:
        return {"plugins": [] if precision is None else [PureBF16Precision(precision)]}

    straight = fitted(None, 2, **plugins())
    half = fitted(StreamingCheckpointIO(asynchronous=asynchronous), 1, **plugins())
    half.save_checkpoint(tmp_path / "half.ckpt")
    half.strategy.checkpoint_io.teardown()
    resumed = fitted(StreamingCheckpointIO(), 2, tmp_path / "half.ckpt", **plugins())
    one, other = weights_of(straight), weights_of(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], value) for name, value in weights_of(half).items())
    plain = load_file(tmp_path / "half.ckpt")
    assert all(torch.equal(plain[name], value) for name, value in weights_of(half).items())


def test_what_stock_lightning_saved_resumes(tmp_path: Path) -> None:
    half = fitted(None, 1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fitted(StreamingCheckpointIO(), 2, tmp_path / "half.ckpt")
    straight = weights_of(fitted(None, 2))
    assert all(torch.equal(straight[name], value) for name, value in weights_of(resumed).items())


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_model_checkpoint_keeps_the_best_and_the_last(asynchronous: bool, tmp_path: Path) -> None:
    def keeping() -> dict[str, Any]:
        keeper = ModelCheckpoint(
            tmp_path, "{step}", "step", mode="max", save_top_k=2, save_last="link", every_n_train_steps=5
        )
        return {"callbacks": [keeper], "enable_checkpointing": True}

    io = StreamingCheckpointIO(asynchronous=asynchronous)
    fitting = fitted(io, 2, **keeping())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"last.ckpt", "step=15.ckpt", "step=20.ckpt"}
    last = files.load(tmp_path / "last.ckpt")
    assert last["global_step"] == 20
    assert all(torch.equal(last["state_dict"][name], value) for name, value in weights_of(fitting).items())
    assert fitted(StreamingCheckpointIO(), 3, "last", **keeping()).global_step == 30


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def served(folder: Path, request: pytest.FixtureRequest) -> str:
    """The URL at which a folder is served while the test runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    request.addfinalizer(stop)
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("weights_only", [None, False, True])
@pytest.mark.parametrize("kind", ["zip", "pickle", "memory", "http"])
def test_a_checkpoint_that_asks_for_code_is_refused(
    kind: str, weights_only: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    torch.save(
        {"state_dict": {}, "x": Harmful(tmp_path / "harm")},
        tmp_path / "bad.ckpt",
        _use_new_zipfile_serialization=kind != "pickle",
    )
    path = str(tmp_path / "bad.ckpt")
    if kind == "memory":
        fsspec.filesystem("memory").pipe("/bad.ckpt", (tmp_path / "bad.ckpt").read_bytes())
        path = "memory://bad.ckpt"
    if kind == "http":
        path = f"{served(tmp_path, request)}/bad.ckpt"
    fitting = trainer(plugins=[StreamingCheckpointIO()])
    with pytest.raises(CheckpointError, match="can't be read with weights_only=True.*nothing of it was run"):
        fitting.fit(TokenTagger(), loader(), ckpt_path=path, weights_only=weights_only)
    assert not (tmp_path / "harm").exists()
    torch.load(tmp_path / "bad.ckpt", weights_only=False)  # the trap works
    assert (tmp_path / "harm").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def change_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def wrong_shape(path: Path) -> None:
    change_header(path, lambda header: header["head.bias"].update(shape=[51]))


def renamed(path: Path) -> None:
    change_header(path, lambda header: header.update(other=header.pop("head.bias")))


def no_structure(path: Path) -> None:
    change_header(path, lambda header: header.update(other=header.pop(streamed.STRUCTURE)))


@pytest.mark.parametrize(
    "damage", [cut, cut_header, wrong_shape, renamed, no_structure], ids=lambda damage: damage.__name__
)
def test_a_damaged_file_is_refused(damage: Callable[[Path], None], tmp_path: Path) -> None:
    fitted(StreamingCheckpointIO(), 1).save_checkpoint(tmp_path / "x.ckpt")
    damage(tmp_path / "x.ckpt")
    with pytest.raises(
        CheckpointError, match=r"x.ckpt is damaged .* Load another checkpoint, or copy this one again"
    ):
        fitted(StreamingCheckpointIO(), 2, tmp_path / "x.ckpt")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"hello world", b"\x80\x02K\x01."])
def test_what_is_no_checkpoint_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match="x.ckpt"):
        StreamingCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(FileNotFoundError, match="nowhere.ckpt does not exist"):
        StreamingCheckpointIO().load_checkpoint(tmp_path / "nowhere.ckpt")


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    fitted(StreamingCheckpointIO(), 1).save_checkpoint(tmp_path / "x.ckpt")
    module = TokenTagger()
    module.head = torch.nn.Linear(32, 49)
    with pytest.raises(RuntimeError, match=r"size mismatch for head.weight"):
        trainer(plugins=[StreamingCheckpointIO()]).fit(module, loader(), ckpt_path=tmp_path / "x.ckpt")


class WithObject(TokenTagger):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)


def test_an_object_among_the_hyperparameters_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    fitting = trainer(max_steps=1, plugins=[StreamingCheckpointIO()])
    fitting.fit(WithObject(Harmful(tmp_path)), loader())
    with pytest.raises(
        CheckpointError, match=r"checkpoint\['hyper_parameters'\]\['loss'\] is .*Harmful.*tensors and"
    ):
        fitting.save_checkpoint(tmp_path / "x.ckpt")
    assert not list(tmp_path.iterdir())


def test_urls_are_written_and_read(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    memory = fsspec.filesystem("memory")
    fitting = fitted(StreamingCheckpointIO(), 1)
    fitting.save_checkpoint("memory://run/half.ckpt")
    resumed = fitted(StreamingCheckpointIO(), 2, "memory://run/half.ckpt")
    straight = weights_of(fitted(None, 2))
    assert all(torch.equal(straight[name], value) for name, value in weights_of(resumed).items())
    fitting.strategy.remove_checkpoint("memory://run/half.ckpt")
    assert not memory.exists("/run/half.ckpt")
    fitting.save_checkpoint(f"file://{tmp_path}/local.ckpt")
    assert files.load(tmp_path / "local.ckpt")["global_step"] == 10
    url = f"{served(tmp_path, request)}/local.ckpt"
    assert StreamingCheckpointIO().load_checkpoint(url)["global_step"] == 10


class Halting:
    """Holds the writer until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.written, plain = threading.Event(), [], files.write_document

        def write(document: Any, path: Path) -> None:
            assert self.go.wait(60)
            if "fail" in path.name:
                raise OSError("disk full")
            plain(document, path)
            self.written.append(path.name)

        monkeypatch.setattr(files, "write_document", write)


def test_a_thread_writes_what_stood_there_when_it_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halting, io = Halting(monkeypatch), StreamingCheckpointIO(asynchronous=True)
    state = {"state_dict": {"w": torch.zeros(3)}}
    io.save_checkpoint(state, tmp_path / "a.ckpt")
    state["state_dict"]["w"] += 1
    assert not list(tmp_path.iterdir())
    halting.go.set()
    assert torch.equal(io.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["w"], torch.zeros(3))
    io.teardown()
    io.save_checkpoint(state, tmp_path / "b.ckpt")  # a fit after a fit
    io.teardown()
    assert halting.written == ["a.ckpt", "b.ckpt"]


def test_the_error_of_a_thread_surfaces_and_nothing_is_removed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halting, io = Halting(monkeypatch), StreamingCheckpointIO(asynchronous=True)
    halting.go.set()
    io.save_checkpoint({}, tmp_path / "good.ckpt")
    io.save_checkpoint({}, tmp_path / "fail.ckpt")
    io.remove_checkpoint(tmp_path / "good.ckpt")  # as ModelCheckpoint does once the new one "is there"
    with pytest.raises(OSError, match="disk full"):
        io.save_checkpoint({}, tmp_path / "next.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["good.ckpt"]
    io.save_checkpoint({}, tmp_path / "next.ckpt")
    io.remove_checkpoint(tmp_path / "good.ckpt")
    io.save_checkpoint({}, tmp_path / "fail.ckpt")
    with pytest.raises(OSError, match="disk full"):
        io.teardown()
    io.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["next.ckpt"]


def test_a_fit_ends_with_the_error_of_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Halting(monkeypatch).go.set()
    keeper = ModelCheckpoint(tmp_path, "fail", every_n_train_steps=2)
    with pytest.raises(OSError, match="disk full"):
        fitted(StreamingCheckpointIO(asynchronous=True), 2, callbacks=[keeper], enable_checkpointing=True)


def test_what_can_t_be_saved_is_said_at_once_by_a_thread_too(tmp_path: Path) -> None:
    io = StreamingCheckpointIO(asynchronous=True)
    with pytest.raises(CheckpointError, match=r"checkpoint\['x'\]"):
        io.save_checkpoint({"x": object()}, tmp_path / "x.ckpt")


def test_fsdp2_refuses_options_of_a_checkpoint_io() -> None:
    strategy = FSDP2Strategy()
    strategy.broadcast = lambda obj, src=0: obj  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="save_distributed_checkpoint=False"):
        strategy.save_checkpoint({}, "x.ckpt", storage_options={"a": 1})


@pytest.fixture
def no_group_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:It is recommended to use")
@pytest.mark.usefixtures("no_group_left")
def test_fsdp2_finds_its_checkpoints_at_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file wherever fsspec can write; a folder at `file://`, and refused elsewhere. No folder has a URL's name."""
    monkeypatch.chdir(tmp_path)
    memory = fsspec.filesystem("memory")
    saved: list[dict[str, torch.Tensor]] = []

    def run(sharded: bool, url: str, resume: str | None = None, io: Any = None) -> Trainer:
        strategy = FSDP2Strategy(
            blocks=["head"], save_distributed_checkpoint=sharded, process_group_backend="gloo"
        )
        found = fitted(io, 2 if resume else 1, resume, strategy=strategy, devices=1)
        found.save_checkpoint(url)
        saved.append({name: value.full_tensor() for name, value in weights_of(found).items()})  # pyright: ignore
        return found

    run(False, "memory://fsdp2/one.ckpt", io=StreamingCheckpointIO())
    fitting = run(False, "memory://fsdp2/two.ckpt", "memory://fsdp2/one.ckpt", StreamingCheckpointIO())
    fitting.strategy.remove_checkpoint("memory://fsdp2/one.ckpt")
    assert [Path(name).name for name in memory.ls("/fsdp2", detail=False)] == ["two.ckpt"]
    folder = f"file://{tmp_path}/there/one.ckpt"
    run(True, folder)
    assert (tmp_path / "there" / "one.ckpt" / ".metadata").is_file()
    fitting = run(True, f"file://{tmp_path}/there/two.ckpt", folder)
    assert all(torch.equal(saved[1][name], value) for name, value in saved[3].items())
    fitting.strategy.remove_checkpoint(folder)
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["two.ckpt"]
    memory.pipe("/fsdp2/folder.ckpt/.metadata", b"")
    for call in (
        lambda: fitting.save_checkpoint("memory://fsdp2/x.ckpt"),
        lambda: fitting.strategy.load_checkpoint("memory://fsdp2/folder.ckpt"),
    ):
        with pytest.raises(
            CheckpointError, match="is a URL, and a sharded checkpoint is a folder that all ranks see"
        ):
            call()
    fitting.strategy.remove_checkpoint("memory://fsdp2/folder.ckpt")
    assert not memory.exists("/fsdp2/folder.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


class Plain(LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, width)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(8, 2), batch_size=2)  # pyright: ignore[reportArgumentType]


CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  max_steps: 4
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: {folder}
  plugins:
    - class_path: lightning_memkit.StreamingCheckpointIO
      init_args: {{asynchronous: true}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {folder}/kept, every_n_train_steps: 4}}
model:
  class_path: tests.plugins.test_checkpoint_io.Plain
  init_args: {{width: 5}}
"""


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty")
def test_a_config_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    assert main(["fit", "--config", str(tmp_path / "config.yaml")]) == 0, capsys.readouterr().err
    (kept,) = (tmp_path / "kept").iterdir()
    assert files.load(kept)["hyper_parameters"]["width"] == 5
    words = [
        "fit",
        "--config",
        str(tmp_path / "config.yaml"),
        "--ckpt_path",
        str(kept),
        "--trainer.max_steps=8",
    ]
    assert main(words) == 0, capsys.readouterr().err
