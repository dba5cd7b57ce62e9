"""Pages of the documentation: their code blocks, headings and links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.helpers import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if not {"_build", "_generated"} & set(path.relative_to(DOCS).parts))
OTHER_PAGES = [REPOSITORY / "README.md", REPOSITORY / "launch" / "README.md"]

LANGUAGES = {"bash", "python", "text", "json", "yaml", "toml", "diff", "dockerfile"}
"""Languages of code blocks: bash and python are run, the others are shown."""

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}|:{3,})(?P<info>.*)$")
_NOT_RUN = re.compile(r"<!-- not run: \S.* -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
      language: the first word after the fence; "" for none. Directives are in braces: {toctree}.
      above: the line above the fence, if it is an HTML comment.
      line: number of the fence's line, from 1.
    """

    page: Path
    line: int
    language: str
    text: str
    above: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def is_run(self) -> bool:
        """True if the tests run the block."""
        return self.language in ("bash", "python") and not self.above

    @property
    def is_marked(self) -> bool:
        """True if the line above is a valid marker."""
        return bool(_NOT_RUN.fullmatch(self.above))

    @property
    def shell(self) -> str:
        """The shell commands in it: all of a bash block, or those of a notebook's cell; "" for others."""
        if self.language == "bash":
            return self.text
        if self.language != "{code-cell}":
            return ""
        if self.text.lstrip().startswith("%%bash"):
            return self.text.lstrip().removeprefix("%%bash")
        return "\n".join(re.findall(r"^!((?:.*\\\n)*.*)", self.text, re.MULTILINE))  # a \ continues a line


def name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def read_blocks(page: Path) -> Iterator[Block]:
    """Yields the fenced blocks of a page. A directive of colons holds Markdown, whose blocks are yielded instead."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        number += 1
        if opening is None or opening["fence"][0] == ":":
            continue
        start, body = number, []
        while number < len(lines) and not re.fullmatch(rf" *{re.escape(opening['fence'])}`*~* *", lines[number]):
            body.append(lines[number].removeprefix(opening["indent"]))
            number += 1
        number += 1
        above = lines[start - 2].strip() if start > 1 else ""
        language = (opening["info"].split() or [""])[0]
        yield Block(page, start, language, "\n".join(body) + "\n", above if above.startswith("<!--") else "")


def prose(page: Path) -> str:
    """Returns the text of a page with its included parts, without code."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(
        r"^```\{include\} (\S+)\n(?:.*\n)*?```$", lambda found: (page.parent / found[1]).read_text(), text,
        flags=re.MULTILINE,
    )  # fmt: skip
    text = re.sub(r"^( *)(`{3,}|~{3,}).*\n(?:.*\n)*?\1\2`*$", "", text, flags=re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def links(page: Path) -> list[str]:
    """Returns the targets of links and images, external ones included."""
    shown = re.findall(r"^ *[`:]{3,}\{(?:image|figure)\} (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    text = re.sub(r"(`+)(.+?)\1", lambda code: re.sub(r"[\[\]()]", "", code[2]), prose(page))
    inline = re.findall(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)", text)
    return shown + inline + re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page: of its headings, as GitHub and MyST make them, and explicit ones."""
    text = prose(page)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,4} +(.+?) *$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        copies = sum(other == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", other) is not None for other in found)
        found.add(f"{slug}-{copies}" if copies else slug)
    return found | set(re.findall(r"\]\{#([^}\s]+)\}", text)) | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))
