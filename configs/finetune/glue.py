"""A task of GLUE, from its distributed files.

    bert-jax finetune --config=finetune/glue:sst2 --workdir=runs/sst2 --config.init=runs/base \\
      --config.data.path=glue/SST-2

The argument is one of cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte and wnli.

Hardware, time: not yet run with BERT-BASE. `benchmarks/small_study.sh` has run STS-B, SST-2, MRPC and CoLA with
BERT-Tiny; docs/numbers/expected_numbers.md has the scores.
Score to expect: 93.5 on the test set of SST-2 (BERT-BASE, the paper's table 1); `studies/table1` has all tasks.
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import default

TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")


def get_config(task: str = "") -> ConfigDict:
    if task not in TASKS:
        raise ValueError(f"{task!r}: unknown GLUE task; expected one of {', '.join(TASKS)}")
    config = default.get_config()
    config.task.kind = "glue"
    config.task.name = task
    return config
