"""Shared fixtures: eight simulated CPU devices, a small English corpus, and the folder of real data, if any."""

import gc
import logging
import os
import signal
from collections.abc import Iterator

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: libtpu would ignore SIGHUP, and children with it

from support import gcs, helpers
from support.child_processes import ends_what_it_starts  # noqa: F401

os.environ.update(helpers.child_environment(devices=8))  # before JAX makes its devices

from pathlib import Path

import jax
import orbax.checkpoint as ocp
import pytest
from support.strict_device import strict_devices

from bert_jax.text.tokenizer import Tokenizer, read_tokenizer

gc.disable()  # until tests are collected
for number in (signal.SIGINT, signal.SIGHUP):  # a shell's background processes and `nohup` ignore them
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update_golden", action="store_true", help="write golden files anew from what the code does now")
    parser.addoption("--strict_devices", action="store_true", help="run on devices as strict as TPUs and GPUs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs runs and processes first: they wait for each other, and a worker that ends with one leaves others idle."""
    items.sort(key=lambda item: item.path.parent.name not in ("training", "runtime") and "device" not in item.path.name)


def pytest_collection_finish() -> None:
    """Enables the garbage collector for tests, but not for the imports and tests that live to the end of the run."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # JAX makes many objects that live: frequent collections find little garbage
    gc.enable()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real text and task data; tests that need it skip where there is none."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    path = Path(os.environ.get("BERT_JAX_DATA", beside))
    if not path.is_dir():
        pytest.skip("needs real data: set BERT_JAX_DATA to its folder")
    return path


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Leaves the user's own cache alone, here and in the processes that are started."""
    os.environ["BERT_JAX_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _strict_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --strict_devices, makes devices strict: here, and in the processes that run commands."""
    if not request.config.getoption("strict_devices"):
        yield
        return
    os.environ[helpers.STRICT] = "1"
    with strict_devices():
        yield


@pytest.fixture(scope="session", autouse=True)
def _whole_arrays() -> None:
    """Makes Orbax save arrays below 64 kiB whole: by default each of the eight devices saves an eighth.

    That takes half a second per save, most of a small run. Large arrays and other processes slice as by default.
    """
    ocp.type_handlers.register_type_handler(
        jax.Array, ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=64 << 10), override=True
    )


@pytest.fixture(scope="session")
def _emulator() -> Iterator[gcs.Emulator]:
    server = gcs.Emulator()
    yield server
    server.stop()


@pytest.fixture
def store(_emulator: gcs.Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gcs.Emulator:
    """gs://bucket, empty, served here to this process and to those that it starts; and a cache for the test alone."""
    _emulator.clear()
    for name, value in {**_emulator.environment, "BERT_JAX_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    return _emulator


@pytest.fixture(scope="session")
def vocabulary() -> list[str]:
    return helpers.make_vocabulary()


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(helpers.make_corpus(documents=300))
    return path


@pytest.fixture(scope="session")
def vocabulary_file(tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str]) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    helpers.write_tokenizer(path, vocabulary)
    return path


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path, vocabulary_file: Path) -> Path:
    """A prepared dataset of sequences of 64 tokens, some 700 for training."""
    path = tmp_path_factory.mktemp("dataset") / "data"
    helpers.prepare_dataset(corpus_file, vocabulary_file, path)
    return path


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory: pytest.TempPathFactory, vocabulary_file: Path) -> Path:
    """A smaller dataset of other documents, of the same vocabulary and length."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "corpus.txt").write_text(helpers.make_corpus(documents=80, seed=7))
    helpers.prepare_dataset(folder / "corpus.txt", vocabulary_file, folder / "data")
    return folder / "data"


@pytest.fixture(scope="session")
def tokenizer(vocabulary_file: Path) -> Tokenizer:
    return read_tokenizer(vocabulary_file)


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Restores the package's logger after a test that runs a command: commands keep the log from pytest's handler."""
    package = logging.getLogger("bert_jax")
    before = package.handlers, package.level, package.propagate
    yield
    package.handlers, package.propagate = before[0], before[2]
    package.setLevel(before[1])
