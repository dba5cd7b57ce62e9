"""All kinds of tasks: read from a config to fine-tune a model, and from the record of a fine-tuned one."""

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.finetuning.task import BadRows, Split, Task, read_split
from bert_jax.finetuning.tasks.choice import ChoiceTask
from bert_jax.finetuning.tasks.ner import NerTask
from bert_jax.finetuning.tasks.squad import SquadTask
from bert_jax.finetuning.tasks.text import GlueTask, TextTask
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpoints import Checkpoint

KINDS: dict[str, type[Task]] = {
    "glue": GlueTask, "text": TextTask, "squad": SquadTask, "choice": ChoiceTask, "ner": NerTask,
}  # fmt: skip
"""By `task.kind`, which is the first part of a record's `name` as well."""


def task_of(found: Checkpoint) -> Task:
    """Returns the task of a fine-tuned checkpoint. InputError if it is not fine-tuned, or has an unknown task."""
    if found.task is None:
        raise InputError(f"{found.path}: not a fine-tuned checkpoint; give the --workdir of `bert-jax finetune`")
    kind = KINDS.get(found.task["name"].partition("/")[0])
    if kind is None:
        raise InputError(f"{found.path}: unknown task {found.task['name']!r}; expected one of {', '.join(KINDS)}")
    return kind.from_record(found.task)


def read_task(config: FinetuneConfig, tokenizer: Tokenizer) -> tuple[Task, Split, list[Split]]:
    """Reads and encodes the files of a config.

    Returns the task, its training split, and the splits to score or predict. Raises InputError if a file
    cannot be read.
    """
    task = KINDS[config.task.kind].from_config(config)
    files = task.find(config.data.path, {split: getattr(config.task, split) for split in ("train", "dev", "test")})
    if "train" not in files:
        usual = ", ".join(task.usual_files.get("train", ())) or "it"
        raise InputError(f"data.path={config.data.path}: training file not found ({usual}); set task.train=FILE")
    path, bad_rows = files.pop("train"), BadRows(strict=config.data.strict)
    task, examples = task.read_training(path, bad_rows)
    encoded = task.encode(examples, tokenizer, labelled=True)
    training = Split("train", examples, encoded, is_labelled=True, left_out=bad_rows.counts.pop(path, 0))
    return task, training, [
        read_split(
            task, split, path, bad_rows, tokenizer, split=split,
            labels="required" if split.startswith("dev") else task.test_labels,
        )
        for split, path in files.items()
    ]  # fmt: skip
