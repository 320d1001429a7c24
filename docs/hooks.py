"""What mkdocs does to the pages: home is the README, benchmark tables come from results/*.json."""

import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = "<!-- benchmark tables -->"
MATRIX = "<!-- model matrix -->"  # stands on the page about combining, and nowhere else
CARD = "<!-- verified on a card -->"
NOT_YET = "not yet"
STAGES = {
    "imports": "every module imports without the packages that a bare machine lacks",
    "facts": "what predictions assume of the card: cuBLAS, the kernels of attention, copies, launches",
    "correctness": "the tests marked `gpu`: recovery, caps, offloads, kernels, policies, contamination",
    "sanitizer": "compute-sanitizer finds no wrong access in the Triton kernels",
    "quick": "`python -m benchmarks.gpu --quick`",
    "full-1": "`python -m benchmarks.gpu`: steps, losses, activations, offload, attention",
    "full-2": "`python -m benchmarks.gpu`: predictions and budgets",
    "full-3": "`python -m benchmarks.gpu`: training end to end",
    "suite-visible": "the CPU's test suite beside a visible card",
    "suite-hidden": "the CPU's test suite on that machine, the card hidden",
}


def on_page_markdown(markdown: str, page, **_) -> str:
    """Fill in the README, the changelog and the tables."""
    if page.file.src_uri == "index.md":
        return _home((ROOT / "README.md").read_text(encoding="utf-8"))
    if page.file.src_uri == "changelog.md":
        return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    results = ROOT / "benchmarks" / "results"
    made = {TABLES: benchmark_tables, MATRIX: model_matrix, CARD: verified_on_a_card}
    for mark, table in made.items():
        if mark in markdown:
            markdown = markdown.replace(mark, table(results))
    return markdown


def _home(readme: str) -> str:
    """Links in the README start at the repository's root: those to docs/ lead to pages, others to plain text."""
    plain = re.sub(r"\[([^]]+)\]\((?!docs/|https?:|#)[^)]+\)", r"\1", readme)
    return plain.replace("](docs/", "](").replace('"docs/pictures/', '"pictures/')


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


def verified_on_a_card(results: Path) -> str:
    """Return when each stage of scripts/first_card.sh and each GPU benchmark was last run on a card, or "not yet"."""
    notes = results / "stages.jsonl"
    lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    last = {note["stage"]: note for note in map(json.loads, lines) if note["card"] != "none"}
    stages = [
        {"stage": f"`{stage}`", "what it shows": what, "last seen": _seen(last.get(stage))}
        for stage, what in STAGES.items()
    ]
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    of_cards = [one for one in contents if one["hardware"]["gpu"]]
    on_cards = {
        one["name"]: one for one in sorted(of_cards, key=lambda one: not one["quick"])
    }  # full ones last
    benchmarks = [
        {"benchmark": f"`{name}`", "last run": _ran(on_cards.get(name))} for name in _with_a_gpu_part()
    ]
    return f"{_table(stages)}\n\n{_table(benchmarks)}"


def _seen(note: dict | None) -> str:
    if note is None:
        return NOT_YET
    return (
        f"{note['status']} on {note['date']}, {note['card']}, torch {note['torch']}, `{note['commit'][:10]}`"
    )


def _ran(content: dict | None) -> str:
    if content is None:
        return NOT_YET
    gpu, torch = content["hardware"]["gpu"], content["versions"]["torch"]
    rows = [row["result"] for row in content.get("rows", ()) if "result" in row]
    passed = sum(one == "ok" for one in rows)
    ran = f", {passed} of {passed + sum(one.startswith(('failed', 'limit missed')) for one in rows)} rows passed"
    size = " (quick)" if content["quick"] else ""
    return f"{content['date']}{size}, {gpu}, torch {torch}, `{content['commit'][:10]}`{ran if rows else ''}"


def _with_a_gpu_part() -> list[str]:
    """The benchmarks that define rows for a GPU; read, not imported."""
    found = []
    for path in sorted((ROOT / "benchmarks").glob("[!_]*.py")):
        functions = {
            n.name for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, ast.FunctionDef)
        }
        if functions & {"gpu_rows", "run_gpu"} and path.stem != "gpu":
            found.append(path.stem)
    return found


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
