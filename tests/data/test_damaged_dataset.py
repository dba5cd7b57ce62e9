"""Detection of damaged files of a prepared dataset and of files of another dataset."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from etils import epath
from support.preparing import run

from bert_jax.data import dataset as dataset_module
from bert_jax.data import file_digests, shard_readers
from bert_jax.data.dataset import INFO_FILE, TOKEN_COUNTS_FILE, PreparedDataset, _checksum, _hash, lengths_file
from bert_jax.data.inspection import inspect_dataset
from bert_jax.data.records import decode_block, encode_block
from bert_jax.data.shard_readers import ShardReaders
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import provenance

ARRAYS = [TOKEN_COUNTS_FILE, lengths_file("train"), lengths_file("eval")]


@pytest.fixture(scope="module")
def several_shards(corpus_file, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("several") / "data"
    run(corpus_file, tokenizer, folder, bucket_tokens=1024)
    return folder


@pytest.fixture
def copy(several_shards, tmp_path):
    return shutil.copytree(several_shards, tmp_path / "copy")


def read_all(folder):
    """Opens every file; returns the instances' ids."""
    dataset = PreparedDataset(str(folder))
    dataset.token_counts()
    ids = []
    for split in ("train", "eval"):
        dataset.lengths(split)
        ids += dataset.instances(split, np.arange(dataset.size(split)))["instance_ids"].tolist()
    return ids


def flip(path, position, bit=0):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def edit(folder, change):
    """Changes dataset.json and updates its hash and checksum."""
    path = folder / INFO_FILE
    content = json.loads(path.read_text())
    change(content)
    content["hash"] = _hash(content)
    if content["format_version"] > 2:
        content["checksum"] = _checksum(content)
    path.write_text(json.dumps(content, indent=2) + "\n")


def to_version_2(folder):
    """Rewrites dataset.json as format version 2, without digests of files; returns its hash."""
    path = folder / INFO_FILE
    content = json.loads(path.read_text())
    del content["files"], content["checksum"]
    content["format_version"] = 2
    path.write_text(json.dumps(content, indent=2) + "\n")
    return content["hash"]


# --- Any file, any byte -----------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_file_is_noticed(several_shards, tmp_path):
    """Covers padding of shards and headers of .npy files; the error names the file."""
    rng = np.random.default_rng(0)
    for file in sorted({path.name for path in several_shards.iterdir()} - {provenance.FILE}):
        size = (several_shards / file).stat().st_size
        for position in [0, size - 1, *rng.integers(0, size, 2).tolist()]:
            folder = tmp_path / f"{file}-{position}"
            folder.mkdir(exist_ok=True)
            for path in several_shards.iterdir():
                if path.name != file and not (folder / path.name).exists():
                    os.link(path, folder / path.name)
            shutil.copyfile(several_shards / file, folder / file)
            flip(folder / file, position, int(rng.integers(8)))
            with pytest.raises(InputError) as refusal:
                read_all(folder)
            assert str(folder / file) in str(refusal.value), position


def test_a_version_3_that_a_flip_makes_a_2_is_noticed(copy):
    path = copy / INFO_FILE
    path.write_text(path.read_text().replace('"format_version": 3', '"format_version": 2'))
    with pytest.raises(InputError, match=r"dataset\.json: .*checksum"):
        PreparedDataset(str(copy))


@pytest.mark.parametrize("version", [2, 3])
def test_shards_of_another_preparation_are_refused(several_shards, corpus_file, tokenizer, tmp_path, version):
    """The same corpus with another seed: files of equal names, sizes and, here, counts."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    shutil.copytree(several_shards, ours)
    run(corpus_file, tokenizer, other, bucket_tokens=1024, seed=1)
    shard = PreparedDataset(str(ours)).info.splits["train"].shards[0]
    if version == 2:
        to_version_2(ours)
    shutil.copyfile(other / shard.file, ours / shard.file)
    assert (ours / shard.file).stat().st_size == shard.bytes
    dataset = PreparedDataset(str(ours))
    with pytest.raises(InputError, match=rf"{shard.file}: .*[0-9a-f]{{32}}.*[0-9a-f]{{32}}"):
        dataset.read_blocks("train", np.array([0]))


# --- Verified once ----------------------------------------------------------------------------------------------


def test_a_file_is_read_whole_once_for_each_state_of_it(copy, monkeypatch):
    read = []
    real = file_digests.Expected.mismatch
    monkeypatch.setattr(
        file_digests.Expected, "mismatch", lambda self, path: read.append(path.name) or real(self, path)
    )
    read_all(copy)
    files = PreparedDataset(str(copy)).info.files
    assert sorted(read) == sorted(files)
    assert set(files) == {path.name for path in copy.iterdir()} - {INFO_FILE, "vocab.txt", provenance.FILE}
    read.clear()
    read_all(copy)
    assert not read
    os.utime(copy / TOKEN_COUNTS_FILE, (1, 1))
    read_all(copy)
    assert read == [TOKEN_COUNTS_FILE]


def test_damage_that_keeps_size_and_time_is_noticed(copy):
    read_all(copy)
    path = copy / TOKEN_COUNTS_FILE
    status = path.stat()
    flip(path, 200)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(InputError, match=r"token_counts\.npy"):
        read_all(copy)


def test_without_a_cache_every_process_verifies(copy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "file"))
    ids = read_all(copy)
    assert read_all(copy) == ids
    flip(copy / TOKEN_COUNTS_FILE, -1)
    with pytest.raises(InputError, match=r"token_counts\.npy"):
        read_all(copy)


# --- Version 2 --------------------------------------------------------------------------------------------------


def test_a_dataset_of_version_2_loads_as_before(several_shards, copy):
    before = PreparedDataset(str(several_shards)).info
    assert to_version_2(copy) == before.hash
    assert PreparedDataset(str(copy)).info.hash == before.hash  # and with it the order and the masks
    assert read_all(copy) == read_all(several_shards)
    info = PreparedDataset(str(copy)).info
    assert json.loads(info.to_json()) == json.loads((copy / INFO_FILE).read_text())


@pytest.mark.parametrize("name", ARRAYS)
def test_a_damaged_header_of_version_2_is_named(copy, name):
    """numpy raises tokenize.TokenError for half a tuple."""
    to_version_2(copy)
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content.replace(b"(", b" ", 1))
    with pytest.raises(InputError, match=rf"{name}: .*\(.+\)"):
        read_all(copy)


def test_sums_of_version_2_are_held_against_dataset_json(copy):
    to_version_2(copy)
    counts = np.load(copy / TOKEN_COUNTS_FILE)
    counts[7] += 1
    np.save(copy / TOKEN_COUNTS_FILE, counts)
    with pytest.raises(InputError, match=r"token_counts\.npy: .*[0-9]+ tokens.*[0-9]+"):
        PreparedDataset(str(copy)).token_counts()


@pytest.mark.parametrize("length", [0, 65535])
def test_lengths_out_of_range_are_no_division_by_zero(copy, length):
    to_version_2(copy)
    counts = np.load(copy / lengths_file("train"))
    counts[3] = length
    np.save(copy / lengths_file("train"), counts)
    with pytest.raises(InputError, match=r"train-lengths\.npy: .*\b1 to 64\b"):
        inspect_dataset(str(copy), samples=0)


# --- Many shards ------------------------------------------------------------------------------------------------


def test_few_shards_are_open_at_a_time(several_shards, monkeypatch):
    monkeypatch.setattr(dataset_module, "READERS", ShardReaders(max_open=3))
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("needs /proc")

    def open_shards():
        return sum(
            link.endswith(".array_record") for path in list(folder.iterdir()) if (link := os.path.realpath(path))
        )

    before = open_shards()
    dataset = PreparedDataset(str(several_shards))
    assert len(dataset.info.splits["train"].shards) > 6
    whole = dataset.instances("train", np.arange(dataset.size("train")))["instance_ids"]
    assert open_shards() - before <= 3
    again = dataset.instances("train", np.arange(dataset.size("train")))["instance_ids"]
    np.testing.assert_array_equal(again, whole)
    assert open_shards() - before <= 3


def test_a_shard_that_cannot_be_opened_is_named(copy, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("open() failed: Too many open files; reading")

    dataset = PreparedDataset(str(copy))
    monkeypatch.setattr(shard_readers, "ArrayRecordReader", fail)
    with pytest.raises(BertJaxError, match=r"train-00000-of-[0-9]+\.array_record: .*ulimit -n"):
        dataset.read_blocks("train", np.array([0]))


# --- Forged -----------------------------------------------------------------------------------------------------


def set_at(path, value):
    def change(content):
        *keys, last = path
        for key in keys:
            content = content[key]
        content[last] = value

    return change


SHARD = ("splits", "train", "shards", 0)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("seq_len",), "64", "seq_len"),
        (("seq_len",), 0, "seq_len"),
        (("seed",), 1.5, "seed"),
        (("options",), [], "options"),
        (("options", "pairs"), {}, "options.pairs"),
        (("dropped",), {"lines": -1}, "dropped.lines"),
        (("tokenizer",), None, "tokenizer"),
        (("tokenizer", "vocab_size"), 10**30, "tokenizer.vocab_size"),
        (("tokenizer", "vocab_size"), 7, "tokenizer.vocab_size"),
        (("splits",), {}, "splits"),
        (("splits", "../eval"), {}, "splits"),
        (("splits", "train"), [], "splits.train"),
        (("splits", "train", "tokens"), True, "splits.train.tokens"),
        (("splits", "train", "instances"), 10**18, "splits.train.instances"),
        (("splits", "eval", "shards"), {}, "splits.eval.shards"),
        (SHARD, 7, "splits.train.shards[0]"),
        ((*SHARD, "file"), "../../x.array_record", "splits.train.shards[0].file"),
        ((*SHARD, "file"), "/etc/passwd", "splits.train.shards[0].file"),
        ((*SHARD, "file"), "..", "splits.train.shards[0].file"),
        ((*SHARD, "instances"), 10**18, "splits.train.shards[0].instances"),
        ((*SHARD, "digest"), "no hex", "splits.train.shards[0].digest"),
        (("files", TOKEN_COUNTS_FILE), 7, "files.token_counts.npy"),
        (("files", "../x"), "00", "files"),
        (("files",), {}, "files"),
        (("hash",), [], "hash"),
        (("more",), 1, "more"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_forged_fields_are_refused_by_name(copy, path, value, field):
    edit(copy, set_at(path, value))
    if path == ("hash",):
        (copy / INFO_FILE).write_text(json.dumps({**json.loads((copy / INFO_FILE).read_text()), "hash": []}))
    with pytest.raises(InputError) as refusal:
        PreparedDataset(str(copy))
    message = str(refusal.value)
    assert message.startswith(f"{copy / INFO_FILE}: ")
    assert field in message
    assert "\n" not in message


def test_more_instances_than_a_shard_has_records(copy):
    def change(content):
        shard = content["splits"]["train"]["shards"][0]
        content["splits"]["train"]["instances"] += 2048 - shard["instances"]
        shard["instances"] = 2048

    edit(copy, change)
    dataset = PreparedDataset(str(copy))
    with pytest.raises(BertJaxError, match=r"train-00000-of-[0-9]+\.array_record: .*\b1 blocks.*\b4\b"):
        dataset.read_blocks("train", np.array([0]))


@pytest.mark.parametrize("forged", ["id", "length"])
def test_ids_and_lengths_out_of_range_are_named(copy, forged):
    shard = json.loads((copy / INFO_FILE).read_text())["splits"]["train"]["shards"][0]
    reader = ArrayRecordReader(str(copy / shard["file"]))
    block = decode_block(reader.read([0])[0], 8000)
    reader.close()
    tokens, headers, size = block.tokens.copy(), block.headers.copy(), PreparedDataset(str(copy)).tokenizer.vocab_size
    if forged == "id":
        tokens[-1] = size
    else:
        headers["len_a"][0] += 64
        tokens = np.concatenate([np.zeros(64, tokens.dtype), tokens])
    writer = dataset_module.ShardWriter(epath.Path(copy / shard["file"]))
    writer.write(encode_block(headers, [tokens.tobytes()]))
    written = writer.close(len(headers))

    def change(content):
        content["splits"]["train"]["shards"][0] |= {"bytes": written.bytes, "digest": written.digest}
        content["files"][shard["file"]] = file_digests.file_digest(copy / shard["file"])

    edit(copy, change)
    with pytest.raises(InputError, match=rf"{shard['file']}: block 0: .*\b{size if forged == 'id' else '[0-9]+'}\b"):
        PreparedDataset(str(copy)).read_blocks("train", np.array([0]))


def test_nested_too_deep(copy):
    (copy / INFO_FILE).write_text("[" * 100_000)
    with pytest.raises(InputError, match=f"^{copy / INFO_FILE}: "):
        PreparedDataset(str(copy))
