"""Config of a study that runs on a laptop: the steps from BERT-Tiny to a ModernBERT of its size, at equal FLOPs.

    BERT_JAX_DATA=FOLDER STUDY=modernbert_ladder benchmarks/small_study.sh runs/ladder

Each row is pre-trained with three seeds on a tenth of the steps of `reference_cpu.py`, and fine-tuned on four tasks of
`small_study.py` with three seeds: some ten hours on two cores. A row whose step takes more model FLOPs has fewer steps.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from bert_jax.configs.studies import modernbert
from bert_jax.model import BertConfig
from bert_jax.tracking.throughput import training_flops

VOCAB_SIZE = 8_192
PHASES = ((800, 64, 32), (1_200, 16, 128))
"""Steps, sequences and tokens of each phase of the first row."""
TASKS = ("STS-B", "SST-2, 2,000 rows", "MRPC", "WNUT-17")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps_of_phases(model: BertConfig, mask_rate: float, first: BertConfig) -> list[int]:
    """Returns the steps with as many FLOPs as those of the first row, which predicts 15% of the tokens."""
    return [round(steps * flops(first, tokens, 0.15) / flops(model, tokens, mask_rate)) for steps, _, tokens in PHASES]


def flops(model: BertConfig, tokens: int, mask_rate: float) -> float:
    return training_flops(model, tokens, round(mask_rate * tokens))


def get_config():
    config = modernbert.get_config()
    pretraining = config.pretraining = load("reference_cpu").get_config()
    pretraining.phases = tuple(
        {"steps": steps, "data.path": "", "global_batch_size": sequences} for steps, sequences, _ in PHASES
    )
    sizes = {key: value for key, value in pretraining.model.items() if value is not None}
    first = BertConfig(**sizes | {"vocab_size": VOCAB_SIZE})
    rows = []
    for row in modernbert.rows(first.hidden_size):
        switches = {
            key.removeprefix("model."): value for key, value in row.pretraining.items() if key.startswith("model.")
        }
        steps = steps_of_phases(replace(first, **switches), row.pretraining.get("objective.mask_rate", 0.15), first)
        keys = {f"phases.{number}.steps": count for number, count in enumerate(steps)}
        rows.append(replace(row, pretraining={**row.pretraining, **keys, "total_steps": sum(steps)}))
    config.rows = tuple(rows)
    config.tasks = tuple(
        {**task, "finetuning": {**task["finetuning"], "search.seeds": (0, 1, 2)}}
        for task in load("small_study").TASKS if task["name"] in TASKS
    )  # fmt: skip
    pretraining.optimizer.warmup_steps = 200
    return config
