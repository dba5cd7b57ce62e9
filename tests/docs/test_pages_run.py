"""Commands and code of the documentation, run in page order in a prepared folder, with few steps of a tiny model.

A page is run as a whole, because its later blocks use what the earlier ones wrote. `cheap` in `doc_commands.py` has the
settings that make a command short. `compile` is only parsed (`test_code_blocks.py`): it compiles for minutes.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import doc_commands, doc_folder, doc_pages, helpers
from support.devices import one_device  # noqa: F401
from support.doc_pages import Block

from bert_jax import cli

QUICK = {"docs/reference/file_formats.md"}
"""Pages that `make test` runs; `make test-docs` runs all."""
OPTIONAL = {"transformers", "torch", "grain", "wandb", "sklearn", "gcsfs", "apache_beam"}
"""Packages that a block may import and that may be absent."""
PAGES = [
    pytest.param(page, id=doc_pages.name(page), marks=() if doc_pages.name(page) in QUICK else pytest.mark.long)
    for page in [*doc_pages.PAGES, *doc_pages.OTHER_PAGES]
    if any(block.is_run for block in doc_pages.read_blocks(page))
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> doc_folder.Store:
    return doc_folder.Store(tmp_path_factory.mktemp("store"))


def exit_status(words: list[str]) -> Any:
    """Runs a command here; `--help` and the like end the program."""
    try:
        return cli.main(words)
    except SystemExit as end:
        return end.code


class PageRun:
    """Runs the blocks of a page in a folder.

    `fresh` are the prepared items that no command of the page has written yet: a command that writes one finds its
    place free, as a reader's is.
    """

    def __init__(self, folder: Path, fresh: set[str]):
        self._folder = folder
        self._fresh = fresh
        self._names: dict = {"__name__": "__main__"}
        self._config = ""  # source of the page's last get_config()
        self.missing: set[str] = set()

    def run(self, block: Block) -> None:
        if block.language == "python":
            self._run_python(block)
        else:
            self._run_shell(block)

    def _run_python(self, block: Block) -> None:
        if "def get_config(" in block.text:
            self._config = block.text
        try:
            exec(compile(block.text, str(block), "exec"), self._names)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL:
                raise
            self.missing.add(str(error.name))

    def _run_shell(self, block: Block) -> None:
        commands = doc_commands.commands(block.shell)
        for words in commands:
            self._make_room(words)
            self._write_config(words)
        if is_plain(block.shell, commands) and commands[0][0] != "check":  # which wants devices of its own
            for words in commands:
                if words[0] != "compile" or not any(word.startswith("--topology") for word in words):
                    assert exit_status(doc_commands.cheap(words)) == 0, f"{block}: {words}"
            return
        programs = self._folder / ".programs"
        doc_commands.write_program(programs, doc_folder.TESTS)
        environment = helpers.child_environment(PATH=f"{programs}:{os.environ['PATH']}")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{block}\n{block.text}\n{done.stdout}\n{done.stderr}"

    def _make_room(self, words: list[str]) -> None:
        for item in sorted(self._fresh):
            if re.search(rf"--(output|workdir)[= ]{re.escape(item)}/?(\s|$)", " ".join(words)):
                self._fresh.remove(item)
                path = self._folder / item
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                Path(f"{path}.json").unlink(missing_ok=True)

    def _write_config(self, words: list[str]) -> None:
        """Writes the page's own config to the file that a command names, if there is none."""
        for word in words:
            found = re.search(r"^(?:--config=)?([\w./-]+\.py)(?::|$)", word)
            if found and self._config and not (self._folder / found[1]).exists():
                (self._folder / found[1]).parent.mkdir(parents=True, exist_ok=True)
                (self._folder / found[1]).write_text(self._config)


def is_plain(shell: str, commands: list[list[str]]) -> bool:
    """Returns True if shell code is `bert-jax` commands alone, without operators, variables or unquoted globs."""
    code = doc_commands.without_comments(shell).replace("\\\n", " ")
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", code)
    lines = [line for line in unquoted.splitlines() if line.strip()]
    starts = all(line.startswith("bert-jax ") for line in lines)
    return starts and len(lines) == len(commands) and not re.search(r"[$`~*?{}|;&<>]", unquoted)


@pytest.mark.parametrize("page", PAGES)
def test_page(page: Path, store: doc_folder.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    blocks = [block for block in doc_pages.read_blocks(page) if block.is_run]
    run = PageRun(tmp_path, store.copy(blocks, tmp_path))
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        run.run(block)
    if run.missing:
        pytest.skip(f"blocks were not run: {', '.join(sorted(run.missing))} not installed")
