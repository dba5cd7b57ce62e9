"""Every key of a study, once. The other configs here are differences from this one.

A study is a table: its rows are encoders, pre-trained here or before, its columns are scores of the tasks that each of
them is fine-tuned on. `config.rows` are `StudyRow`s and `config.tasks` are `StudyTask`s, or dicts with their keys.
`config.pretraining` is a whole config of pre-training, by default of BERT-BASE.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping

import ml_collections

from bert_jax.configs import bert


def _is_of(value, kind):
    """Returns True if a value has the type of an annotation. An int is also a float, and a list also a tuple."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return any(_is_of(value, one) for one in inner)
    if origin is dict:
        is_dict = isinstance(value, Mapping)
        return is_dict and all(isinstance(key, str) and _is_of(one, inner[1]) for key, one in value.items())
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(_is_of(one, inner[0]) for one in value)
    return isinstance(value, (int, float) if kind is float else kind)


class _Entry:
    """Base of rows and tasks, `KEY` of the config."""

    def __post_init__(self):
        """Raises ValueError, with the key that is wrong, for a field of another type or an invalid name."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _is_of(value, field.type):
                expected = str(field.type).removeprefix("<class '").removesuffix("'>")
                raise ValueError(f"{self.KEY}: {self.name!r}: {field.name}={value!r:.80}: expected {expected}")
        if not re.search(r"[^\W_]", self.name):
            raise ValueError(f"{self.KEY}: name={self.name!r}: must contain a letter or digit, since it names a folder")


@dataclasses.dataclass(frozen=True)
class StudyRow(_Entry):
    """A row of a study's table: an encoder.

    Attributes:
      name: the row's name in the table.
      pretraining: overrides of `config.pretraining`; rows with the same overrides share one run.
      checkpoint: base or large, a key of `config.checkpoints`, instead of `pretraining`.
      config: a config of fine-tuning, instead of the tasks'.
      finetuning: overrides of fine-tuning, for all tasks.
      tasks: names of the tasks that it is fine-tuned on; (): all.
      paper: the paper's numbers, by column.
    """

    KEY = "rows"
    name: str = ""
    pretraining: dict[str, object] | None = None
    checkpoint: str = ""
    config: str = ""
    finetuning: dict[str, object] = dataclasses.field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    paper: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StudyTask(_Entry):
    """A task that rows are fine-tuned on.

    Attributes:
      name: the task's name.
      config: a config of fine-tuning, as `--config` of finetune takes it.
      finetuning: overrides of fine-tuning; its data.path is relative to `config.task_data`.
      columns: the table's columns and their scores, such as {"MNLI-m": "dev_matched/accuracy"}; by default one column,
        of the task's name, with its main metric.
      scale: factor of the scores; 1 for scores that are percentages already, such as SQuAD's.
    """

    KEY = "tasks"
    name: str = ""
    config: str = ""
    finetuning: dict[str, object] = dataclasses.field(default_factory=dict)
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    scale: float = 100

    def __post_init__(self):
        super().__post_init__()
        if not self.config:
            raise ValueError(
                f"tasks: {self.name!r}: config is missing; set a fine-tuning config, such as finetune/glue:sst2"
            )
        object.__setattr__(self, "columns", self.columns or {self.name: ""})


def get_config():
    config = ml_collections.ConfigDict()
    config.title = ""  # Title of the table.
    config.note = ""  # Text below the title, such as the metrics of the columns.
    config.pretraining = bert.get_config()  # A whole config of pre-training, by default of BERT-BASE.
    config.checkpoints = ml_collections.ConfigDict({"base": "", "large": ""})  # Encoders that exist already.
    config.task_data = ""  # Folder of the tasks' data.
    config.rows = ()  # `StudyRow`s, or dicts with their keys.
    config.tasks = ()  # `StudyTask`s, or dicts with their keys.
    config.only_rows = ()  # Names of rows to run; (): all.
    config.only_tasks = ()  # Names of tasks to run; (): all.
    config.perplexity = False  # True: a column with the perplexity of pre-training on held-out text.
    return config
