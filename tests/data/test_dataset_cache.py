"""A remote dataset's files on this machine's disk."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support import child_processes, helpers

from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files import provenance

URL = "gs://bucket/data"


@pytest.fixture(scope="module")
def local(tmp_path_factory, corpus_file, vocabulary_file) -> Path:
    """A dataset of several shards."""
    folder = tmp_path_factory.mktemp("several") / "data"
    helpers.prepare_dataset(corpus_file, vocabulary_file, folder, bucket_tokens=8192)
    return folder


@pytest.fixture
def there(local, store) -> Path:
    """Uploads the dataset to the store; returns the local one."""
    for path in local.iterdir():
        store.put(f"data/{path.name}", path.read_bytes())
    store.requests.clear()
    return local


def fetched(store, name: str) -> int:
    return store.count("GET", name, "alt=media")


def test_dataset_in_a_store_equals_the_local_one(local, store, corpus_file, vocabulary_file):
    store.put("corpus.txt", corpus_file.read_bytes())
    store.put("vocab.txt", vocabulary_file.read_bytes())
    helpers.prepare_dataset("gs://bucket/corpus.txt", "gs://bucket/vocab.txt", URL, bucket_tokens=8192)
    assert store.names("data/") == sorted(f"data/{path.name}" for path in local.iterdir())
    for path in local.iterdir():
        if path.name != provenance.FILE:
            assert store.read(f"data/{path.name}") == path.read_bytes(), path.name
    with pytest.raises(InputError, match=rf"--output={URL}: .*dataset\.json"):
        helpers.prepare_dataset(corpus_file, vocabulary_file, URL)


def test_shards_are_downloaded_once_on_first_read(there, store, tmp_path):
    here, dataset = PreparedDataset(str(there)), PreparedDataset(URL)
    shards = [shard.file for shard in here.info.splits["train"].shards]
    assert len(shards) > 2
    assert fetched(store, "array_record") == 0
    assert fetched(store, "vocab.txt") == 1
    blocks = np.array([0])
    np.testing.assert_array_equal(
        dataset.read_blocks("train", blocks).headers, here.read_blocks("train", blocks).headers
    )
    assert [fetched(store, shard) for shard in shards] == [1] + [0] * (len(shards) - 1)
    blocks = np.arange(len(here.block_sizes("train")))[::-1]
    for again in (dataset, PreparedDataset(URL)):
        np.testing.assert_array_equal(
            again.read_blocks("train", blocks).tokens, here.read_blocks("train", blocks).tokens
        )
        np.testing.assert_array_equal(again.lengths("train"), here.lengths("train"))
        np.testing.assert_array_equal(again.token_counts(), here.token_counts())
    assert [fetched(store, shard) for shard in shards] == [1] * len(shards)
    assert [fetched(store, name) for name in ("vocab.txt", "train-lengths", "token_counts")] == [1] * 3
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_damaged_files_of_the_cache_are_downloaded_again(there, store, tmp_path):
    dataset = PreparedDataset(URL)
    shard = dataset.info.splits["train"].shards[0].file
    dataset.read_blocks("train", np.array([0]))
    (cached,) = (path for path in (tmp_path / "cache").rglob(f"*{shard}"))
    cached.write_bytes(cached.read_bytes()[:-1])  # by whatever has happened to the disk
    PreparedDataset(URL).read_blocks("train", np.array([0]))
    assert fetched(store, shard) == 2
    cached.write_bytes(bytes(100) + cached.read_bytes()[100:])  # the same size
    PreparedDataset(URL).read_blocks("train", np.array([0]))
    assert fetched(store, shard) == 3


def test_a_corrupt_download_is_reported_and_not_kept(there, store):
    dataset = PreparedDataset(URL)
    shard = dataset.info.splits["train"].shards[0].file
    store.damage("GET", shard, "alt=media", name=f"data/{shard}", times=1)
    with pytest.raises(BertJaxError, match=rf"{URL}/{shard}: .*[0-9a-f]{{32}}.*[0-9a-f]{{32}}"):
        dataset.read_blocks("train", np.array([0]))
    dataset.read_blocks("train", np.array([0]))


def test_missing_and_truncated_shards_are_refused_before_anything_is_fetched(there, store):
    shard = PreparedDataset(URL).info.splits["train"].shards[1].file
    store.put(f"data/{shard}", b"short")
    with pytest.raises(InputError, match=rf"{URL}/{shard}: .*\b5\b.*dataset\.json"):
        PreparedDataset(URL)
    store.delete(f"data/{shard}")
    with pytest.raises(InputError, match=rf"{URL}/{shard}: not found"):
        PreparedDataset(URL)


def test_another_dataset_in_its_place_is_not_taken_for_it(there, store, other_dir):
    before = PreparedDataset(URL)
    before.read_blocks("train", np.array([0]))
    before.token_counts()
    for name in store.names("data/"):
        store.delete(name)
    for path in other_dir.iterdir():
        store.put(f"data/{path.name}", path.read_bytes())
    other = PreparedDataset(str(other_dir))
    found = PreparedDataset(URL)
    blocks = np.array([0])
    np.testing.assert_array_equal(found.read_blocks("train", blocks).tokens, other.read_blocks("train", blocks).tokens)
    np.testing.assert_array_equal(found.token_counts(), other.token_counts())


def test_concurrent_readers_download_a_shard_once(there, store):
    datasets = [PreparedDataset(URL) for _ in range(4)]
    shard = datasets[0].info.splits["train"].shards[0].file
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda dataset: dataset.read_blocks("train", np.array([0])).tokens, datasets))
    for tokens in found[1:]:
        np.testing.assert_array_equal(tokens, found[0])
    assert fetched(store, shard) == 1


def test_a_kill_in_the_middle_leaves_nothing_that_is_taken_for_a_shard(there, store, tmp_path):
    shard = PreparedDataset(URL).info.splits["train"].shards[0].file
    store.cut(
        "GET", shard, "alt=media", name=f"data/{shard}", times=1, honest=False, then=(hang := threading.Event()).wait
    )
    code = (
        f"import numpy, bert_jax.data.dataset as d; d.PreparedDataset({URL!r}).read_blocks('train', numpy.array([0]))"
    )
    process = child_processes.start([sys.executable, "-c", code], env=dict(os.environ))
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in (tmp_path / "cache").rglob(f"*{shard}.partial")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    hang.set()
    assert not list((tmp_path / "cache").rglob(f"*{shard}"))
    here = PreparedDataset(str(there)).read_blocks("train", np.array([0]))
    np.testing.assert_array_equal(PreparedDataset(URL).read_blocks("train", np.array([0])).tokens, here.tokens)


# --- Size of the cache -------------------------------------------------------------------------------------------


def shards_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.array_record"))


def limit(monkeypatch, bytes_: float) -> None:
    monkeypatch.setenv("BERT_JAX_CACHE_GB", str(bytes_ / 1e9))


def read_shard(dataset: PreparedDataset, number: int) -> np.ndarray:
    return dataset.read_blocks("train", dataset._first_blocks["train"][[number]]).tokens


def test_cache_deletes_the_least_recently_used_shards(there, store, tmp_path, monkeypatch):
    here, dataset = PreparedDataset(str(there)), PreparedDataset(URL)
    shards = here.info.splits["train"].shards
    limit(monkeypatch, shards[0].bytes + shards[1].bytes + shards[2].bytes)
    for number in (0, 1, 0, 2, 0):
        np.testing.assert_array_equal(read_shard(dataset, number), read_shard(here, number))
        time.sleep(0.02)  # longer than the resolution of a file's time
    assert len(shards_in(tmp_path / "cache")) == 3
    read_shard(dataset, 3)
    cached = {path.name.partition("-")[2] for path in shards_in(tmp_path / "cache")}
    assert shards[1].file not in cached
    assert {shards[0].file, shards[3].file} <= cached
    assert sum(path.stat().st_size for path in shards_in(tmp_path / "cache")) <= sum(s.bytes for s in shards[:3])
    assert [fetched(store, shard.file) for shard in shards[:4]] == [1, 1, 1, 1]
    np.testing.assert_array_equal(read_shard(dataset, 1), read_shard(here, 1))
    assert fetched(store, shards[1].file) == 2


def test_cache_smaller_than_a_shard_holds_one(there, tmp_path, monkeypatch):
    here, dataset = PreparedDataset(str(there)), PreparedDataset(URL)
    limit(monkeypatch, 1)
    blocks = np.arange(len(here.block_sizes("train")))
    for _ in range(2):
        np.testing.assert_array_equal(
            dataset.read_blocks("train", blocks).tokens, here.read_blocks("train", blocks).tokens
        )
    read_shard(dataset, 0)
    read_shard(dataset, 1)
    assert len(shards_in(tmp_path / "cache")) <= 8  # those that were downloaded concurrently


def test_shard_that_is_being_opened_is_not_deleted(there, tmp_path, monkeypatch):
    dataset = PreparedDataset(URL)
    shards = dataset.info.splits["train"].shards
    limit(monkeypatch, 1)
    with dataset._files.held(shards[0].file, dataset.info.expected(shards[0].file, shards[0])) as path:
        read_shard(dataset, 1)
        assert path.exists()
    read_shard(dataset, 2)
    assert not path.exists()


def test_concurrent_processes_share_a_cache_that_is_too_small(there, tmp_path, monkeypatch):
    here = PreparedDataset(str(there))
    blocks = len(here.block_sizes("train"))
    limit(monkeypatch, here.info.splits["train"].shards[0].bytes)
    code = (
        "import hashlib, sys, numpy as np\n"
        "from bert_jax.data.dataset import PreparedDataset\n"
        f"dataset = PreparedDataset({URL!r})\n"
        f"blocks = np.random.default_rng(int(sys.argv[1])).permutation({blocks})\n"
        "for block in blocks:\n"
        "    found = dataset.read_blocks('train', np.array([block])).tokens\n"
        "    print(block, hashlib.sha256(found.tobytes()).hexdigest())\n"
    )
    processes = [
        child_processes.start(
            [sys.executable, "-c", code, str(seed)], env=dict(os.environ), stdout=subprocess.PIPE, text=True
        )
        for seed in range(2)
    ]
    expected = {
        block: hashlib.sha256(here.read_blocks("train", np.array([block])).tokens.tobytes()).hexdigest()
        for block in range(blocks)
    }
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert {int(block): found for block, found in map(str.split, out.splitlines())} == expected


@pytest.mark.parametrize("value", ["0", "-1", "much", "nan", "inf"])
def test_size_of_the_cache_is_checked(value, there, monkeypatch):
    monkeypatch.setenv("BERT_JAX_CACHE_GB", value)
    with pytest.raises(InputError, match=rf"BERT_JAX_CACHE_GB={value}: "):
        read_shard(PreparedDataset(URL), 0)
