"""TFDS corpora, written in the tests by TFDS itself, as ArrayRecord: only TensorFlow can write TFRecord."""

import json
import random
import re
import shutil
import socket
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from support import helpers
from support.preparing import files
from support.reading import documents

from bert_jax import cli
from bert_jax.data.corpora import corpus, tfds_corpus
from bert_jax.data.corpora.corpus import CorpusOptions, expand, plan
from bert_jax.data.preparation.pipeline import PrepareOptions, prepare
from bert_jax.errors import InputError
from bert_jax.text.tokenizer import read_tokenizer

TEXTS = [f"  {text}\r\n\n \u3000\n" for text in helpers.make_corpus(documents=300).split("\n\n")]
LATIN = ["café", b"caf\xe9", "tea", "tea", "tea"]
TEXTS[7] = " \n "
TEXTS[8] = "é\u2028漢字 😀\n😀"


class Fables(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.2.3")
    code_path = None  # TFDS looks for check sums beside the code with importlib_resources, and does not require it
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="20230601.en")]  # noqa: RUF012

    def _info(self):
        features = {
            "text": tfds.features.Text(),
            "title": tfds.features.Tensor(shape=(), dtype=np.object_),
            "moral": tfds.features.Text(optional=True),
            "words": tfds.features.Sequence(tfds.features.Text()),
            "nested": {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(names=["a", "b"])},
            "year": np.int64,
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(TEXTS), "test": self._generate_examples(LATIN)}

    def _generate_examples(self, texts):
        for number, text in enumerate(texts):
            yield number, {
                "text": text, "title": f"Title {number}", "moral": None if number % 2 else f"Moral {number}",
                "words": ["a", "b"], "nested": {"text": "c", "label": "a"}, "year": number,
            }  # fmt: skip


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    tfds.disable_progress_bar()
    config = tfds.download.DownloadConfig(num_shards=5, try_download_gcs=False)
    Fables(data_dir=folder, file_format="array_record").download_and_prepare(download_config=config)
    return folder


@pytest.fixture(autouse=True)
def environment(data_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    tfds_corpus._open.cache_clear()


@pytest.fixture
def copy(data_dir, tmp_path, monkeypatch):
    """Copies the dataset, for tests that damage its files."""
    shutil.copytree(data_dir, tmp_path / "copy")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "copy"))
    tfds_corpus._open.cache_clear()
    return tmp_path / "copy" / "fables" / "20230601.en" / "1.2.3"


def json_lines(path):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


# --- Documents --------------------------------------------------------------------------------------------------


def test_documents_are_those_of_json_lines_whatever_the_slices(tmp_path):
    expected = documents(json_lines(tmp_path / "a.jsonl"))
    assert len(expected) == 299
    for slice_bytes in (5000, 77_777, 1 << 30):
        assert documents("tfds:fables/20230601.en", slice_bytes=slice_bytes) == expected


def test_workers_write_the_dataset_of_one_process_and_of_json_lines(tmp_path, vocabulary_file, monkeypatch):
    """Neither the command nor its workers import TensorFlow, which would fail and create a marker file."""
    (tmp_path / "path" / "tensorflow").mkdir(parents=True)
    (tmp_path / "path" / "tensorflow" / "__init__.py").write_text(
        f"open({str(tmp_path / 'mark')!r}, 'w').close()\nraise ImportError('no TensorFlow here')\n"
    )
    paths = [str(tmp_path / "path"), *(path for path in sys.path if path)]
    result = helpers.run_cli(
        "prepare", "--input", "tfds:fables:train[:40%]", "tfds:fables:train[40%:]", "--vocab", vocabulary_file,
        "--output", tmp_path / "parallel", "--workers", 2, "--seq_len", 64, "--eval_fraction", 0.1,
        "--bucket_tokens", 4096, "--sentences", "lines", PYTHONPATH=":".join(paths),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "ensor" not in result.stderr
    assert not (tmp_path / "mark").exists()

    tokenizer = read_tokenizer(vocabulary_file)
    cut = corpus.plan
    monkeypatch.setattr(corpus, "plan", lambda inputs, options, **_: cut(inputs, options, 50_000))
    assert len(corpus.plan(["tfds:fables"], CorpusOptions())) > 5
    options = PrepareOptions(seq_len=64, eval_fraction=0.1, bucket_tokens=4096, sentences="lines")
    for name, source in (("serial", "tfds:fables"), ("json", json_lines(tmp_path / "a.jsonl"))):
        prepare([source], tokenizer, str(tmp_path / name), options)
    assert files(tmp_path / "serial") == files(tmp_path / "parallel") == files(tmp_path / "json")
    assert len(files(tmp_path / "serial")) > 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tfds:fables/20230601.en:1.2.3:train[2:4]:title", ["Title 2", "Title 3"]),
        ("tfds:fables:1.*.*:train[-1:]:title", ["Title 299"]),
        ("tfds:fables:train[:1%]+test[:1]:title", ["Title 0", "Title 1", "Title 2", "Title 0"]),
        ("tfds:fables:test[:1]", ["café"]),
        ("tfds:fables:1.2.3:test[:1]", ["café"]),
        ("tfds:fables:train[:5]:moral", ["Moral 0", "Moral 2", "Moral 4"]),
        ("tfds:fables::title", [f"Title {number}" for number in range(300)]),
    ],
)
def test_versions_splits_and_features(name, expected):
    for slice_bytes in (1, 1 << 30):
        assert documents(name, slice_bytes=slice_bytes) == expected


def test_text_field_is_the_default_of_the_feature():
    assert documents("tfds:fables:test[:1]", text_field="title") == ["Title 0"]
    assert documents("tfds:fables:test[:1]:text", text_field="title") == ["café"]
    with pytest.raises(InputError, match=r"'titel'.*title"):
        documents("tfds:fables", text_field="titel")


def test_an_input_is_read_once_however_it_is_written():
    assert expand(["tfds:fables", "tfds:fables:train", "tfds:fables::text"]) == ["tfds:fables:train:text"]


def test_text_that_is_not_utf8():
    with pytest.raises(InputError, match=r"^tfds:fables:test:text: example 1\b.*\b0xe9\b.*--errors replace"):
        documents("tfds:fables:test")
    assert documents("tfds:fables:test", errors="replace") == ["café", "caf\ufffd", "tea", "tea", "tea"]


# --- Refusals ---------------------------------------------------------------------------------------------------


def refusal(capsys, tmp_path, name):
    """Returns the one-line error of `bert-jax vocab` for an input."""
    assert cli.main(["vocab", "--input", name, "--output", str(tmp_path / "tokenizer.json"), "--size", "200"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bert-jax vocab: ")
    assert error.count("\n") == 1
    return error.removeprefix("bert-jax vocab: ").strip()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tfds:mnist", "tfds:mnist: ... TFDS_DATA_DIR ... tfds build mnist --file_format=array_record"),
        ("tfds:fables/other:train", "tfds:fables/other: ... TFDS_DATA_DIR"),
        ("tfds:fables:2.0.0", "tfds:fables:2.0.0: ... TFDS_DATA_DIR"),
        ("tfds:fables:dev", "tfds:fables:dev:text: ... 'dev' ... ['t"),
        ("tfds:fables:train[:x]", "tfds:fables:train[:x]:text: ... 'train[:x]'"),
        ("tfds:fables:train[:999]", "tfds:fables:train[:999]:text: ... [:999] ... 300"),
        ("tfds:fables::body", "tfds:fables:train:body: ... 'body' ... moral, text, title"),
        ("tfds:fables::nested", "tfds:fables:train:nested: ... 'nested' ... moral, text, title"),
        ("tfds:", "tfds:: ... tfds:NAME ... tfds:NAME:SPLIT ... tfds:NAME:SPLIT:FEATURE"),
        ("tfds:fables:train:text:1", "tfds:fables:train:text:1: ... tfds:NAME"),
        ("tfds:fables:train[", "tfds:fables:train[: ... tfds:NAME"),
    ],
)  # fmt: skip
def test_inputs_that_name_nothing(capsys, tmp_path, data_dir, monkeypatch, name, message):
    """Refuses the input; `message` holds the parts of the error in order, separated by " ... "."""

    def connect(self, address):
        raise AssertionError(f"went to the network: {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    parts = map(re.escape, message.format(data_dir).split(" ... "))
    assert re.match(".*".join(parts), refusal(capsys, tmp_path, name))
    assert [path.name for path in data_dir.iterdir() if path.name != "downloads"] == ["fables"]


def set_formats(copy, main, *others):
    info = json.loads((copy / "dataset_info.json").read_text())
    info.update(fileFormat=main, alternativeFileFormats=others)
    (copy / "dataset_info.json").write_text(json.dumps(info))


def test_a_dataset_that_was_converted_in_place_is_read(copy):
    expected = documents("tfds:fables:train[:9]")
    set_formats(copy, "tfrecord", "array_record")
    tfds_corpus._open.cache_clear()
    assert documents("tfds:fables:train[:9]") == expected
    with pytest.raises(InputError, match=r"^tfds:fables:test\[:1%\]:"):
        documents("tfds:fables:test[:1%]")  # none of five


def test_files_that_are_damaged(copy):
    shard = copy / "fables-train.array_record-00002-of-00005"
    shard.write_bytes(random.Random(0).randbytes(shard.stat().st_size))
    with pytest.raises(InputError, match=r"^tfds:fables:train:text: example 120\b.*\(.+\)"):
        documents("tfds:fables")
    shard.unlink()
    with pytest.raises(InputError, match=f"^{shard}: "):
        plan(["tfds:fables"], CorpusOptions())
    tfds_corpus._open.cache_clear()
    (copy / "features.json").write_text("{")
    with pytest.raises(InputError, match=r"^tfds:fables: .*\(.+\)"):
        plan(["tfds:fables"], CorpusOptions())
