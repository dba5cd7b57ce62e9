"""Damaged files of a prepared dataset."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.preparing import run

from bert_jax.data import dataset as dataset_module
from bert_jax.data.dataset import INFO_FILE, PreparedDataset
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import provenance


@pytest.fixture(scope="module")
def several_shards(corpus_file, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("several") / "data"
    run(corpus_file, tokenizer, folder, bucket_tokens=1024)
    return folder


@pytest.fixture
def copy(several_shards, tmp_path):
    return shutil.copytree(several_shards, tmp_path / "copy")


def read_all(folder):
    """Opens every file; returns all that they hold."""
    dataset = PreparedDataset(str(folder))
    content = [dataset.token_counts().tolist()]
    for split in ("train", "eval"):
        content.append(dataset.lengths(split).tolist())
        rows = dataset.instances(split, np.arange(dataset.size(split)))
        content += [array.tolist() for array in rows.values()]
    return content


def test_a_flipped_bit_in_any_file_is_noticed_or_without_effect(several_shards, tmp_path):
    """Padding of shards has no effect; an error names the folder and the file."""
    rng = np.random.default_rng(0)
    expected, noticed = read_all(several_shards), 0
    for file in sorted({path.name for path in several_shards.iterdir()} - {provenance.FILE}):
        size = (several_shards / file).stat().st_size
        for position in [0, size - 1, *rng.integers(0, size, 2).tolist()]:
            folder = tmp_path / f"{file}-{position}"
            folder.mkdir(exist_ok=True)
            for path in several_shards.iterdir():
                if path.name != file and not (folder / path.name).exists():
                    os.link(path, folder / path.name)
            content = bytearray((several_shards / file).read_bytes())
            content[position] ^= 1 << int(rng.integers(8))
            (folder / file).write_bytes(content)
            try:
                found, problem = read_all(folder), ""
            except (InputError, BertJaxError) as error:
                found, problem = expected, str(error)
                noticed += 1
            assert found == expected, (file, position)
            assert not problem or (str(folder) in problem and file in problem), position
    assert noticed > 20


def test_few_shards_are_open_at_a_time(copy, monkeypatch):
    monkeypatch.setattr(dataset_module, "_MAX_OPEN", 3)
    dataset = PreparedDataset(str(copy))
    assert len(dataset.info.splits["train"].shards) > 6
    dataset.instances("train", np.arange(dataset.size("train")))
    opened = [Path(os.path.realpath(f"/proc/self/fd/{number}")) for number in os.listdir("/proc/self/fd")]
    assert 0 < sum(path.match("train-*.array_record") and path.parent == copy for path in opened) <= 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seq_len", 0), ("seq_len", 40_000), ("seed", None), ("splits", {}),
        ("tokenizer", None), ("tokenizer", {}), ("dropped", 3), ("arrays", {}), ("splits.train.shards", {}),
        ("splits.train.documents", -1), ("splits.train.shards.0.file", "../x"), ("splits.train.shards.0.bytes", "x"),
    ],
)  # fmt: skip
def test_forged_fields_are_refused(copy, key, value):
    path = copy / INFO_FILE
    content = json.loads(path.read_text())
    *parents, name = key.split(".")
    inner = content
    for parent in parents:
        inner = inner[int(parent) if parent.isdecimal() else parent]
    inner[name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: "):
        PreparedDataset(str(copy))
