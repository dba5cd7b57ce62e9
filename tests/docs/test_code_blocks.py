"""Blocks and links of the documentation: languages and markers, commands that parse, files that exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support import docs, helpers

LANGUAGES = {"bash", "python", "text", "json", "yaml", "toml", "diff", "dockerfile"}
BLOCKS = [block for page in [*docs.PAGES, *docs.OTHER_PAGES] for block in docs.read_blocks(page)]


def test_blocks_have_a_language_and_known_markers():
    for block in BLOCKS:
        assert block.language in LANGUAGES or block.language[:1] == "{" or block.page == docs.OTHER_PAGES[0], str(block)
        assert not block.above or re.fullmatch(r"<!-- not run: \S.* -->", block.above), f"{block}: {block.above}"
        assert not block.above or block.language in ("bash", "python"), f"{block}: nothing would run"


@pytest.mark.parametrize("page", [*docs.PAGES, *docs.OTHER_PAGES], ids=docs.name)
def test_shell_blocks_are_valid_and_their_commands_parse(page: Path):
    shell = [block.shell for block in docs.read_blocks(page) if block.shell]
    done = subprocess.run(["bash", "-n"], input="\n".join(shell), text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for words in [words for text in shell for words in docs.commands(text)]:
        docs.check(words)


def test_the_quickstart_page_and_the_script_have_the_same_recipe():
    script = (helpers.REPOSITORY / "launch" / "quickstart.sh").read_text()
    cells = list(docs.read_blocks(docs.DOCS / "quickstart.md"))
    by_name = {words[0]: words for cell in cells for words in docs.commands(cell.shell)}
    assert "--config=quickstart" in by_name["pretrain"]
    for command, option in (("vocab", "--size"), ("prepare", "--eval_fraction"), ("prepare", "--max_line_repeats")):
        words = by_name[command]
        assert shlex.join([option, words[words.index(option) + 1]]) in script
    packages = next(found for cell in cells for found in re.findall(r'"made/text", ([^]]*)\]', cell.text))
    assert " ".join(re.findall(r"\w+", packages)) in script


@pytest.mark.parametrize("page", [*docs.OTHER_PAGES, helpers.REPOSITORY / "CONTRIBUTING.md"], ids=docs.name)
def test_links_of_pages_outside_of_the_site_lead_to_files(page: Path):
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s:]+)\)", page.read_text())]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


def test_tests_that_pages_name_exist():
    named = {found for page in docs.PAGES for found in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text())}
    assert named
    tests = helpers.REPOSITORY / "tests"
    assert [found for found in named if f"def {found[1]}(" not in (tests / found[0]).read_text()] == []
