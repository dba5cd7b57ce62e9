"""The tasks of the paper's tables, with the searches that it made on dev.

`--config.task_data=FOLDER` holds them as glue/CoLA, glue/MNLI, ..., squad, swag, conll2003.
"""

SEEDS = (0, 1, 2, 3, 4)


def glue(task, folder, **more):
    """Returns a GLUE task that searches the paper's learning rates with five restarts."""
    finetuning = {
        "data.path": f"glue/{folder}", "search.learning_rates": (5e-5, 4e-5, 3e-5, 2e-5), "search.seeds": SEEDS
    }  # fmt: skip
    return {"name": folder, "config": f"finetune/glue:{task}", "finetuning": finetuning, **more}


MNLI_M = glue("mnli", "MNLI", columns={"MNLI-m": "dev_matched/accuracy"})
MNLI = glue("mnli", "MNLI", columns={"MNLI-m": "dev_matched/accuracy", "MNLI-mm": "dev_mismatched/accuracy"})
QQP = glue("qqp", "QQP", columns={"QQP": "dev/f1"})
QNLI = glue("qnli", "QNLI")
SST_2 = glue("sst2", "SST-2")
COLA = glue("cola", "CoLA")
STS_B = glue("stsb", "STS-B")
MRPC = glue("mrpc", "MRPC", columns={"MRPC": "dev/f1"})
MRPC_ACCURACY = glue("mrpc", "MRPC", columns={"MRPC": "dev/accuracy"})
RTE = glue("rte", "RTE")
SQUAD = {
    "name": "SQuAD", "config": "finetune/squad", "scale": 1, "columns": {"SQuAD": "dev/f1"},
    "finetuning": {"data.path": "squad", "search.seeds": SEEDS},
}  # fmt: skip
SWAG = {
    "name": "SWAG", "config": "finetune/swag", "finetuning": {"data.path": "swag", "search.seeds": SEEDS}
}  # fmt: skip
NER = {
    "name": "NER", "config": "finetune/ner", "columns": {"NER": "dev/f1"},
    "finetuning": {
        "data.path": "conll2003", "task.document_context": True,
        "search.learning_rates": (5e-5, 4e-5, 3e-5, 2e-5), "search.seeds": SEEDS,
    },
}  # fmt: skip
NER_FEATURES = {
    "name": "NER, features", "config": "finetune/ner_features", "columns": {"NER, features": "dev/f1"},
    "finetuning": {"data.path": "conll2003", "task.document_context": True, "search.seeds": SEEDS},
}  # fmt: skip
