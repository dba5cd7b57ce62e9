"""GLUE as TensorFlow Datasets has it, read without TensorFlow: `tfds:glue/sst2`, prepared as ArrayRecord."""

from collections.abc import Sequence

import numpy as np

from bert_jax.data.preparation import tfds_corpus
from bert_jax.errors import InputError
from bert_jax.text.examples import TextExample

_TEXTS = {"mrpc": ("sentence1", "sentence2"), "mnli": ("premise", "hypothesis")}  # not the names of the files' columns
_NO_LABEL = -1


def read_tfds(dataset: str, task: str, split: str, texts: Sequence[str]) -> list[TextExample]:
    """The examples of a split in the order of GLUE's file (TFDS shuffles them).

    Args:
      dataset: `tfds:glue/NAME`, with or without a version.
      task: a name of `glue.TASKS`.
      split: as that task calls it; the diagnostic set is TFDS's `glue/ax`.
      texts: the columns of the texts in GLUE's own files.

    Raises:
      InputError: the dataset is not there as ArrayRecord, or is not this task's.
    """
    name = split.replace("dev", "validation")
    if split == "diagnostic":
        dataset, name = dataset.replace("/mnli", "/ax"), "test"
    examples = []
    for number, row in tfds_corpus.examples(dataset, name):
        wanted = _TEXTS.get(task, tuple(texts))
        if missing := {*wanted, "idx", "label"} - set(row):
            raise InputError(f"{dataset}: no feature {', '.join(sorted(missing))}; is this GLUE's {task}?")
        try:
            a, *rest = (row[key].decode("utf-8") for key in wanted)
        except UnicodeDecodeError as error:
            raise InputError(f"{dataset}:{name}: example {number} is not valid UTF-8; prepare it again") from error
        value = np.asarray(row["label"]).item()
        label = None if value == _NO_LABEL else value
        examples.append((int(row["idx"]), TextExample(str(int(row["idx"])), a, rest[0] if rest else None, label)))
    if not examples:
        raise InputError(f"{dataset}:{name}: there is no example in this split")
    return [example for _, example in sorted(examples, key=lambda pair: pair[0])]
