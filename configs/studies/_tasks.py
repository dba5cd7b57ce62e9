"""The tasks of the paper's tables, with the searches that it made on dev.

`--config.task_data=FOLDER` holds them as glue/CoLA, glue/MNLI, ..., squad, swag, conll2003.
"""

from collections.abc import Mapping

from bert_jax.config_keys import StudyTask

SEEDS = (0, 1, 2, 3, 4)


def glue(task: str, folder: str, columns: Mapping[str, str] | None = None) -> StudyTask:
    """Returns a GLUE task that searches the paper's learning rates with five restarts."""
    finetuning = {
        "data.path": f"glue/{folder}", "search.learning_rates": (5e-5, 4e-5, 3e-5, 2e-5), "search.seeds": SEEDS
    }  # fmt: skip
    return StudyTask(folder, f"finetune/glue:{task}", finetuning, columns or {})


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
SQUAD = StudyTask(
    "SQuAD", "finetune/squad", {"data.path": "squad", "search.seeds": SEEDS}, {"SQuAD": "dev/f1"}, scale=1
)
SWAG = StudyTask("SWAG", "finetune/swag", {"data.path": "swag", "search.seeds": SEEDS})
_CONLL = {"data.path": "conll2003", "task.document_context": True, "search.seeds": SEEDS}
NER = StudyTask("NER", "finetune/ner", {**_CONLL, "search.learning_rates": (5e-5, 4e-5, 3e-5, 2e-5)}, {"NER": "dev/f1"})
NER_FEATURES = StudyTask("NER, features", "finetune/ner_features", _CONLL, {"NER, features": "dev/f1"})
