"""Code blocks of the documentation: their languages and markers, and commands that the command line accepts."""

import subprocess

import pytest
from support import doc_commands, doc_pages
from support.doc_pages import Block

BLOCKS = [block for page in [*doc_pages.PAGES, *doc_pages.OTHER_PAGES] for block in doc_pages.read_blocks(page)]
SHELL = [block for block in BLOCKS if block.shell]


@pytest.mark.parametrize("page", [*doc_pages.PAGES, doc_pages.OTHER_PAGES[1]], ids=doc_pages.name)
def test_blocks_have_a_language_and_known_markers(page):
    for block in doc_pages.read_blocks(page):
        assert block.language in doc_pages.LANGUAGES or block.language.startswith("{"), str(block)
        assert not block.above or block.is_marked, f"{block}: {block.above}"
        assert not block.is_marked or block.language in ("bash", "python"), f"{block}: nothing would run"


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell_blocks_are_valid_and_their_commands_parse(block: Block):
    done = subprocess.run(["bash", "-n"], input=block.shell, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for words in doc_commands.commands(block.shell):
        assert doc_commands.accepts(words, doc_pages.REPOSITORY), words
