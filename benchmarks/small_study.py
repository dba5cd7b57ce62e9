"""Config of a study that runs on a laptop: the value of pre-training and of its two tasks, measured downstream.

    benchmarks/small_study.sh [OUTPUT]

Compares BERT-Tiny, with the pre-training of `reference_cpu.py`, with the same encoder untrained, without NSP, and
left-to-right. All are fine-tuned with the same search. The scores are not comparable with the paper's.
"""

import importlib.util
from pathlib import Path

from bert_jax.configs import ablations
from bert_jax.configs.studies import default

SEARCH = {
    "search.learning_rates": (1e-3, 3e-4), "search.seeds": (0, 1, 2, 3, 4), "optimizer.bias_correction": True,
    "task.max_seq_len": 128, "checkpoint.every_steps": 100_000,
}  # fmt: skip
MORE_RATES = {"search.learning_rates": (3e-3, 1e-3, 3e-4)}  # for tasks whose best of the two is 1e-3
FEWER_SEEDS = {"search.seeds": (0, 1, 2)}  # for tasks whose runs take minutes


def task(name, config, path, columns=None, **finetuning):
    found = {"name": name, "config": config, "finetuning": {**SEARCH, "data.path": path, **finetuning}}
    return {**found, "columns": columns} if columns else found


TASKS = (
    task("STS-B", "finetune/glue:stsb", "glue/STS-B"),
    task("SST-2", "finetune/glue:sst2", "glue/SST-2", num_epochs=1, **MORE_RATES),
    task("SST-2, 2,000 rows", "finetune/glue:sst2", "few", num_epochs=10, **MORE_RATES),
    task("MRPC", "finetune/glue:mrpc", "glue/MRPC", {"MRPC": "dev/f1"}),
    task("CoLA", "finetune/glue:cola", "glue/CoLA"),
    task("WNUT-17", "finetune/ner", "wnut17", {"WNUT-17": "dev/f1"}, num_epochs=5, **MORE_RATES),
    task("CODAH", "finetune/swag", "codah", **FEWER_SEEDS),
    task(
        "Korean", "finetune/text", "korean",
        **FEWER_SEEDS,
        **{"task.train": "train.jsonl", "task.dev": "dev.jsonl", "task.text": "first", "task.text_pair": "second"},
    ),
    {
        **task(
            "SQuAD, subset", "finetune/squad", "squad", {"SQuAD, subset": "dev/f1"},
            **{
                "search.learning_rates": (1e-3,), "search.seeds": (0,), "task.doc_stride": 64,
                "task.train": "train-v1.1.partial-12articles.json", "task.dev": "dev-v1.1.json",
            },
        ),
        "scale": 1,
    },
)  # fmt: skip
OF_ABLATIONS = ("STS-B", "SST-2, 2,000 rows", "MRPC")


def get_config():
    config = default.get_config()
    config.title = "BERT-Tiny on 41 M tokens: pre-training, and its tasks"
    config.note = (
        "STS-B is Spearman's correlation, MRPC F1, CoLA Matthews' correlation, WNUT-17 F1 of entities, SQuAD F1 "
        "after training on 12 articles of its 442 (one run), the others accuracy; all on dev sets."
    )
    config.pretraining = _reference().get_config()
    rows = ablations.TABLE_5
    config.rows = (
        {"name": "MLM & NSP"},
        {"name": "untrained", "finetuning": {"from_scratch": True}},
        {"name": "No NSP", "pretraining": rows["no_nsp"], "tasks": OF_ABLATIONS},
        {"name": "LTR & No NSP", "pretraining": rows["ltr_no_nsp"], "tasks": OF_ABLATIONS},
        {
            "name": "+ BiLSTM", "pretraining": rows["ltr_no_nsp_bilstm"], "finetuning": {"head.bilstm": 128},
            "tasks": OF_ABLATIONS,
        },
    )  # fmt: skip
    config.tasks = TASKS
    return config


def _reference():
    spec = importlib.util.spec_from_file_location("reference_cpu", Path(__file__).parent / "reference_cpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
