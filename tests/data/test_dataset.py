import hashlib
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from etils import epath
from support import helpers

from bert_jax.data.dataset import (
    INFO_FILE,
    TOKEN_COUNTS_FILE,
    DatasetInfo,
    PreparedDataset,
    ShardWriter,
    lengths_file,
)
from bert_jax.data.records import BLOCK
from bert_jax.errors import BertJaxError, InputError


@pytest.fixture
def dataset_copy(dataset_dir, tmp_path):
    return shutil.copytree(dataset_dir, tmp_path / "copy")


# --- Folders ----------------------------------------------------------------------------------------------------


def test_reads_in_any_order(dataset_dir):
    dataset = PreparedDataset(str(dataset_dir))
    size = dataset.size("train")
    whole = dataset.instances("train", np.arange(size))
    assert len(np.unique(whole["instance_ids"])) == size > BLOCK
    order = np.random.default_rng(0).integers(0, size, 300)
    for chosen in (order, np.array([size - 1]), np.array([BLOCK, BLOCK - 1, BLOCK])):
        found = dataset.instances("train", chosen)
        for name, entry in whole.items():
            np.testing.assert_array_equal(found[name], entry[chosen])


def test_blocks(dataset_dir):
    dataset = PreparedDataset(str(dataset_dir))
    sizes = dataset.block_sizes("train")
    assert sizes.sum() == dataset.size("train")
    assert (sizes[:-1] == BLOCK).all()
    whole = dataset.instances("train", np.arange(dataset.size("train")))["instance_ids"]
    read = dataset.read_blocks("train", np.array([1, 0, 1]))
    expected = [whole[BLOCK : BLOCK + sizes[1]], whole[:BLOCK], whole[BLOCK : BLOCK + sizes[1]]]
    np.testing.assert_array_equal(read.headers["id"], np.concatenate(expected))
    assert not len(dataset.block_sizes("test"))


def test_lengths(dataset_dir):
    dataset = PreparedDataset(str(dataset_dir))
    for split in ("train", "eval"):
        rows = dataset.instances(split, np.arange(dataset.size(split)))
        np.testing.assert_array_equal(dataset.lengths(split), rows["sequence_ids"].sum(axis=1))


def test_sizes(dataset_dir):
    dataset = PreparedDataset(str(dataset_dir))
    assert dataset.size("train") == dataset.info.splits["train"].instances > 0
    assert dataset.size("eval") == dataset.info.splits["eval"].instances > 0
    assert dataset.size("test") == 0


def test_info_round_trip(dataset_dir, tmp_path):
    info = PreparedDataset(str(dataset_dir)).info
    (tmp_path / INFO_FILE).write_text(info.to_json())
    assert DatasetInfo.read(epath.Path(tmp_path)) == info


def test_hash_follows_everything(dataset_dir):
    info = PreparedDataset(str(dataset_dir)).info
    assert info.with_hash().hash == info.hash
    shard = info.splits["train"].shards[0]
    train = replace(info.splits["train"], shards=(replace(shard, digest="0" * 32),))
    others = [
        replace(info, seed=info.seed + 1),
        replace(info, seq_len=info.seq_len + 1),
        replace(info, tokenizer={**info.tokenizer, "sha256": "0"}),
        replace(info, options={**info.options, "dupe_factor": 2}),
        replace(info, splits={**info.splits, "train": train}),
    ]
    assert len({other.with_hash().hash for other in [info, *others]}) == 6


def shard_of(folder, split="train"):
    return next(folder.glob(f"{split}-*.array_record"))


def test_missing_dataset(tmp_path):
    with pytest.raises(InputError, match=r"bert-jax prepare"):
        PreparedDataset(str(tmp_path))
    with pytest.raises(InputError, match=str(tmp_path / "nowhere")):
        PreparedDataset(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_truncated_shard(dataset_copy, split):
    shard = shard_of(dataset_copy, split)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match=shard.name):
        PreparedDataset(str(dataset_copy))


def test_missing_shard(dataset_copy):
    shard = shard_of(dataset_copy)
    shard.unlink()
    with pytest.raises(InputError, match=shard.name):
        PreparedDataset(str(dataset_copy))


def test_flipped_bits_in_a_shard(dataset_copy):
    """A corrupt shard of the right size is detected when read; the error names it."""
    shard = shard_of(dataset_copy)
    content = bytearray(shard.read_bytes())
    half = len(content) // 2
    content[half : half + 64] = bytes(byte ^ 0xFF for byte in content[half : half + 64])
    shard.write_bytes(content)
    dataset = PreparedDataset(str(dataset_copy))
    with pytest.raises(BertJaxError, match=shard.name):
        dataset.instances("train", np.arange(dataset.size("train")))


def edit_info(folder, change):
    path = folder / INFO_FILE
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_other_format_version(dataset_copy):
    edit_info(dataset_copy, lambda content: content.update(format_version=1))
    with pytest.raises(InputError, match=r"dataset\.json.*format_version=1\b"):
        PreparedDataset(str(dataset_copy))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "{}",
        lambda text: '{"format_version": 2}',
        lambda text: text.replace('"seq_len": 64', '"seq_len": 65'),
        lambda text: text.replace('"sha256"', '"sha255"'),
        lambda text: text.replace('"splits"', '"slips"'),
        lambda text: text.replace('"instances"', '"distances"'),
        lambda text: text.replace('"seed": 0', '"seed": 0, "more": 1'),
    ],
)
def test_damaged_info(dataset_copy, damage):
    path = dataset_copy / INFO_FILE
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    with pytest.raises(InputError, match=f"^{dataset_copy / INFO_FILE}: "):
        PreparedDataset(str(dataset_copy))


def test_dataset_json_that_is_not_utf8(dataset_copy):
    (dataset_copy / INFO_FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=f"^{dataset_copy / INFO_FILE}: "):
        PreparedDataset(str(dataset_copy))


def test_changed_vocabulary(dataset_copy):
    path = dataset_copy / "vocab.txt"
    pieces = path.read_text().split("\n")
    pieces[-3], pieces[-2] = pieces[-2], pieces[-3]
    path.write_text("\n".join(pieces))
    with pytest.raises(InputError, match=r"vocab\.txt"):
        PreparedDataset(str(dataset_copy))
    path.unlink()
    with pytest.raises(InputError, match=r"vocab\.txt"):
        PreparedDataset(str(dataset_copy))


@pytest.mark.parametrize("content", [None, b"", b"\x93NUMPY\x01\x00", b"something else"])
@pytest.mark.parametrize("name", [TOKEN_COUNTS_FILE, lengths_file("train")])
def test_damaged_arrays(dataset_copy, name, content):
    path = dataset_copy / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    dataset = PreparedDataset(str(dataset_copy))
    with pytest.raises(InputError, match=name):
        dataset.token_counts() if name == TOKEN_COUNTS_FILE else dataset.lengths("train")


def test_shard_writer_renames_on_close(tmp_path):
    folder = epath.Path(tmp_path)
    writer = ShardWriter(folder / "train.array_record")
    writer.write(b"one")
    writer.write(b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["train.array_record.partial"]
    shard = writer.close(7)
    assert [path.name for path in tmp_path.iterdir()] == ["train.array_record"]
    assert (shard.file, shard.instances) == ("train.array_record", 7)
    assert shard.digest == hashlib.blake2b(b"onetwo", digest_size=16).hexdigest()
    assert shard.bytes == (tmp_path / "train.array_record").stat().st_size


def test_the_documented_example_opens_it_with_grain(dataset_dir, tmp_path, monkeypatch):
    page = (helpers.REPOSITORY / "docs" / "reference" / "file_formats.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import grain" in block)
    (tmp_path / "data").symlink_to(dataset_dir)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(example, names)
    dataset = PreparedDataset(str(dataset_dir))
    assert sum(len(block) for block in names["blocks"]) == dataset.size("train")
    first = dataset.instances("train", np.array([0]))
    length = names["header"]["len_a"]
    assert names["segment_a"].tolist() == first["input_ids"][0, 1 : 1 + length].tolist()
    assert names["header"]["id"] == first["instance_ids"][0]


def test_lengths_of_another_split_are_refused(dataset_copy):
    path = dataset_copy / lengths_file("train")
    np.save(path, np.load(path)[:-1])
    with pytest.raises(InputError, match=r"train-lengths\.npy: .*[0-9a-f]{32}.*[0-9a-f]{32}"):
        PreparedDataset(str(dataset_copy)).lengths("train")


def test_a_block_with_another_count_is_refused(dataset_copy):
    dataset = PreparedDataset(str(dataset_copy))
    dataset._blocks["train"][0] -= 1
    with pytest.raises(BertJaxError, match=r"train-0.*\bblock 0\b.*\d+"):
        dataset.read_blocks("train", np.array([0]))
