"""Versions of the order of rows, and the parts of a dataset that a process reads for its rows."""

import hashlib
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support import helpers

import bert_jax.data.dataset
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import TrainLoader, TrainRows
from bert_jax.data.loading.masking import Masking
from bert_jax.data.preparation import shards
from bert_jax.errors import InputError

BATCH = 64


@pytest.fixture(scope="module")
def small_blocks():
    """Makes blocks of 4 instances, so that a small dataset has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BLOCK", 4)
        patch.setattr(bert_jax.data.dataset, "BLOCK", 4)
        yield


@pytest.fixture(scope="module")
def folders(small_blocks, tmp_path_factory, vocabulary_file):
    folder = tmp_path_factory.mktemp("blocks")
    for name, documents, seed in (("data", 500, 1), ("other", 80, 7)):
        (folder / "corpus.txt").write_text(helpers.make_corpus(documents=documents, seed=seed))
        helpers.prepare_dataset(folder / "corpus.txt", vocabulary_file, folder / name, bucket_tokens=4096)
    return [str(folder / name) for name in ("data", "other")]


def make(*folders, batch=BATCH, max_sequences=1, row_order=2, stop=None):
    rows = [
        TrainRows(
            PreparedDataset(folder), seed=5, masking=Masking(10), max_sequences=max_sequences, row_order=row_order
        )
        for folder in folders
    ]
    return TrainLoader(rows, seed=5, global_batch_size=batch, stop=stop)


def assert_same(one, other):
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def digest(loader):
    found = hashlib.blake2b(digest_size=8)
    for step in (0, 1, 9, 40, 500):
        for _, entry in sorted(loader.batch(step).items()):
            found.update(np.ascontiguousarray(entry).tobytes())
    return found.hexdigest()


EARLIER = {
    (1, 1): "f9433278ed5194e4",
    (1, 2): "589210259642ab1a",
    (3, 1): "5dd959514f875154",
    (3, 2): "65e93736aa3c8cc3",
}
"""Digests of version 0.1.0 before it had versions of the order, by sequences in a row and number of datasets."""


@pytest.mark.parametrize(("max_sequences", "datasets"), EARLIER)
def test_order_1_is_that_of_earlier_versions(folders, max_sequences, datasets):
    loader = make(*folders[:datasets], batch=24, max_sequences=max_sequences, row_order=1)
    assert digest(loader) == EARLIER[max_sequences, datasets]


def test_unknown_order_is_refused(folders):
    with pytest.raises(InputError, match=r"row_order=3\b.*\b1 or 2\b"):
        make(folders[0], row_order=3)


@pytest.mark.parametrize("max_sequences", [1, 3])
@pytest.mark.parametrize("batch", [BATCH, 1024])
def test_process_of_eight_reads_its_part_of_the_dataset(folders, max_sequences, batch):
    """The batches are those of one process; the blocks read in two epochs are an eighth of all, and some more."""
    whole, mine = (make(folders[0], batch=batch, max_sequences=max_sequences) for _ in range(2))
    (rows,) = mine.sources
    dataset, read = rows.dataset, set()
    read_blocks = dataset.read_blocks
    dataset.read_blocks = lambda split, blocks: read.update(blocks.tolist()) or read_blocks(split, blocks)
    blocks = len(dataset.block_sizes("train"))
    assert blocks > 4 * 64
    share = slice(3 * batch // 8, 4 * batch // 8)
    for step in range(2 * rows.size // batch):
        part = mine.batch(step, share)
        assert_same(part, {name: entry[share] for name, entry in whole.batch(step).items()})
    assert len(read) < 0.4 * blocks
    assert len(read) > 0.1 * blocks


@pytest.mark.parametrize("max_sequences", [1, 3])
def test_any_rows_in_any_order_are_those_of_the_batch(folders, max_sequences):
    whole = make(*folders, max_sequences=max_sequences).batch(7)
    loader = make(*folders, max_sequences=max_sequences)
    for chosen in (np.array([63, 0, 5]), slice(60, None), np.arange(0, 64, 7)):
        assert_same(loader.batch(7, chosen), {name: entry[chosen] for name, entry in whole.items()})


def test_next_window_is_read_ahead_by_a_thread(folders):
    loader = make(folders[0])
    (rows,) = loader.sources
    readers, read_blocks = [], rows.dataset.read_blocks

    def spy(split, blocks):
        readers.append(threading.current_thread())
        return read_blocks(split, blocks)

    rows.dataset.read_blocks = spy
    for step in range(3 * rows.size // BATCH):
        loader.batch(step)
        wait_for_read_ahead()
    own = readers.count(threading.current_thread())
    assert own <= 2  # the first window, and no other
    assert len(readers) > 10
    assert not any(thread.daemon for thread in readers)  # the end of the program would block in a reader


def test_nothing_is_read_ahead_for_steps_after_the_last_one(folders, monkeypatch):
    loader = make(folders[0], stop=40)
    (rows,) = loader.sources
    read = []
    monkeypatch.setattr(rows, "prepare", lambda numbers: read.append(numbers))
    ahead = math.ceil(rows.window_rows / BATCH)
    loader.prepare(40 - ahead, slice(None))
    assert not read
    loader.prepare(39 - ahead, slice(None))
    assert len(read) == 1


def test_failed_read_ahead_is_no_error_until_the_rows_are_needed(folders):
    loader = make(folders[0])
    (rows,) = loader.sources
    loader.batch(0)
    time.sleep(0.2)
    last = 3 * rows.size // BATCH
    rows.dataset.read_blocks = lambda *_: (_ for _ in ()).throw(OSError("disk"))
    loader.batch(1)
    with pytest.raises(OSError, match="disk"):
        loader.batch(last)


@pytest.fixture
def remote_folder(folders, store):
    for path in Path(folders[0]).iterdir():
        store.put(f"data/{path.name}", path.read_bytes())
    store.requests.clear()
    return "gs://bucket/data"


def wait_for_read_ahead():
    deadline = time.monotonic() + 10
    while any(thread.name == "read-ahead" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_process_of_eight_downloads_its_part_of_a_remote_dataset(folders, remote_folder, store):
    loader, local = make(remote_folder), make(folders[0])
    (rows,) = loader.sources
    shards = [shard.file for shard in rows.dataset.info.splits["train"].shards]
    assert len(shards) >= 10
    share = slice(0, BATCH // 8)
    for step in range(rows.size // BATCH):
        assert_same(loader.batch(step, share), local.batch(step, share))
    wait_for_read_ahead()
    fetched = [store.count("GET", shard, "alt=media") for shard in shards]
    assert max(fetched) == 1
    assert 1 <= sum(fetched) <= 0.5 * len(shards)


def test_shards_are_downloaded_ahead_of_need(folders, remote_folder, monkeypatch):
    """The blocks that a process needs eight windows later are fetched, but not read."""
    ahead, later = make(remote_folder), make(folders[0])
    fetched, read = set(), set()
    for loader, method, found in ((ahead, "fetch_blocks", fetched), (later, "read_blocks", read)):
        (rows,) = loader.sources
        real = getattr(rows.dataset, method)
        monkeypatch.setattr(
            rows.dataset, method,
            lambda split, blocks, real=real, found=found: found.update(blocks.tolist()) or real(split, blocks),
        )  # fmt: skip
    share = slice(0, BATCH // 8)
    ahead.prepare(3, share)
    steps = 8 * math.ceil(ahead.sources[0].window_rows / BATCH)
    later.sources[0].rows(later.row_numbers(3 + steps)[1][share])
    assert fetched
    assert fetched == read
