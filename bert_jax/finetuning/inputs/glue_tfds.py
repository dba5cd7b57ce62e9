"""GLUE from TensorFlow Datasets, read without TensorFlow: `tfds:glue/sst2`, prepared as ArrayRecord."""

from collections.abc import Sequence

import numpy as np

from bert_jax.data.preparation import tfds_corpus
from bert_jax.errors import InputError
from bert_jax.text.sequences import TextExample

_TEXTS = {"mrpc": ("sentence1", "sentence2"), "mnli": ("premise", "hypothesis")}  # not the names of the files' columns
_NO_LABEL = -1


def read_tfds(dataset: str, task: str, split: str, texts: Sequence[str]) -> list[TextExample]:
    """Reads the examples of a split in the order of GLUE's file (TFDS shuffles them).

    Args:
      dataset: `tfds:glue/NAME`, with or without a version.
      task: a key of `glue.TASKS`.
      split: a key of the task's `splits`; the diagnostic set is TFDS's `glue/ax`.
      texts: the text columns of GLUE's own files.

    Raises:
      InputError: the dataset is not prepared as ArrayRecord, or is another task's.
    """
    name = split.replace("dev", "validation")
    if split == "diagnostic":
        dataset, name = dataset.replace("/mnli", "/ax"), "test"
    examples = []
    for number, row in tfds_corpus.examples(dataset, name):
        features = _TEXTS.get(task, tuple(texts))
        if missing := {*features, "idx", "label"} - set(row):
            raise InputError(f"{dataset}: missing feature {', '.join(sorted(missing))}; expected GLUE's {task}")
        try:
            a, *rest = (row[key].decode("utf-8") for key in features)
        except UnicodeDecodeError as error:
            raise InputError(f"{dataset}:{name}: example {number} is not valid UTF-8; prepare it again") from error
        value = np.asarray(row["label"]).item()
        label = None if value == _NO_LABEL else value
        examples.append((int(row["idx"]), TextExample(str(int(row["idx"])), a, rest[0] if rest else None, label)))
    if not examples:
        raise InputError(f"{dataset}:{name}: expected at least 1 example, got 0")
    return [example for _, example in sorted(examples, key=lambda pair: pair[0])]
