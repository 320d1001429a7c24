"""Copies the configs of commit a224f13 to yaml/: its files for `memkit`, and the fences of its pages.

`python tests/data/a224f13/copy_yaml.py`, within the repository.
"""

import re
import subprocess
from pathlib import Path

COMMIT = "a224f13"
TO = Path(__file__).resolve().parent / "yaml"
FILES = re.compile(r"(examples|benchmarks)/.*\.ya?ml")
PAGES = re.compile(r"(README|docs/.*)\.md")
FENCE = re.compile(r"^(?P<indent> *)```yaml[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
IS_CONFIG = re.compile(r"^(trainer|model|data|optimizer):", re.MULTILINE)


def git(*words: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *words], cwd=TO.parent, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Write a file a config; a fence is named by its page and line."""
    for name in git("ls-tree", "-r", "--full-tree", "--name-only", COMMIT).splitlines():
        if FILES.fullmatch(name):
            keep(name, git("show", f"{COMMIT}:{name}"))
        elif PAGES.fullmatch(name):
            page = git("show", f"{COMMIT}:{name}")
            for match in FENCE.finditer(page):
                code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
                line = page.count("\n", 0, match.start("code")) + 1
                if IS_CONFIG.search(code):
                    keep(f"{name.removesuffix('.md')}-{line}.yaml", code)


def keep(name: str, text: str) -> None:
    """Write one config."""
    (TO / name).parent.mkdir(parents=True, exist_ok=True)
    (TO / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
