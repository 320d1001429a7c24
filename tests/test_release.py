"""What a release is made of: one version everywhere, workflows that name what is there, a small sdist."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

import lightning_memkit

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
pytestmark = pytest.mark.skipif(
    ROOT != Path(lightning_memkit.__file__).parents[1],
    reason="what is tested is a wheel; this is of the sources",
)
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_one_version_everywhere() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert cited["version"] == lightning_memkit.__version__
    assert re.search(rf"^## \[{re.escape(lightning_memkit.__version__)}\] - ", changes, re.MULTILINE)
    assert f"pip install lightning_memkit-{lightning_memkit.__version__}-" in README.read_text(
        encoding="utf-8"
    )


def test_what_the_index_shows_has_no_link_into_the_repository(tmp_path: Path) -> None:
    (step,) = [one for one in commands(ROOT / ".github" / "workflows" / "release.yml") if "README.md" in one]
    there = tmp_path / "README.md"
    there.write_text(README.read_text(encoding="utf-8"), encoding="utf-8")
    named = {"GITHUB_REPOSITORY": "owner/name", "GITHUB_REF_NAME": "v9"}
    subprocess.run(["bash", "-euc", step], cwd=tmp_path, check=True, env=os.environ | named)
    targets = re.findall(r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"', there.read_text(encoding="utf-8"))
    found = [one or other for one, other in targets]
    assert [target for target in found if not target.startswith(("https://", "#"))] == []
    of_files = {target.partition("/v9/")[2].partition("#")[0] for target in found if "/v9/" in target}
    assert len(of_files) > 10
    assert all((ROOT / name).is_file() for name in of_files)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_files_that_are_there(workflow: Path) -> None:
    said = "\n".join(commands(workflow))
    named = re.findall(r"(?<![\w/])((?:\.ci|examples|tests|scripts)/[\w./-]+|constraints\.txt)", said)
    assert said
    assert all((ROOT / name).exists() for name in named), named


def test_the_compatibility_job_runs_every_torch_from_the_lower_bound_on() -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "compatibility.yml").read_text(encoding="utf-8"))
    listed = job["jobs"]["torch"]["strategy"]["matrix"]["torch"]
    (bound,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert listed[0] == bound
    assert pinned in listed
    numbers = [int(version.partition(".")[2]) for version in listed]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_are_complete(form: Path) -> None:
    found = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.stem == "config":
        return
    assert {"name", "description", "body"} <= set(found)
    assert all(field["attributes"]["label"] for field in found["body"])


def test_the_sdist_has_the_package_and_not_the_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as found:
        names = {name.partition("/")[2] for name in found.getnames()}
    assert {"lightning_memkit/cli.py", "README.md", "pyproject.toml", "LICENSE", "constraints.txt"} <= names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)
    assert archive.stat().st_size < 2 << 20
