"""The memory of BERT-LARGE's compiled step on TPUs that this machine need not have."""

from bert_jax.ahead_of_time.compiled_step import compile_step, plans
from bert_jax.ahead_of_time.target import open_target
from bert_jax.config import load_config

GIB = 1 << 30
PREDICTIONS = {128: 20, 512: 76}
"""By the number of tokens of a sequence."""
CASE = ("topology", "seq_len", "rows", "attention", "remat")
"""Keys that identify the case of a row: the arguments of `measure_memory`, in their order."""


def measure_memory(topology: str, seq_len: int, rows: int, attention: str, remat: str) -> dict:
    """Compiles the step for the devices of `topology` with `rows` rows per device; returns its memory in GiB.

    `excess` is empty if the step fits; `temporaries_gib` is missing if the compiler
    refused the step for its memory.
    """
    target = open_target(topology, 1)
    overrides = {
        "data.seq_len": seq_len, "global_batch_size": len(target.devices) * rows, "gradient_accumulation": 1,
        "attention": attention, "remat": remat, "data.max_predictions": PREDICTIONS[seq_len],
    }  # fmt: skip
    config = load_config("bert_large", [(key, str(value)) for key, value in overrides.items()])
    step = compile_step(target, plans(config, None)[0])
    row = {
        **dict(zip(CASE, (topology, seq_len, rows, attention, remat), strict=True)),
        "peak_gib": step["peak_bytes"] / GIB, "usable_gib": target.hbm_bytes / GIB,
        "excess": "" if step["fits"] else ": does not fit", "compile_seconds": step["compile_seconds"],
    }  # fmt: skip
    return row | {"temporaries_gib": step["temp_bytes"] / GIB} if step["fits"] else row
