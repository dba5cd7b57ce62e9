"""Times the pre-training step on a CPU beside `transformers` in torch, and beside the CPU's matrix products.

    python benchmarks/step_speed.py [--models bert:L4_H256 bert_base] [--rounds 12]

All sides train the same batch of 8 rows of 128 tokens with dropout of 0.1, AdamW and clipped gradients, in
float32. They are processes that take turns, so that a busy machine slows all of them, in
short rounds: a process that has waited for half a minute may be slower, because a virtual machine took its memory.
Ratios are medians over the rounds, with minimum and maximum. `torch` is BertForPreTraining as it comes, which computes
the logits of all tokens; of a ModernBERT it is ModernBertForMaskedLM. `torch, tuned` computes those of the predictions
alone and has the fused AdamW. `torch, compiled` is tuned, with `torch.compile`, which needs a C++ compiler. The matrix
product is of 2,048 x 2,048, by XLA.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from processes import Side, take_turns
from record import Record, make_parser, spread, with_range

MEASURES = (
    "benchmarks/on_gpu/steps.py", "benchmarks/processes.py", "benchmarks/torch_side.py", "bert_jax/batch.py",
    "bert_jax/model", "bert_jax/parallel", "bert_jax/runtime/interpreter.py", "bert_jax/training/objectives.py",
    "bert_jax/training/optimizer.py",
    "bert_jax/training/train_step.py",
)  # fmt: skip
ROWS, SEQ_LEN = 8, 128
SIDE = 2048
"""Rows and columns of the matrices whose product is timed."""
JAX, PRODUCT, COMPILED = "bert_jax", "product", "torch, compiled"
PEERS = ("torch", "torch, tuned", COMPILED)
COLUMNS = {
    "model": "{model}",
    "side": "{side}",
    "ms per step": with_range("step_ms", ",.0f"),
    "GFLOP/s": "{gflops:,.0f}",
    "of the matrix product's": "{peak_share:.0%}",
    "bert_jax is faster by": "{faster}",
}


def main() -> None:
    parser = make_parser(__doc__, "step_speed")
    parser.add_argument("--models", nargs="+", default=["bert:L4_H256", "bert_base"], help="configs")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each side")
    parser.add_argument("--seconds", type=float, default=1.5, help="duration of a round of one side")
    options = parser.parse_args()
    record = Record(options.json, MEASURES, ("torch", "transformers"))
    rows: list[dict[str, Any]] = []
    for model in options.models:
        rows += measure(model, options.rounds, options.seconds)
        record.set_table("speed", COLUMNS, rows)
    record.set_values(rows=ROWS, seq_len=SEQ_LEN, rounds=options.rounds)
    print(record.render("speed"))


def measure(model: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Returns a row per side; a side that this machine cannot run has none."""
    makes = {JAX: jax_side, **dict.fromkeys(PEERS, torch_side), PRODUCT: product_side}
    sides = {name: Side(make, name, model, seconds, JAX_PLATFORMS="cpu") for name, make in makes.items()}
    found = take_turns(sides, rounds)
    peak = 2 * SIDE**3 / min(found.pop(PRODUCT))
    flops = ROWS * _flops_per_row(model)
    return [_row(model, name, values, found[JAX], flops, peak) for name, values in found.items()]


def _row(
    model: str, side: str, seconds: list[float], ours: list[float], flops: float, peak: float
) -> dict[str, Any]:  # fmt: skip
    rate = flops / statistics.median(seconds)
    row = {"model": model, "side": side, "gflops": rate / 1e9, "peak_share": rate / peak, "faster": "-"}
    row |= spread("step_ms", [1000 * value for value in seconds])
    if side != JAX:
        ratios = spread("ratio", [their / our for their, our in zip(seconds, ours, strict=True)])
        row |= ratios | {"faster": with_range("ratio", ".2f").format(**ratios)}
    return row


def _flops_per_row(config: str) -> float:
    from on_gpu.steps import PREDICTIONS, make_model

    from bert_jax.config import load_config
    from bert_jax.tracking.throughput import training_flops

    return training_flops(make_model(load_config(config)), SEQ_LEN, PREDICTIONS[SEQ_LEN], 1)


def jax_side(_: str, model: str, seconds: float) -> Callable[[], float]:
    from bert_jax.runtime.interpreter import tune_malloc

    tune_malloc()  # as the commands do, before threads start
    from on_gpu.steps import Rounds, Setting, Step

    overrides = (("dtype", "float32"), ("optimizer.name", "adamw"))
    return Rounds(Step(Setting(model, ROWS, SEQ_LEN, overrides=overrides)), seconds, most=1000)


def torch_side(name: str, model: str, seconds: float) -> Callable[[], float]:
    from torch_side import Setting, torch_rounds

    is_tuned = name != PEERS[0]
    setting = Setting(model, ROWS, SEQ_LEN)
    return torch_rounds(setting, seconds, gathered=is_tuned, fused=is_tuned, compiled=name == COMPILED)


def product_side(_: str, model: str, seconds: float) -> Callable[[], float]:
    import jax
    import jax.numpy as jnp

    matrices = jax.random.normal(jax.random.key(0), (2, SIDE, SIDE))
    product = jax.jit(jnp.matmul)

    def shortest() -> float:
        """Returns the seconds of the fastest product of the round: the machine's limit, not its load."""
        best, until = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            product(*matrices).block_until_ready()
            best = min(best, time.perf_counter() - began)
        return best

    shortest()
    return shortest


if __name__ == "__main__":
    main()
