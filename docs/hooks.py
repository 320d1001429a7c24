"""What mkdocs does to the pages: home is the README, benchmark tables come from results/*.json."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = "<!-- benchmark tables -->"
MATRIX = "<!-- model matrix -->"  # stands on the page about combining, and nowhere else


def on_page_markdown(markdown: str, page, **_) -> str:
    """Fill in the README, the changelog and the tables."""
    if page.file.src_uri == "index.md":
        return _home((ROOT / "README.md").read_text(encoding="utf-8"))
    if page.file.src_uri == "changelog.md":
        return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    results = ROOT / "benchmarks" / "results"
    return markdown.replace(TABLES, benchmark_tables(results)).replace(MATRIX, model_matrix(results))


def _home(readme: str) -> str:
    """Links in the README start at the repository's root: those to docs/ lead to pages, others to plain text."""
    return re.sub(r"\[([^]]+)\]\((?!docs/|https?:)[^)]+\)", r"\1", readme).replace("](docs/", "](")


def benchmark_tables(results: Path) -> str:
    """Return one section a full-size result file; quick runs are for trying out and are left out."""
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    sections = [_section(one) for one in contents if not one["quick"] and one["name"] != "matrix"]
    return "\n\n".join(sections) or "No result has been committed yet."


def model_matrix(results: Path) -> str:
    """Return the matrix of models and plugins, its counts, and what was said in its cells, by number."""
    paths = [path for path in sorted(results.glob("matrix-*.json")) if "quick" not in path.name]
    if not paths:
        return "No result has been committed yet."
    content = json.loads(paths[-1].read_text(encoding="utf-8"))
    counts = ", ".join(f"{value} {name}" for name, value in content["figures"].items())
    said = [f"{number}. {re.sub(r'^[0-9]+: ', '', note)}" for number, note in enumerate(content["notes"], 1)]
    made = f"`{content['command']}`, {content['date']}, commit `{content['commit'][:10]}`: {counts}."
    return "\n\n".join([_table(content["rows"]), made, "\n".join(said)])


def _section(content: dict) -> str:
    figures = [{"figure": f"`{name}`", "value": value} for name, value in content["figures"].items()]
    hardware = content["hardware"]
    versions = content["versions"]
    lines = [
        f"## {content['name']} on {hardware['gpu'] or hardware['cpu']}",
        "**Void: a step timed against itself was off by more than 1 %.**" if content["void"] else "",
        _table(content["rows"]),
        *(f"Note: {note}" for note in content["notes"]),
        _table(figures),
        f"`{content['command']}` took {content['seconds']:.0f} s on {content['date']}, commit "
        f"`{content['commit'][:10]}{'-dirty' if content['commit'].endswith('-dirty') else ''}`, "
        f"{hardware['cores']} CPU cores, {content['threads']} thread(s), torch {versions['torch']}, "
        f"Lightning {versions['lightning']}.",
    ]
    return "\n\n".join(line for line in lines if line)


def _table(rows: list[dict]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        columns,
        ["---"] * len(columns),
        *([_cell(row.get(name, "")) for name in columns] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: object) -> str:
    return (f"{value:.6g}" if isinstance(value, float) else str(value)).replace("|", "\\|")
