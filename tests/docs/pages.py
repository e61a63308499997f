"""The pages that a user reads, the blocks in them, and the commands that they show."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPOSITORY

README = REPOSITORY / "README.md"
PAGES = [README, *sorted(REPOSITORY.glob("docs/*.md"))]
PAGES += [REPOSITORY / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "experiments/README.md", "logs/README.md")]


def text_of(name: str) -> str:
    """The page of a name such as docs/plan.md."""
    return (REPOSITORY / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    """The blocks of a page that are marked as of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(name), re.DOTALL | re.MULTILINE)


def shown_in(name: str) -> Iterator[list[str]]:
    """The words of every command that a page shows: in its sh blocks and in its text."""
    lines = [line for block in blocks(name, "sh") for line in block.splitlines()]
    text = re.sub(r"^```.*?^```", "", text_of(name), flags=re.DOTALL | re.MULTILINE)
    # A verb alone, as in `hpc-gpt data`, is its name.
    lines += re.findall(r"`((?:hpc-gpt [a-z-]+|python(?: -m)?|pytest|make) [a-z0-9-]{2}[^`…]+)`", text)
    for line in lines:
        lines_of_it = [line, *re.findall(r"\$\((hpc-gpt [^)]*)\)", line)]
        for each in lines_of_it:
            words: list[str] = []
            for word in [*shlex.split(each, comments=True), "&&"]:
                if word not in ("&&", "|"):
                    words.append(word)
                    continue
                yield words[: words.index(">")] if ">" in words else words
                words = []


def shown(program: str) -> list[tuple[str, tuple[str, ...]]]:
    """(page, words after the program) of every command of that program, each once."""
    found: dict[tuple[str, ...], str] = {}
    for path in PAGES:
        name = str(path.relative_to(REPOSITORY))
        for words in shown_in(name):
            if words[:1] == [program]:
                found.setdefault(tuple(words[1:]), name)
    return [(name, words) for words, name in found.items()]


def anchors_of(path: Path) -> set[str]:
    """The anchors of a page's headings, as a repository's viewer makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
