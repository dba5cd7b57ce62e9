"""Code blocks of the documentation: their languages and markers, and commands that the command line accepts."""

import subprocess

import pytest
from support import doc_commands, doc_pages
from support.doc_pages import Block

BLOCKS = [block for page in [*doc_pages.PAGES, *doc_pages.OTHER_PAGES] for block in doc_pages.read_blocks(page)]
SHELL = [block for block in BLOCKS if block.shell]


def test_there_are_pages_and_blocks():
    assert len(doc_pages.PAGES) >= 4
    assert SHELL


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


@pytest.mark.parametrize(
    ("shell", "expected"),
    [
        ("bert-jax inspect data  # it's a comment", [["inspect", "data"]]),
        ("X=1 bert-jax report a \\\n  b --output 'c d.png' | head", [["report", "a", "b", "--output", "c d.png"]]),
        ("srun bert-jax a && bert-jax b > c\nls; .venv/bin/bert-jax d", [["a"], ["b"], ["d"]]),
        ("bert-jax a --config.phases=\"({'steps': 1}, \n {'steps': -1})\"\nls",
         [["a", "--config.phases=({'steps': 1}, \n {'steps': -1})"]]),
        ("bert-jax a --samples 2 2>&1 | grep b", [["a", "--samples", "2"]]),
        ("# bert-jax no\necho '# it' # \"\nbert-jax a $X", [["a", "$X"]]),
    ],
)  # fmt: skip
def test_commands_are_found_in_shell_code(shell: str, expected: list[list[str]]):
    assert doc_commands.commands(shell) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["pretrain", "--config=bert_base", "--workdir=runs/base", "--config.no_such_key=1"],
        ["pretrain", "--config=no_such_config", "--workdir=runs/base"],
        ["finetune", "--config=finetune/text", "--workdir=w", "--config.total_steps=3"],
        ["prepare", "--input", "text", "--vocab", "tokenizer.json"],
        ["study", "studies/table5", "--workdir=w", "--config.finetuning.no_such_key=1"],
        ["no-such-command", "..."],
    ],
)
def test_a_command_that_would_be_refused_fails(words: list[str]):
    assert not doc_commands.accepts(words)


def test_blocks_are_read_with_their_markers(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doc_pages, "REPOSITORY", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n<!-- not run: no network -->\n```bash\nwget x\n```\n\n- in a list:\n\n  ```python\n  a = 1\n"
        "  ```\n\n<!-- skip -->\n````text\n```bash\n````\n\n```\nnone\n```\n```{code-cell}\n!bert-jax a\nb = 1\n```\n"
    )
    blocks = list(doc_pages.read_blocks(page))
    assert [block.language for block in blocks] == ["bash", "python", "text", "", "{code-cell}"]
    assert [block.is_run for block in blocks] == [False, True, False, False, False]
    assert [block.is_marked for block in blocks] == [True, False, False, False, False]
    assert blocks[2].above == "<!-- skip -->"
    assert blocks[1].text == "a = 1\n"
    assert str(blocks[0]) == "page.md:4"
    assert blocks[4].shell == "bert-jax a"
