import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from support import helpers

from bert_jax.data.dataset import INFO_FILE, PreparedDataset
from bert_jax.data.loading.loader import TrainRows
from bert_jax.data.loading.masking import Masking
from bert_jax.errors import BertJaxError, InputError
from bert_jax.text.tokenizer import read_tokenizer


@pytest.fixture
def dataset_copy(dataset_dir, tmp_path):
    return shutil.copytree(dataset_dir, tmp_path / "copy")


# --- Folders ----------------------------------------------------------------------------------------------------


def test_reads_in_any_order(dataset_dir):
    dataset = PreparedDataset(str(dataset_dir))
    size = dataset.size("train")
    whole = dataset.instances("train", np.arange(size))
    assert len(np.unique(whole["instance_ids"])) == size
    order = np.random.default_rng(0).integers(0, size, 300)
    for chosen in (order, np.array([size - 1]), np.array([7, 6, 7])):
        found = dataset.instances("train", chosen)
        for name, entry in whole.items():
            np.testing.assert_array_equal(found[name], entry[chosen])


def test_hash_follows_what_batches_follow_from(dataset_dir):
    info = PreparedDataset(str(dataset_dir)).info
    assert info.with_hash().hash == info.hash
    shard = info.splits["train"].shards[0]
    train = replace(info.splits["train"], shards=(replace(shard, content="0" * 32),))
    others = [
        replace(info, seed=info.seed + 1),
        replace(info, seq_len=info.seq_len + 1),
        replace(info, tokenizer={**info.tokenizer, "ids_sha256": "0"}),
        replace(info, splits={**info.splits, "train": train}),
    ]
    assert len({other.with_hash().hash for other in [info, *others]}) == 5


def train_batch(folder):
    return TrainRows(PreparedDataset(str(folder)), seed=3, masking=Masking()).rows(np.arange(40))


def test_counts_options_and_compression_leave_hash_and_batches_alone(dataset_dir, dataset_copy):
    for shard in dataset_copy.glob("*.array_record"):
        records = ArrayRecordReader(str(shard)).read_all()
        writer = ArrayRecordWriter(str(shard), "group_size:1,uncompressed")
        for record in records:
            writer.write(record)
        writer.close()

    def change(content):
        content["corpus"]["tokens"] += 1
        content["dropped"] = {}
        content["options"]["bucket_tokens"] += 1
        content["tokenizer"]["lowercase"] = False
        for split in content["splits"].values():
            split.update(documents=3, used_tokens=0)
            for shard in split["shards"]:
                shard["bytes"], shard["digest"] = (dataset_copy / shard["file"]).stat().st_size, "0" * 32

    edit_info(dataset_copy, change)
    (dataset_copy / "provenance.json").unlink()
    before, after = PreparedDataset(str(dataset_dir)).info, PreparedDataset(str(dataset_copy)).info
    assert after != before
    assert after.hash == before.hash
    expected = train_batch(dataset_dir)
    for name, array in train_batch(dataset_copy).items():
        np.testing.assert_array_equal(array, expected[name])


def shard_of(folder, split="train"):
    return next(folder.glob(f"{split}-*.array_record"))


def test_missing_dataset(tmp_path):
    with pytest.raises(InputError, match=r"bert-jax prepare"):
        PreparedDataset(str(tmp_path))


def edit_info(folder, change):
    path = folder / INFO_FILE
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_changed_vocabulary(dataset_copy):
    path = dataset_copy / "tokenizer.json"
    pieces = list(read_tokenizer(path).vocab)
    pieces[-3], pieces[-2] = pieces[-2], pieces[-3]
    helpers.write_tokenizer(path, pieces)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        PreparedDataset(str(dataset_copy))
    path.unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        PreparedDataset(str(dataset_copy))


# --- In a store -------------------------------------------------------------------------------------------------

URL = "gs://bucket/data"


@pytest.fixture
def there(dataset_dir, store, tmp_path):
    """The dataset in a store, and an empty cache."""
    for path in dataset_dir.iterdir():
        store.put(f"data/{path.name}", path.read_bytes())
    return tmp_path / "cache"


def test_a_dataset_in_a_store_is_copied_once(there, dataset_dir, store):
    local, remote = PreparedDataset(str(dataset_dir)), PreparedDataset(URL)
    indices = np.arange(local.size("train"))
    for name, entry in local.instances("train", indices).items():
        np.testing.assert_array_equal(remote.instances("train", indices)[name], entry)
    np.testing.assert_array_equal(remote.lengths("eval"), local.lengths("eval"))
    store.requests.clear()
    assert PreparedDataset(URL).info == local.info
    assert not [request for request in store.requests if "array_record" in request]


def test_a_corrupt_download_is_reported_and_not_kept(there, dataset_dir, store):
    shard = shard_of(dataset_dir)
    content = shard.read_bytes()
    store.put(f"data/{shard.name}", content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BertJaxError, match=f"{shard.name}: corrupt download"):
        PreparedDataset(URL)
    store.put(f"data/{shard.name}", content)
    PreparedDataset(URL)


def test_a_truncated_or_damaged_copy_is_named(there, dataset_dir, store):
    name = shard_of(dataset_dir).name
    PreparedDataset(URL)
    (copy,) = there.glob(f"datasets/*/{name}")
    content = copy.read_bytes()
    copy.write_bytes(content[:-5])
    with pytest.raises(InputError, match=f"{copy}: .*truncated.*; delete it"):
        PreparedDataset(URL)
    copy.write_bytes(content)
    dataset = PreparedDataset(URL)
    copy.write_bytes(bytes(byte ^ 0xFF for byte in content))
    with pytest.raises(BertJaxError, match=f"{copy}: cannot be read .*; delete it"):
        dataset.instances("train", np.arange(dataset.size("train")))


def test_a_missing_shard_in_a_store_is_named(there, dataset_dir, store):
    shard = shard_of(dataset_dir)
    store.delete(f"data/{shard.name}")
    with pytest.raises(InputError, match=shard.name):
        PreparedDataset(URL)
