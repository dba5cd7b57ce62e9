"""Reference of file formats: its worked example, and its lists of keys and files, against what the code writes."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from support import docs

from bert_jax.data.dataset import DatasetInfo, PreparedDataset, Shard, SplitInfo
from bert_jax.data.records import decode, sequence_lengths
from bert_jax.interop.architectures import ARCHITECTURES
from bert_jax.tracking.throughput import RATES

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
