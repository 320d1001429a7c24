"""A report's files with loggers that store files: stand-ins for the clients of services, and these if installed."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CometLogger, CSVLogger, LitLogger, Logger, MLFlowLogger, WandbLogger

from lightning_memkit import MemoryReport
from tests.plugins.toys import TokenTagger, trained

FILES = ["memory_report.json", "memory_report.html"]


class Kept(Logger):
    """A logger whose client keeps in a list what it is asked to store."""

    def __init__(self, folder: Path) -> None:
        Logger.__init__(self)
        self.folder, self.stored = folder, []

    name = "kept"  # pyright: ignore[reportAssignmentType]
    version = "0"  # pyright: ignore[reportAssignmentType]
    run_id = "run-7"  # pyright: ignore[reportAssignmentType]
    log_dir = property(lambda self: str(self.folder))
    save_dir = property(lambda self: str(self.folder))

    @property
    def experiment(self) -> Any:
        def artifact(first: Any, path: str = "", folder: str = "") -> None:
            files = first.files if hasattr(first, "files") else [(path, folder)]
            self.stored += [(Path(file).name, where) for file, where in files]

        def asset(path: str, file_name: str) -> None:
            self.stored.append((Path(path).name, file_name))

        return SimpleNamespace(id="run-7", log_artifact=artifact, log_asset=asset)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_graph(self, *args: Any, **kwargs: Any) -> None: ...

    def log_file(self, path: str) -> None:
        self.stored.append((Path(path).name, ""))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None: ...

    def finalize(self, status: str) -> None: ...


class KeptWandb(Kept, WandbLogger): ...


class KeptMLflow(Kept, MLFlowLogger): ...


class KeptComet(Kept, CometLogger): ...


class KeptLit(Kept, LitLogger): ...


class WandbArtifact:
    def __init__(self, name: str, type: str) -> None:
        self.name, self.files = f"{type}/{name}", []

    def add_file(self, path: str) -> None:
        self.files.append((path, self.name))


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        (KeptWandb, ["memory_report/memory_report-run-7"] * 2),
        (KeptMLflow, ["memory_report"] * 2),
        (KeptComet, ["memory_report/memory_report.json", "memory_report/memory_report.html"]),
        (KeptLit, ["", ""]),
        (Kept, None),
    ],
)
def test_a_logger_that_stores_files_gets_the_report(
    kind: type[Kept], places: list[str] | None, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Artifact=WandbArtifact))
    logger = kind(tmp_path)
    trained(MemoryReport(live=False), max_steps=2, logger=logger)
    assert logger.stored == ([] if places is None else list(zip(FILES, places, strict=True)))
    assert all((tmp_path / name).is_file() for name in FILES)


def test_the_report_of_a_failed_step_is_stored(tmp_path: Path) -> None:
    class Failing(TokenTagger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise MemoryError("no more")
            return super().training_step(batch, batch_idx)

    logger = KeptMLflow(tmp_path)
    with pytest.raises(MemoryError, match="no more"):
        trained(MemoryReport(live=False), module=Failing, max_steps=2, logger=logger)
    assert [name for name, _ in logger.stored] == ["memory_report_oom.json", "memory_report_oom.html"]


def test_a_service_that_fails_costs_no_run(tmp_path: Path) -> None:
    class Offline(KeptLit):
        def log_file(self, path: str) -> None:
            raise ConnectionError("no route to host")

    with pytest.warns(UserWarning, match=r"Offline did not store .*memory_report.json, .*: no route to host"):
        trained(MemoryReport(live=False), max_steps=2, logger=[Offline(tmp_path), CSVLogger(tmp_path)])
    assert (tmp_path / FILES[1]).is_file()


def test_wandb_itself_takes_the_page(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    trained(MemoryReport(live=False), max_steps=2, logger=logger)
    logger.experiment.finish()
    (kept,) = tmp_path.rglob("*.wandb")
    assert b"memory_report.html" in kept.read_bytes()


def test_mlflow_itself_takes_the_page(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    trained(MemoryReport(live=False), max_steps=2, logger=MLFlowLogger(save_dir=str(tmp_path)))
    assert list(tmp_path.rglob("artifacts/memory_report/memory_report.html"))
