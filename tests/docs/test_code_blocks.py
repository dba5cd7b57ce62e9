"""Blocks and links of the documentation: languages and markers, commands that parse, files that exist."""

import dataclasses
import json
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support import docs, helpers

from bert_jax.data.dataset import DatasetInfo, PreparedDataset, Shard, SplitInfo
from bert_jax.data.records import decode, sequence_lengths
from bert_jax.interop.architectures import ARCHITECTURES
from bert_jax.tracking.throughput import RATES
from bert_jax.training.run import CHANGEABLE

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


# --- Reference of file formats -----------------------------------------------------------------------------------


PAGE = docs.DOCS / "reference" / "file_formats.md"
TEXT = PAGE.read_text()


def section(heading: str) -> str:
    """Returns the text below a heading, up to the next heading of its level or above."""
    level, _, title = heading.partition(" ")
    found = re.search(rf"^{level} {re.escape(title)}\n((?:.*\n)*?)(?=^#{{1,{len(level)}}} |\Z)", TEXT, re.MULTILINE)
    assert found, heading
    return found[1]


def test_the_worked_example_is_the_records():
    (shown,) = [block.text for block in docs.read_blocks(PAGE) if block.language == "text"]
    decoded = decode([bytes.fromhex(record) for record in shown.strip().split("\n\n")], 30_522)
    assert decoded.headers["id"].tolist() == [1, 18446744073709551614]
    assert decoded.headers["flags"].tolist() == [1, 2]
    first, second = (decoded.tokens[start : start + 3].tolist() for start in decoded.starts)
    assert first + second == [7592, 2088, 2129, 2023, 2003, 1012]
    assert sequence_lengths(decoded.headers).tolist() == [2 + 1 + 3, 3 + 2]


def test_every_field_of_a_dataset_is_described():
    text = section("### dataset.json")
    for kind in (DatasetInfo, SplitInfo, Shard):
        for field in dataclasses.fields(kind):
            assert re.search(rf"`(splits\.\*)?\.?{field.name}(\[\]|\.\w+)?`", text), field.name


def test_every_file_of_a_dataset_is_described(dataset_dir: Path):
    text = section("## Prepared dataset")
    for path in dataset_dir.iterdir():
        assert re.sub(r"-of-\d+", "", path.name).split(".")[0] in re.sub(r"-of-\d+", "", text), path.name
    dataset = PreparedDataset(str(dataset_dir))
    assert dataset.lengths("train").dtype == np.uint16
    assert dataset.token_counts().dtype == np.int64
    assert int(re.search(r"\| prepared dataset \| (\d+)", TEXT)[1]) == dataset.info.format_version  # type: ignore[index]


@pytest.mark.parametrize("name", sorted(RATES))
def test_every_rate_is_described(name: str):
    assert f"`{name}`" in section("### metrics.jsonl")


def test_names_are_those_of_the_code():
    assert all(f"`{name}`" in section("## Exported folder") for name in ARCHITECTURES)


def test_examples_in_json_are_json():
    blocks = [block for page in docs.PAGES for block in docs.read_blocks(page) if block.language == "json"]
    assert blocks
    for block in blocks:
        assert json.loads(block.text), str(block)


def test_the_keys_that_may_change_on_resume_are_named():
    text = (docs.DOCS / "troubleshooting.md").read_text()
    found = re.search(r"Only these keys may change on resume: ([^;]*); and `(data.skip_steps)`", text)
    assert found
    named = {name.rstrip("*") for name in re.findall(r"`([\w.*]+)`", found[1])} | {found[2]}
    assert named == set(CHANGEABLE)
