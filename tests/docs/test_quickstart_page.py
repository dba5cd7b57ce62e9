"""The notebook of docs/quickstart.md: a valid notebook, whose cells run from top to bottom in small."""

import re
import shlex
from pathlib import Path

import pytest
from support import doc_commands, doc_pages, helpers
from support.devices import one_device  # noqa: F401
from support.doc_pages import Block

from bert_jax import cli

PAGE = doc_pages.DOCS / "quickstart.md"
CELLS = [block for block in doc_pages.read_blocks(PAGE) if block.language == "{code-cell}"]
SHORT = {
    "model.hidden_size": 32, "model.num_attention_heads": 2, "model.intermediate_size": 64, "total_steps": 8,
    "optimizer.warmup_steps": 1, "eval_every_steps": 4, "eval_batches": 1,
}  # fmt: skip


def cheap(words: list[str]) -> list[str]:
    """Returns a command of the page on a small text, with few steps."""
    if "--input" in words:
        first = words.index("--input") + 1
        last = next(at for at in range(first, len(words)) if words[at].startswith("--"))
        words = [*words[:first], "text.txt", *words[last:]]
    return [*words, *helpers.flags(SHORT)] if words[0] == "pretrain" else words


def test_the_page_and_the_script_have_the_same_recipe():
    script = (helpers.REPOSITORY / "launch" / "quickstart.sh").read_text()
    commands = [words for cell in CELLS for words in doc_commands.commands(cell.shell)]
    by_name = {words[0]: words for words in commands}
    assert by_name.keys() >= {"vocab", "prepare", "pretrain", "export"}
    assert "--config=quickstart" in by_name["pretrain"]
    for option in ("--size", "--eval_fraction", "--max_line_repeats"):
        words = by_name["vocab" if option == "--size" else "prepare"]
        assert shlex.join([option, words[words.index(option) + 1]]) in script
    packages = next(re.findall(r'"made/text", ([^]]*)\]', cell.text)[0] for cell in CELLS if "python_docs" in cell.text)
    assert " ".join(re.findall(r"\w+", packages)) in script


@pytest.mark.long
def test_cells_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    (tmp_path / "text.txt").write_text(helpers.make_corpus(100))
    names: dict = {"__name__": "__main__"}
    for cell in CELLS:
        run(cell, names)
    assert (tmp_path / "made" / "hf" / "model.safetensors").exists()
    assert {row["step"] for row in names["held_out"]} == {4, 8}


def run(cell: Block, names: dict) -> None:
    for words in doc_commands.commands(cell.shell):
        assert cli.main(cheap(words)) == 0, f"{cell}: {words}"
    if not cell.shell:
        exec(compile(cell.text, str(cell), "exec"), names)
