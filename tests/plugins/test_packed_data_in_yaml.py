"""What PackedDataModule makes of a config's values, under memkit's CLI and under Lightning's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_memkit.data.sources.tokenizers import ByteTokenizer
from lightning_memkit.plugins.cli.memkit_cli import MemkitCLI
from lightning_memkit.plugins.data.packed_data import PackedDataModule
from tests.plugins.noise import NOISE
from tests.plugins.test_packed_data import real_tokens

pytestmark = [
    *NOISE,
    pytest.mark.filterwarnings("ignore:.*jsonargparse"),
    pytest.mark.parametrize("cli", [MemkitCLI, LightningCLI]),
]
TRAINER = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def built(cli: type[LightningCLI], options: dict[str, Any], *arguments: str) -> PackedDataModule:
    """The data module of a config in the current folder, with these options."""
    config = {
        "seed_everything": 1,
        "model": {"class_path": "tests.cli_models.Early"},
        "trainer": TRAINER,
        "data": {"class_path": "lightning_memkit.PackedDataModule", "init_args": {"context": 64, **options}},
    }
    Path("given.yaml").write_text(yaml.safe_dump(config))
    return cli(run=False, args=["--config", "given.yaml", *arguments]).datamodule  # pyright: ignore[reportAttributeAccessIssue]


def texts(data: PackedDataModule) -> set[str]:
    """The texts of the training documents; each has a letter of its own, and no row cuts one."""
    data.setup()
    tokens = [token for batch in data.train_dataloader() for token in real_tokens(batch)]
    return {text for text in ByteTokenizer().decode(tokens).split("|") if text}


def written(name: str, *documents: str) -> str:
    """A file of these documents, each of which ends in a bar."""
    marked = [f"{document}|" for document in documents]
    lines = [json.dumps({"text": text}) for text in marked] if name.endswith("l") else marked
    Path(name).write_text("\n\n".join(lines))
    return name


ALL = {"documents": {"validation": 0.0}}


@pytest.mark.parametrize("name", ["my.txt", "my.jsonl"])
def test_the_path_of_a_file_is_the_file(cli, name):
    data = built(cli, {"source": written(name, "one", "two"), **ALL})
    assert data.source == name
    assert texts(data) == {"one", "two"}


@pytest.mark.parametrize(
    "document", ["note: a text that is YAML, too", "[1, 2]", "class_path: lightning_memkit.PackedDataModule"]
)
def test_a_text_that_is_a_config_too_is_a_text(cli, document):
    assert texts(built(cli, {"source": written("my.txt", document), **ALL})) == {document}


def test_each_split_has_a_file(cli):
    sources = {"train": written("my.txt", "note: one"), "validation": written("other.txt", "two")}
    data = built(cli, {"source": sources})
    assert data.source == sources
    assert texts(data) == {"note: one"}


@pytest.mark.parametrize("option", ["--data.init_args.source=my.txt", "--data.source=my.txt"])
def test_a_path_on_the_command_line_is_the_file(cli, option):
    written("my.txt", "note: one")
    assert texts(built(cli, ALL, option)) == {"note: one"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("my.csv", "a,b\n1,2\n", r"^my.csv ends in '.csv'"),
        ("my.md", "# note: one\n", r"^my.md ends in '.md'"),
        ("my.jsonl", "a,b\n1,2\n", "^my.jsonl, line 1 is not JSON"),
        ("my.jsonl", "1\n2\n3\n", "^my.jsonl, line 1 is no object"),
    ],
)
def test_a_file_that_is_no_source_is_refused_by_its_name(cli, name, content, message):
    Path(name).write_text(content)
    with pytest.raises(ValueError, match=message) as refused:
        built(cli, {"source": name}).setup()
    assert len(str(refused.value)) < 360


@pytest.mark.parametrize("split", [False, True])
def test_a_list_of_files_is_the_files(cli, split):
    files = [written("my.jsonl", "one"), written("other.jsonl", "two")]
    data = built(cli, {"source": {"train": files} if split else files, **ALL})
    assert texts(data) == {"one", "two"}


def test_a_list_of_texts_is_the_texts(cli):
    assert texts(built(cli, {"source": ["one|", "two words|"], **ALL})) == {"one", "two words"}
