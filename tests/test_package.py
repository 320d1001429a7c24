"""The package as a whole: its layers, its imports, its public names, its wheel."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from graphlib import TopologicalSorter
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import Strategy
from safetensors.torch import save_file
from torch import nn

import lightning_memkit
from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.data.batching.collate import collate
from lightning_memkit.data.packing.pack import pack
from lightning_memkit.data.sources.token_records import token_store
from lightning_memkit.plugins.callbacks.initial_weights import InitialWeights
from tests.plugins import fake_ranks
from tests.plugins.fake_accelerator import FakeAccelerator, on_fake_device
from tests.plugins.ranks import whole
from tests.processes import run_on_ranks
from tests.testing.fake_device import fake_device

PACKAGE = Path(lightning_memkit.__file__).parent
ROOT = Path(__file__).resolve().parent.parent
HAS_SOURCES = ROOT == PACKAGE.parent  # else an installed wheel is what is tested
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
CORES = {
    name: path
    for name, path in FILES.items()
    if not name.startswith("lightning_memkit.plugins") and name != "lightning_memkit.cli"
}
PUBLIC = {name: getattr(lightning_memkit, name) for name in lightning_memkit.__all__}
KINDS = {
    name: kind
    for name, thing in PUBLIC.items()
    for kind in (pl.Callback, Precision, Strategy, CheckpointIO, pl.LightningDataModule)
    if inspect.isclass(thing) and issubclass(thing, kind)
}
TRAINED = sorted(name for name, kind in KINDS.items() if kind is not pl.LightningDataModule)
# A process group lasts as long as its process: these train on two ranks of their own.
ON_RANKS = ("FSDP2Strategy", "ZeRO1Strategy")
TRAINED = [name for name in TRAINED if name not in ON_RANKS]
# A run has one strategy; offloading is for those that share no states, and DDP hears of no released gradient.
OTHERS = {"OnDeviceStrategy", "OptimizerOffload", "ActivationOffload"}
BESIDE = {
    "FSDP2Strategy": tuple(name for name in TRAINED if name not in OTHERS),
    "ZeRO1Strategy": tuple(name for name in TRAINED if name not in {*OTHERS, "GradientRelease"}),
}
COMBINATIONS_ON_RANKS = [
    (strategy, *names)
    for strategy, others in BESIDE.items()
    for names in ((), *((name,) for name in others), others)
]
# On ranks whose device is "fake".
COMBINATIONS_ON_FAKE_RANKS = [
    (strategy, *names, "ActivationOffload") for strategy, others in BESIDE.items() for names in ((), others)
]
COMBINATIONS = [(name,) for name in TRAINED] + list(combinations(TRAINED, 2)) + [tuple(TRAINED)]
# What a plugin can't do without; everything else is at its default.
NEEDED: dict[str, dict[str, Any]] = {
    "ActivationOffload": {"min_bytes": 1},
    "ChunkedLoss": {"heads": ["head"]},
    "InitialWeights": {"source": "weights.safetensors"},
    "MemoryBudget": {"budget": "1GiB"},
}
# Beside what steps within backward, a step can be neither split nor repeated.
NEEDED_BESIDE_RELEASE = {
    **NEEDED,
    "MemoryBudget": {"budget": "1GiB", "micro_batch_size": 8, "recover": False},
}
# On a CPU there is nothing to offload.
OFFLOADING = {"ActivationOffload", "OptimizerOffload"}


def imports_of(path: Path, *, at_import: bool = False) -> set[str]:
    """Return what the file imports anywhere, or only what is loaded `at_import`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in _nodes_run_at_import(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            found |= {part.value for part in node.args if isinstance(part, ast.Constant)}
    return found


def _nodes_run_at_import(tree: ast.Module):
    for node in tree.body:
        yield node
        if isinstance(node, ast.Try):
            yield from node.body


@pytest.mark.parametrize("name", CORES)
def test_a_core_imports_neither_lightning_nor_a_plugin(name: str) -> None:
    upward = {
        module
        for module in imports_of(CORES[name])
        if module.split(".")[0] in LIGHTNING
        or module.startswith(("lightning_memkit.plugins", "lightning_memkit.cli"))
    }
    if name == "lightning_memkit":
        # Its imports of plugins stand under TYPE_CHECKING; a test below shows that they never run.
        upward = {module for module in upward if not module.startswith("lightning_memkit.plugins")}
    assert not upward


def test_layer_check_sees_an_import_inside_a_function(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("def f():\n    from lightning.pytorch import Trainer\n    return Trainer\n")
    assert "lightning.pytorch" in imports_of(planted)


def test_modules_import_each_other_downward_only() -> None:
    graph = {name: imports_of(path, at_import=True) & set(FILES) - {name} for name, path in FILES.items()}
    graph["lightning_memkit"] = set()
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle
    assert set(order) == set(FILES)


@pytest.mark.parametrize(
    ("file", "refused"),
    [("planted.py", True), ("memory/planted.py", True), ("plugins/planted.py", False), ("cli.py", False)],
)
def test_linter_bans_lightning_outside_plugins(file: str, refused: bool) -> None:
    code = '"""A planted import."""\n\nimport lightning.pytorch as pl\n\nprint(pl)\n'
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--stdin-filename",
        str(ROOT / PACKAGE.name / file),
        "-",
    ]
    done = subprocess.run(command, input=code, capture_output=True, text=True, cwd=ROOT)
    assert ("TID251" in done.stdout) is refused, done.stdout + done.stderr


def run_fresh(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


TRAP = """
import sys, torch
def trap(*_):
    raise SystemExit("CUDA was touched")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = torch.cuda.current_device = trap
import lightning_memkit
"""


def test_importing_the_package_loads_no_lightning_and_touches_no_cuda() -> None:
    cores = [name for name, thing in PUBLIC.items() if ".plugins." not in thing.__module__]
    done = run_fresh(
        f"{TRAP}\n[getattr(lightning_memkit, name) for name in {cores}]\n"
        f"sys.exit(str(sorted(set(sys.modules) & {LIGHTNING})) if set(sys.modules) & {LIGHTNING} else 0)"
    )
    assert done.returncode == 0, done.stderr


def test_the_traps_of_the_import_test_work() -> None:
    assert "CUDA was touched" in run_fresh(f"{TRAP}\ntorch.cuda.is_available()").stderr
    loads_lightning = f"{TRAP}\nlightning_memkit.MemoryReport\nsys.exit(int('lightning' in sys.modules))"
    assert run_fresh(loads_lightning).returncode == 1


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="MemoryBudget"):
        _ = lightning_memkit.MemoryBugdet


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_opens_with_a_sentence(name: str) -> None:
    thing = PUBLIC[name]
    assert thing.__module__.startswith("lightning_memkit")
    first = (thing.__doc__ or "").strip().partition("\n")[0]
    assert first[:1].isupper(), first
    assert first.endswith("."), first
    assert len(first.split()) >= 4, first


def type_checked_names() -> set[str]:
    """Return the names that type checkers see in the package's `__init__`."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_type_checkers_see_the_same_names() -> None:
    assert type_checked_names() == set(lightning_memkit.__all__)


def build(name: str, beside: tuple[str, ...] = ()):
    """Build a plugin with its defaults, or with what the others demand."""
    needed = NEEDED_BESIDE_RELEASE if "GradientRelease" in beside else NEEDED
    if name in ON_RANKS and OFFLOADING & set(beside):
        return PUBLIC[name](process_group_backend=fake_ranks.BACKEND)
    return PUBLIC[name](**needed.get(name, {}))


@pytest.mark.parametrize("name", KINDS)
def test_repr_rebuilds_the_plugin(name: str) -> None:
    plugin = build(name)
    # Options of their own live beside the plugin.
    again = eval(repr(plugin), vars(sys.modules[PUBLIC[name].__module__]) | PUBLIC)
    assert type(again) is PUBLIC[name]
    assert repr(again) == repr(plugin)


@pytest.mark.parametrize("name", KINDS)
def test_plugin_builds_from_yaml_and_refuses_unknown_keys(name: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--plugin", type=KINDS[name])
    init_args = NEEDED.get(name, {})
    config = {"class_path": f"lightning_memkit.{name}", "init_args": init_args}
    plugin = parser.instantiate(parser.parse_object({"plugin": config}))["plugin"]
    assert type(plugin) is PUBLIC[name]
    config["init_args"] = {**init_args, "no_such_option": 1}
    with pytest.raises(Exception, match="no_such_option"):
        parser.parse_object({"plugin": config})


class Blocks(pl.LightningModule):
    """Repeated blocks and a head over packed tokens: something for every plugin to act on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))

    def on_fit_start(self) -> None:
        self.begun = {name: value.detach().clone() for name, value in self.state_dict().items()}

    def training_step(self, batch: PackedBatch, _: int) -> torch.Tensor:
        logits = self.head(self.blocks(self.embedding(batch["input_ids"])))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        generator = torch.Generator().manual_seed(1)
        store = token_store(torch.randint(0, 16, (32, 4), generator=generator).numpy())
        packing = pack(store.lengths, 8)
        batches: Any = [collate(store, packing, range(first, first + 8)) for first in (0, 8)]
        return torch.utils.data.DataLoader(batches, batch_size=None)


def where(plugins: list) -> dict:
    """The Trainer's arguments for the device: a CPU, or one whose memory isn't the host's where that matters."""
    strategy = next((plugin for plugin in plugins if isinstance(plugin, Strategy)), "auto")
    if type(strategy).__name__ in ON_RANKS and OFFLOADING & {type(plugin).__name__ for plugin in plugins}:
        return {"strategy": strategy, **fake_ranks.on_fake_ranks(int(os.environ["WORLD_SIZE"]))}
    if not OFFLOADING & {type(plugin).__name__ for plugin in plugins}:
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        return {"accelerator": "cpu", "devices": ranks, "strategy": strategy}
    if isinstance(strategy, Strategy):
        return {"strategy": lightning_memkit.OnDeviceStrategy("fake:0", FakeAccelerator()), "devices": 1}
    return on_fake_device()


def give_weights(plugin: InitialWeights, folder: Path) -> dict[str, torch.Tensor]:
    """Let it start from a file of values that no module here is initialised with; each rank has its own."""
    folder.mkdir(parents=True, exist_ok=True)
    plugin.source = str(folder / f"{os.environ.get('RANK', 0)}.safetensors")
    torch.manual_seed(2)
    values = Blocks().state_dict()
    save_file(values, plugin.source)
    return values


def quiet_trainer(plugins: list[Any], folder: Path, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[plugin for plugin in plugins if isinstance(plugin, pl.Callback)],
        plugins=[plugin for plugin in plugins if isinstance(plugin, (Precision, CheckpointIO))],
        **{"max_epochs": 1, **where(plugins), **options},
    )


def fit(names: tuple[str, ...], folder: Path, epochs: int, resume: Path | None = None):
    """Train `Blocks` with these plugins; return the last checkpoint and the weights."""
    plugins = [build(name, names) for name in names]
    given = [give_weights(plugin, folder) for plugin in plugins if isinstance(plugin, InitialWeights)]
    torch.manual_seed(0)
    trainer = quiet_trainer(plugins, folder, max_epochs=epochs)
    model = Blocks()
    if names in COMBINATIONS_ON_FAKE_RANKS:
        model.to("fake")  # torch's shards can't be moved there from the CPU
    trainer.fit(model, ckpt_path=resume)
    for name, value in given[0].items() if given and resume is None else ():
        assert torch.allclose(whole(model.begun[name]).cpu().float(), value, rtol=2**-7, atol=0), name
    path = folder / f"{epochs}.ckpt"
    trainer.save_checkpoint(path)
    return path, {key: value.clone() for key, value in model.state_dict().items()}


def sampled(names: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    """Of pairs those with PureBF16Precision, and half of those with MemoryBudget; `slow` has the others."""
    if len(names) != 2 or "PureBF16Precision" in names:
        return []
    return [pytest.mark.sampled(2) if "MemoryBudget" in names else pytest.mark.slow]


@pytest.mark.parametrize(
    "names", [pytest.param(names, marks=sampled(names)) for names in COMBINATIONS], ids="+".join
)
def test_plugins_train_and_resume_bitwise(names: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with fake_device() if OFFLOADING & set(names) else nullcontext():
        _, straight = fit(names, tmp_path / "straight", 2)
        half, begun = fit(names, tmp_path / "half", 1)
        _, resumed = fit(names, tmp_path / "half", 2, resume=half)
    assert any(not torch.equal(begun[key], straight[key]) for key in straight)
    assert all(torch.equal(resumed[key], straight[key]) for key in straight)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_plugins_train_and_resume_bitwise_on_two_ranks(tmp_path: Path, every: int) -> None:
    done = run_on_ranks("tests.two_ranks_pairs", str(tmp_path), str(every))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    trained = (*COMBINATIONS_ON_RANKS[::every], *COMBINATIONS_ON_FAKE_RANKS[::every])
    assert found == {"+".join(names): "" for names in trained}


def test_the_page_on_combining_shows_the_pairs_that_are_tested() -> None:
    page = (ROOT / "docs" / "combining.md").read_text()
    header, _, *rows = re.findall(r"^\|(.+)\|$", page, re.MULTILINE)
    across = re.findall(r"\w+", header)
    shown = set()
    for row in rows:
        down, *cells = (cell.strip(" `") for cell in row.split("|"))
        shown |= {
            frozenset((down, other)) for other, cell in zip(across, cells, strict=True) if cell == "tested"
        }
    tested = (*COMBINATIONS, *COMBINATIONS_ON_RANKS, *COMBINATIONS_ON_FAKE_RANKS)
    assert shown == {frozenset(pair) for pair in tested if len(pair) == 2}


def test_version_is_the_same_everywhere() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert lightning_memkit.__version__ == declared[1]
    assert f"## [{declared[1]}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.skipif(not HAS_SOURCES, reason="what is tested is a wheel; it is built from the sources")
def test_wheel_holds_every_file_and_the_type_marker(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    # The page's template and what it includes, too.
    assert {path.relative_to(PACKAGE.parent).as_posix() for path in files} <= held
    assert "lightning_memkit/py.typed" in held
    assert {name.split("/")[0] for name in held if not name.split("/")[0].endswith(".dist-info")} == {
        PACKAGE.name
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(4))
def test_every_module_imports_by_itself(first: int) -> None:
    """A module that only works after another was imported fails for whoever imports it first."""
    # Each import runs in a fork of one interpreter that holds torch and Lightning already: seconds.
    code = f"""
import importlib, os, torch, lightning.pytorch
failed = []
for name in {list(FILES)[first::4]}:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(name, repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    failed += [name] if os.waitpid(child, 0)[1] else []
raise SystemExit(len(failed))
"""
    done = run_fresh(code)
    assert done.returncode == 0, done.stdout + done.stderr
