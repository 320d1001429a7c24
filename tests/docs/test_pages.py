"""README and docs: every python fence runs, every config parses, and the tables match the results."""

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import lightning_memkit
from tests.processes import ROOT, run_script
from tests.testing.fake_device import compiler

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Fence:
    """A block of code in a page; `line` is that of its first line of code, from 1."""

    page: Path
    line: int
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fences(page: Path, language: str) -> list[Fence]:
    """Return the page's fences in one language, without their indentation."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        if match["language"] == language:
            code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
            found.append(Fence(page, text.count("\n", 0, match.start("code")) + 1, code))
    return found


def as_script(page: Path) -> str:
    """Return the page's python fences as one script in which each line has the number it has in the page."""
    lines: list[str] = []
    for fence in fences(page, "python"):
        lines += [""] * (fence.line - 1 - len(lines)) + fence.code.splitlines()
    return "\n".join(lines) + "\n"


ON_AN_ACCELERATOR = """
import runpy
from tests.testing.fake_device import fake_device
with fake_device():
    runpy.run_path({path!r}, run_name="__main__")
"""
PYTHON_PAGES = [page for page in PAGES if fences(page, "python")]
LONG_PAGES = [ROOT / "docs" / "techniques" / "anatomy.md"]  # predictions of 24 and 64 layers: a minute
CONFIGS = [
    fence
    for page in PAGES
    for fence in fences(page, "yaml")
    if re.search(r"^(trainer|model|data|optimizer):", fence.code, re.MULTILINE)
]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page in LONG_PAGES else page for page in PYTHON_PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_python_in_page_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text(as_script(page), encoding="utf-8")
    if "torch.accelerator." in script.read_text(encoding="utf-8"):  # else its figures would be skipped
        if compiler() is None:
            pytest.skip("the device 'fake' needs a C++ compiler")
        path, script = script, tmp_path / "on_an_accelerator.py"
        script.write_text(ON_AN_ACCELERATOR.format(path=str(path)), encoding="utf-8")
    done = run_script(script, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("fence", CONFIGS, ids=lambda fence: fence.place)
def test_config_in_page_parses(
    fence: Fence, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in modules_in(fence.page).items():  # files of the page, whose classes its configs name
        (tmp_path / name).write_text(code, encoding="utf-8")
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    assert parse_config(fence.code, tmp_path) == 0, capsys.readouterr().err


def modules_in(page: Path) -> dict[str, str]:
    """Return the python files that a page shows: fences with a title."""
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL))


def test_config_check_refuses_an_unknown_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_config("trainer:\n  max_step: 3\n", tmp_path) != 0
    assert "max_step" in capsys.readouterr().err


def parse_config(text: str, folder: Path) -> int:
    """Return the exit code of `memkit fit --print_config`, with a model where the config names none."""
    from lightning_memkit.cli import main

    given = yaml.safe_load(text)
    given.setdefault("model", {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"})
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(given), encoding="utf-8")
    return main(["fit", "--config", str(config), "--print_config"])


def test_a_failing_fence_fails_with_the_line_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n```python\nx = 1\n```\n\n!!! note\n\n    ```python\n    assert x == 2\n    ```\n"
    )
    script = tmp_path / "page.py"
    script.write_text(as_script(page))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert "line 10" in done.stderr
    assert "AssertionError" in done.stderr


def test_docs_hold_code_that_is_run() -> None:
    assert ROOT / "README.md" in PYTHON_PAGES
    assert CONFIGS


def load_hooks():
    """Load docs/hooks.py as mkdocs does."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_benchmark_tables_show_figures_command_commit_and_voidness(tmp_path: Path) -> None:
    content = {
        "name": "packing",
        "quick": False,
        "void": True,
        "figures": {"speedup_vs_trl": 130.25},
        "rows": [{"what": "a|b", "ratio": 0.5}, {"what": "c"}],
        "notes": ["Odd."],
        "command": "python -m benchmarks packing",
        "threads": 1,
        "seconds": 12.0,
        "date": "2026-01-02",
        "commit": "0123456789abcdef-dirty",
        "hardware": {"slug": "cpu", "cpu": "Some CPU", "cores": 2, "gpu": None},
        "versions": {"torch": "2.13.0", "lightning": "2.6.6"},
    }
    (tmp_path / "packing-cpu.json").write_text(json.dumps(content))
    (tmp_path / "packing-quick-cpu.json").write_text(json.dumps({**content, "quick": True, "name": "small"}))
    tables = load_hooks().benchmark_tables(tmp_path)
    assert "| `speedup_vs_trl` | 130.25 |" in tables
    assert "| a\\|b | 0.5 |" in tables
    assert "| c |  |" in tables
    assert "Void" in tables
    assert "0123456789-dirty" in tables
    assert "python -m benchmarks packing" in tables
    assert "small" not in tables


def test_readme_shows_the_peaks_that_were_measured() -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("before_and_after-[!q]*.json")
    figures = json.loads(path.read_text())["figures"]
    measured = [value for name, value in figures.items() if name.endswith("_peak_mib")]
    shown = re.findall(r"^\| [^|]+ \| (\d+) \| [\d.]+ % \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [int(number) for number in shown] == [round(number) for number in measured]


def test_api_names_the_module_of_what_the_package_does_not_export() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    entries = re.findall(r"^::: (\S+)\n( +options: .*show_root_full_path: true)?", page, re.MULTILINE)
    assert len(entries) > 60
    for path, shown in entries:
        assert (path.rpartition(".")[2] in lightning_memkit.__all__) != bool(shown), path
    again = page[page.index("are imported from `lightning_memkit` again") : page.index("## Errors")]
    assert "show_root_full_path" not in again


def test_navigation_names_every_page() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = re.findall(r"[\w/-]+\.md", json.dumps(navigation))
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])


def test_architecture_shows_the_tree_as_it_stands() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = Path(lightning_memkit.__file__).parent
    shown = set(re.findall(r"^  ([\w]+(?:\.py|/)) ", page, re.MULTILINE))
    there = {path.name for path in package.glob("*.py")} | {
        f"{path.parent.name}/" for path in package.glob("*/__init__.py")
    }
    assert shown == there
    named = set(re.findall(r"`((?:[\w]+/)+[\w]+\.py)`", page))
    assert not [name for name in named if not (package / name).exists() and not (ROOT / name).exists()]


def test_pages_name_options_that_exist() -> None:
    """`Name(option=...)` in running text: the option is one of that class or function."""
    wrong = []
    for page in PAGES:
        for name, options in re.findall(r"`(\w+)\(([^`]*)\)`", page.read_text(encoding="utf-8")):
            if name in lightning_memkit.__all__:
                known = inspect.signature(getattr(lightning_memkit, name)).parameters
                given = re.findall(r"(?:^|[(,] *)(\w+)=", options)
                wrong += [f"{page.name}: {name}({option}=)" for option in given if option not in known]
    assert not wrong


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name == "techniques"], ids=lambda page: page.stem
)
def test_a_page_that_says_bitwise_leads_to_the_modes_in_which_that_holds(page: Path) -> None:
    """On a GPU two runs of the plain program may differ. Batches are the host's alone."""
    said = re.search(r"bitwise|bit\s+for\s+bit", page.read_text(encoding="utf-8"))
    if said is not None and page.stem not in ("determinism", "packing"):
        assert "(determinism.md" in page.read_text(encoding="utf-8")
