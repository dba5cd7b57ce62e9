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

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from record import Record, add_json_argument
from sides import Side, UnsupportedError, serve

MEASURES = (
    "benchmarks/on_gpu/steps.py", "benchmarks/sides.py", "benchmarks/torch_batch.py", "bert_jax/batch.py",
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
    "ms per step": "{step_ms:,.0f} ({lowest_ms:,.0f}-{highest_ms:,.0f})",
    "GFLOP/s": "{gflops:,.0f}",
    "of the matrix product's": "{peak_share:.0%}",
    "bert_jax is faster by": "{faster}",
}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.side:
        serve(lambda: _make_side(options.side, options.models[0], options.seconds))
        return 0
    record = Record(options.json, MEASURES, ("torch", "transformers"))
    rows: list[dict[str, Any]] = []
    for model in options.models:
        rows += measure(model, options.rounds, options.seconds)
        record.set_table("speed", COLUMNS, rows)
    record.set_values(rows=ROWS, seq_len=SEQ_LEN, rounds=options.rounds)
    print(record.render("speed"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bert:L4_H256", "bert_base"], help="configs")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each side")
    parser.add_argument("--seconds", type=float, default=1.5, help="duration of a round of one side")
    parser.add_argument("--side", choices=(JAX, PRODUCT, *PEERS), help=argparse.SUPPRESS)
    add_json_argument(parser, "step_speed")
    return parser


def measure(model: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Returns a row per side; a side that this machine cannot run has none."""
    names = (JAX, *PEERS, PRODUCT)
    common = [str(Path(__file__)), "--models", model, "--seconds", str(seconds), "--side"]
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        sides = {name: Side(name, [*common, name], {"JAX_PLATFORMS": "cpu"}) for name in names}
        for side in sides.values():
            stack.callback(side.close)
        for name, side in list(sides.items()):
            try:
                side.wait()
            except UnsupportedError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                del sides[name]
        for number in range(rounds):
            for name, side in sides.items():
                found.setdefault(name, []).append(side.round())
            measured = ", ".join(f"{name} {values[-1]:.4f}" for name, values in found.items())
            print(f"{model}, round {number + 1}: {measured} s", flush=True)
    peak = 2 * SIDE**3 / min(found.pop(PRODUCT))
    flops = ROWS * _flops_per_row(model)
    return [_row(model, name, values, found[JAX], flops, peak) for name, values in found.items()]


def _row(
    model: str, side: str, seconds: list[float], ours: list[float], flops: float, peak: float
) -> dict[str, Any]:  # fmt: skip
    median = statistics.median(seconds)
    row = {
        "model": model, "side": side, "step_ms": 1000 * median,
        "lowest_ms": 1000 * min(seconds), "highest_ms": 1000 * max(seconds),
        "gflops": flops / median / 1e9, "peak_share": flops / median / peak,
    }  # fmt: skip
    if side.startswith(JAX):
        return row | {"faster": "-"}
    ratios = [their / our for their, our in zip(seconds, ours, strict=True)]
    ratio, lowest, highest = statistics.median(ratios), min(ratios), max(ratios)
    return row | {"ratio": ratio, "faster": f"{ratio:.2f} ({lowest:.2f}-{highest:.2f})"}


def _flops_per_row(config: str) -> float:
    from on_gpu.steps import PREDICTIONS, VOCAB_SIZE

    from bert_jax.config import load_config
    from bert_jax.model import BertConfig
    from bert_jax.sections import to_dict
    from bert_jax.tracking.throughput import training_flops

    model = BertConfig.from_dict({**to_dict(load_config(config).model), "vocab_size": VOCAB_SIZE})
    return training_flops(model, SEQ_LEN, PREDICTIONS[SEQ_LEN], 1)


def _make_side(name: str, model: str, seconds: float) -> Callable[[], float]:
    if name.startswith(JAX):
        return _jax_rounds(model, seconds)
    return _product_rounds(seconds) if name == PRODUCT else _torch_rounds(name, model, seconds)


def _jax_rounds(model: str, seconds: float) -> Callable[[], float]:
    from bert_jax.runtime.interpreter import tune_malloc

    tune_malloc()  # as the commands do, before threads start
    from on_gpu.steps import Rounds, Setting, Step

    overrides = (("dtype", "float32"), ("optimizer.name", "adamw"))
    return Rounds(Step(Setting(model, ROWS, SEQ_LEN, overrides=overrides)), seconds, most=1000)


def _product_rounds(seconds: float) -> Callable[[], float]:
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


def _torch_rounds(name: str, config_name: str, seconds: float) -> Callable[[], float]:
    import torch
    from on_gpu.steps import VOCAB_SIZE, Setting, make_batch
    from torch_batch import torch_inputs
    from transformers import BertConfig, BertForPreTraining, ModernBertConfig, ModernBertForMaskedLM

    from bert_jax.config import load_config
    from bert_jax.interop.architectures import model_config
    from bert_jax.model import BertConfig as Sizes
    from bert_jax.sections import to_dict

    config = load_config(config_name)
    settings, is_tuned, is_modern = config.optimizer, name != "torch", not config.model.pooler
    sizes = Sizes.from_dict(to_dict(config.model) | {"vocab_size": VOCAB_SIZE})
    torch.manual_seed(0)
    if is_modern:
        special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
        keys = model_config(sizes) | special | {"sparse_prediction": is_tuned}
        model = ModernBertForMaskedLM(ModernBertConfig(**keys)).train()
    else:
        model = BertForPreTraining(BertConfig(**sizes.to_dict())).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(settings.b1, settings.b2), eps=settings.eps,
        weight_decay=settings.weight_decay, fused=is_tuned,
    )  # fmt: skip
    inputs = torch_inputs(make_batch(Setting(config_name, ROWS, SEQ_LEN))[0], "cpu")
    if is_modern:
        inputs = {key: inputs[key] for key in ("input_ids", "attention_mask", "labels")}
    loss = _gathered_loss(model, inputs) if is_tuned and not is_modern else lambda: model(**inputs).loss
    if name.startswith(COMPILED):
        loss = torch.compile(loss)

    def step() -> None:
        loss().backward()
        if settings.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    try:
        for _ in range(2):
            step()
    except Exception as error:
        if name.startswith(COMPILED):
            raise UnsupportedError(f"torch.compile: {type(error).__name__}") from error
        raise

    def run_round() -> float:
        began = time.perf_counter()
        for count in itertools.count(1):
            step()
            if (passed := time.perf_counter() - began) > seconds:
                return passed / count
        raise AssertionError

    run_round()
    return run_round


def _gathered_loss(model: Any, inputs: dict[str, Any]) -> Callable[[], Any]:
    """Returns the loss of `model(**inputs)` from the logits of predicted tokens alone."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch_batch import IGNORED

    encoded = {name: inputs[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    labels = inputs["labels"].flatten()
    (places,) = torch.nonzero(labels != IGNORED, as_tuple=True)
    targets, next_sentence = labels[places], inputs["next_sentence_label"]

    def loss() -> Any:
        output = model.bert(**encoded)
        predicted = model.cls.predictions(output.last_hidden_state.flatten(0, 1)[places])
        is_next = model.cls.seq_relationship(output.pooler_output)
        return cross_entropy(predicted, targets) + cross_entropy(is_next, next_sentence)

    return loss


if __name__ == "__main__":
    sys.exit(main())
