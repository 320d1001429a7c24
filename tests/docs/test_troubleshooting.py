"""Troubleshooting quotes messages that the sources hold, and names every error that users meet."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import lightning_memkit
from lightning_memkit.micro_batching.shares.foreseen import ForeseenWronglyError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(lightning_memkit.__file__).parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# Code with a space in the first column of a table is a quoted message; other code there is a name.
QUOTED = [
    quoted
    for line in PAGE.splitlines()
    if line.startswith("| ")
    for quoted in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    if " " in quoted
]
INNER = (
    "StepFailedError",
    "PassedOverError",
    "NothingFitsError",
    "UnavailableError",
    "JoinError",
    "CannotCatchUpError",
)
INNER += ("UnwritableError", "ConfigError")  # caught, or printed without their name
INNER += ("UnseenValueError", "ForeseenWronglyError")  # the batch runs again
INNER += ("NothingCountsError", "UntoldTermError")  # other rows are taken
INNER += ("NotFiniteError", "NotCopiedError")  # another way is taken


@cache
def messages() -> tuple[str, ...]:
    """Every text of the package's code that is no docstring, with a mark where a value is filled in."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inner = {
            id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values
        }
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [one.value if isinstance(one, ast.Constant) else "\0" for one in node.values]
                found.append("".join(map(str, parts)))
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in inner | docs
            ):
                found.append(node.value)
    return tuple(found)


def occurs(quoted: str) -> bool:
    """Whether one message holds all of the quoted fragments in this order."""
    fragments = [fragment.strip() for fragment in quoted.split("…")]
    pattern = re.compile(".*".join(map(re.escape, filter(None, fragments))), re.DOTALL)
    return any(pattern.search(message) for message in messages())


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_in_the_sources(quoted: str) -> None:
    assert occurs(quoted), f"{quoted!r} is in no message of the package"


def test_a_message_that_nobody_raises_is_noticed() -> None:
    assert not occurs("A micro-batch of … needs … at its valley")
    assert not occurs("more than the budget's usable … A micro-batch of")
    assert len(QUOTED) > 60


def subclasses_of(error: type) -> set[str]:
    """The names of all that derives from it, at any depth."""
    return {error.__name__}.union(*map(subclasses_of, error.__subclasses__()))


def test_every_error_that_users_meet_is_named() -> None:
    """Each error class of the package is on the page, unless it never leaves the package."""
    classes = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(
            r"^class ([A-Z]\w+(?:Error|Warning))\(", path.read_text(encoding="utf-8"), re.M
        )
    }
    assert "BudgetError" in classes
    assert not classes - set(re.findall(r"\w+", PAGE)) - set(INNER) - subclasses_of(ForeseenWronglyError)
