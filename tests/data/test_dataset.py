import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from etils import epath

from bert_jax.data.dataset import (
    HEADER_DTYPE,
    INFO_FILE,
    TOKEN_COUNTS_FILE,
    VOCABULARY_FILE,
    DatasetInfo,
    PreparedDataset,
    ShardWriter,
    decode,
    encode_headers,
    token_dtype,
)
from bert_jax.data.tokenization import SPECIAL_TOKENS, WordPieceTokenizer
from bert_jax.errors import BertJaxError, InputError

CLS, SEP, PAD = "[CLS]", "[SEP]", "[PAD]"


@pytest.fixture
def dataset_copy(dataset_dir, tmp_path):
    return shutil.copytree(dataset_dir, tmp_path / "copy")


def make_tokenizer(pieces):
    # The special tokens last and out of order: nothing may rest on their usual ids.
    words = [f"w{i}" for i in range(pieces - len(SPECIAL_TOKENS))]
    return WordPieceTokenizer([*words, *reversed(SPECIAL_TOKENS)], lowercase=True)


def encode(pairs, ids, dtype):
    headers = encode_headers(
        np.array(ids, np.uint64),
        np.array([len(a) for a, _, _ in pairs]),
        np.array([len(b) for _, b, _ in pairs]),
        np.array([label for _, _, label in pairs]),
    )
    return [
        header.tobytes() + np.array(a, dtype).tobytes() + np.array(b, dtype).tobytes()
        for header, (a, b, _) in zip(headers, pairs, strict=True)
    ]


# --- Records ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [300, 1 << 16, (1 << 16) + 1, 70_000])
def test_layout_row_by_row(vocab_size):
    tokenizer = make_tokenizer(vocab_size)
    dtype = token_dtype(vocab_size)
    assert dtype.itemsize == (2 if vocab_size <= 65536 else 4)
    seq_len = 24
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (20, 1), (1, 20), (10, 11), (2, 3), *rng.integers(1, 10, (40, 2)).tolist()]
    pairs = [
        (rng.integers(0, vocab_size, a).tolist(), rng.integers(0, vocab_size, b).tolist(), bool(rng.integers(2)))
        for a, b in sizes
    ]
    ids = rng.integers(0, 2**64, len(pairs), dtype=np.uint64)
    ids[0] = 2**64 - 1
    found = decode(encode(pairs, ids, dtype), seq_len, tokenizer)

    for row, (a, b, label) in enumerate(pairs):
        tokens = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
        padding = seq_len - len(tokens)
        assert found["input_ids"][row].tolist() == tokens + [tokenizer.pad_id] * padding
        assert found["token_type_ids"][row].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * padding
        assert found["sequence_ids"][row].tolist() == [1] * len(tokens) + [0] * padding
        assert found["positions"][row].tolist() == list(range(seq_len))
        maskable = [False] + [True] * len(a) + [False] + [True] * len(b) + [False] * (padding + 1)
        assert found["maskable"][row].tolist() == maskable
        assert bool(found["is_random_next"][row]) == label
        assert found["instance_ids"][row] == ids[row]
    for name in ("input_ids", "token_type_ids", "positions", "sequence_ids"):
        assert found[name].dtype == np.int32
    assert found["instance_ids"].dtype == np.uint64


def test_special_ids_in_a_segment_are_text():
    """Whoever wrote them: the layout goes by lengths, never by ids."""
    tokenizer = make_tokenizer(300)
    a, b = [tokenizer.sep_id, 7], [tokenizer.pad_id]
    found = decode(encode([(a, b, False)], [1], token_dtype(300)), 10, tokenizer)
    assert found["maskable"][0].tolist() == [False, True, True, False, True] + [False] * 5
    assert found["sequence_ids"][0].sum() == 6


def test_header_bytes():
    """A record's layout is what `FORMAT_VERSION` names."""
    assert HEADER_DTYPE.itemsize == 16
    record = encode([([1, 2, 3], [258], True)], [0x0102030405060708], token_dtype(300))[0]
    assert record.hex() == "0807060504030201" + "0300" + "0100" + "0100" + "0000" + "010002000300" + "0201"


def test_longest_sequence():
    tokenizer = make_tokenizer(300)
    a, b = [5] * 16_000, [6] * 16_765
    found = decode(encode([(a, b, True)], [9], token_dtype(300)), 32768, tokenizer)
    assert found["sequence_ids"].sum() == 32768
    assert found["input_ids"][0, -1] == tokenizer.sep_id
    assert (found["input_ids"] == 6).sum() == 16_765


# --- Folders ----------------------------------------------------------------------------------------------------


def test_reads_in_any_order(dataset_dir):
    dataset = PreparedDataset(str(dataset_dir))
    size = dataset.size("train")
    whole = dataset.read("train", np.arange(size))
    assert len(set(whole)) == size
    order = np.random.default_rng(0).integers(0, size, 300)
    assert dataset.read("train", order) == [whole[i] for i in order]
    assert dataset.read("train", np.array([size - 1])) == [whole[-1]]


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
    return next(folder.glob(f"{split}-*"))


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
    """A shard of the right size but the wrong bytes is found out when read, and by name."""
    shard = shard_of(dataset_copy)
    content = bytearray(shard.read_bytes())
    half = len(content) // 2
    content[half : half + 64] = bytes(byte ^ 0xFF for byte in content[half : half + 64])
    shard.write_bytes(content)
    dataset = PreparedDataset(str(dataset_copy))
    with pytest.raises(BertJaxError, match=shard.name):
        dataset.read("train", np.arange(dataset.size("train")))


def edit_info(folder, change):
    path = folder / INFO_FILE
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_other_format_version(dataset_copy):
    edit_info(dataset_copy, lambda content: content.update(format_version=2))
    with pytest.raises(InputError, match=r"dataset\.json.*version 2"):
        PreparedDataset(str(dataset_copy))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "{}",
        lambda text: '{"format_version": 1}',
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
    with pytest.raises(InputError, match=r"dataset\.json: damaged"):
        PreparedDataset(str(dataset_copy))


def test_info_that_is_no_text(dataset_copy):
    (dataset_copy / INFO_FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"dataset\.json: damaged"):
        PreparedDataset(str(dataset_copy))


def test_changed_vocabulary(dataset_copy):
    path = dataset_copy / VOCABULARY_FILE
    pieces = path.read_text().split("\n")
    pieces[-3], pieces[-2] = pieces[-2], pieces[-3]
    path.write_text("\n".join(pieces))
    with pytest.raises(InputError, match=r"vocab\.txt"):
        PreparedDataset(str(dataset_copy))
    path.unlink()
    with pytest.raises(InputError, match=r"vocab\.txt"):
        PreparedDataset(str(dataset_copy))


@pytest.mark.parametrize("content", [None, b"", b"\x93NUMPY\x01\x00", b"something else"])
def test_damaged_token_counts(dataset_copy, content):
    path = dataset_copy / TOKEN_COUNTS_FILE
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"token_counts\.npy"):
        PreparedDataset(str(dataset_copy)).token_counts()


def test_a_shard_has_its_name_only_when_whole(tmp_path):
    folder = epath.Path(tmp_path)
    writer = ShardWriter(folder / "train.array_record")
    writer.write(b"one")
    writer.write(b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["train.array_record.partial"]
    shard = writer.close("digest")
    assert [path.name for path in tmp_path.iterdir()] == ["train.array_record"]
    assert (shard.file, shard.instances, shard.digest) == ("train.array_record", 2, "digest")
    assert shard.bytes == (tmp_path / "train.array_record").stat().st_size
