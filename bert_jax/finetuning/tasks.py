"""All kinds of tasks by name."""

from collections.abc import Callable

from bert_jax.config import ConfigDict
from bert_jax.finetuning.choice_task import choice_task
from bert_jax.finetuning.encoded_rows import Encoding
from bert_jax.finetuning.ner_task import ner_task
from bert_jax.finetuning.squad_task import squad_task
from bert_jax.finetuning.task import Task
from bert_jax.finetuning.text_tasks import glue_task, own_task

TASKS: dict[str, Callable[[ConfigDict, Encoding], Task]] = {
    "glue": glue_task, "text": own_task, "squad": squad_task, "choice": choice_task, "ner": ner_task,
}  # fmt: skip
"""By `task.kind`: what reads it, from a config and how texts are encoded."""
