"""GLUE as TFDS has it: datasets of its layout, written by TFDS itself as ArrayRecord."""

import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds

from bert_jax.errors import InputError
from bert_jax.finetuning.rows import BadRows
from bert_jax.finetuning.tasks.glue import TASKS, GlueTask
from bert_jax.finetuning.tasks.text import TextExample

PREMISE = ("premise", "hypothesis")
SPLITS = ("train", "validation", "test")
CONFIGS = {  # the features, the classes, and the splits of each
    "sst2": (("sentence",), ("negative", "positive"), SPLITS),
    "cola": (("sentence",), ("unacceptable", "acceptable"), ("train",)),
    "mrpc": (("sentence1", "sentence2"), ("not_equivalent", "equivalent"), SPLITS),
    "stsb": (("sentence1", "sentence2"), None, SPLITS),
    "mnli": (PREMISE, TASKS["mnli"].classes, ("train", "validation_matched", "validation_mismatched", "test_matched")),
    "ax": (PREMISE, TASKS["mnli"].classes, ("test",)),
}


class Glue(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("2.0.0")
    code_path = None
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in CONFIGS]  # noqa: RUF012

    def _info(self):
        texts, classes, _ = CONFIGS[self.builder_config.name]
        features = {name: tfds.features.Text() for name in texts}
        features["label"] = tfds.features.ClassLabel(names=list(classes)) if classes else np.float32
        features["idx"] = np.int32
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in CONFIGS[self.builder_config.name][2]}

    def _generate_examples(self, split):
        texts, classes, _ = CONFIGS[self.builder_config.name]
        for number in range(8):  # TFDS shuffles them
            label = -1 if split.startswith("test") else number % 2 if classes else number / 2
            row = {name: f"é {split} {name} {number}" for name in texts}
            if self.builder_config.name == "cola":
                row["sentence"] = b"caf\xe9"
            yield number, {**row, "label": label, "idx": number}


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    tfds.disable_progress_bar()
    for name in CONFIGS:
        download = tfds.download.DownloadConfig(try_download_gcs=False)
        builder = Glue(config=name, data_dir=folder, file_format="array_record")
        builder.download_and_prepare(download_config=download)
    return folder


@pytest.fixture(autouse=True)
def environment(tfds_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_dir))


def read(dataset: str, task: str, split: str) -> list[TextExample]:
    labels = "ignored" if split in TASKS[task].submissions else "required"
    return GlueTask.of(task).read(dataset, BadRows(strict=True), split=split, labels=labels)


@pytest.mark.parametrize(
    ("task", "split", "theirs", "texts"),
    [
        ("sst2", "train", "train", ("sentence",)),
        ("mrpc", "dev", "validation", ("sentence1", "sentence2")),
        ("stsb", "train", "train", ("sentence1", "sentence2")),
        ("stsb", "test", "test", ("sentence1", "sentence2")),
        ("mnli", "dev_mismatched", "validation_mismatched", PREMISE),
        ("mnli", "test_matched", "test_matched", PREMISE),
        ("mnli", "diagnostic", "test", PREMISE),
    ],
)
def test_splits(task: str, split: str, theirs: str, texts: tuple[str, ...]):
    def label(number: int) -> str | float | None:
        return None if "test" in theirs else number / 2 if task == "stsb" else TASKS[task].classes[number % 2]

    expected = [
        TextExample(
            str(number), f"é {theirs} {texts[0]} {number}",
            f"é {theirs} {texts[1]} {number}" if len(texts) > 1 else None, label(number),
        )
        for number in range(8)
    ]  # fmt: skip
    assert read(f"tfds:glue/{task}", task, split) == expected
    assert read(f"tfds:glue/{task}:2.0.0", task, split) == expected


def test_what_is_not_there_is_named():
    with pytest.raises(InputError, match="tfds:glue/rte: "):
        read("tfds:glue/rte", "rte", "train")
    with pytest.raises(InputError, match=r"tfds:glue/mnli: .*question, sentence.*qnli"):
        read("tfds:glue/mnli", "qnli", "train")
    with pytest.raises(InputError, match=r"tfds:glue/mnli:test_mismatched: .*test_mismatched"):
        read("tfds:glue/mnli", "mnli", "test_mismatched")


def test_a_damaged_file_is_named(tfds_dir, tmp_path, monkeypatch):
    shutil.copytree(tfds_dir, tmp_path / "copy")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "copy"))
    (path,) = (tmp_path / "copy" / "glue" / "sst2").rglob("glue-train.array_record*")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"train", b"tr\xffin"))
    with pytest.raises(InputError, match=r"tfds:glue/sst2.*:train: "):
        read("tfds:glue/sst2", "sst2", "train")
    path.write_bytes(data[:100])
    with pytest.raises(InputError, match=r"tfds:glue/sst2.*:train: "):
        read("tfds:glue/sst2", "sst2", "train")


def test_text_that_is_not_utf8():
    with pytest.raises(InputError, match=r"tfds:glue/cola:train: .*\b0\b.*UTF-8"):
        read("tfds:glue/cola", "cola", "train")
