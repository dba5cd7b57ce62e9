"""Compiles ModernBERT-BASE at 1,024 and 8,192 tokens for 16 TPUs, beside BERT-BASE; prints memory and XLA's time.

    python benchmarks/tpu_modernbert.py                # some 30 minutes on two cores; --only v5p for one chip's rows

Requires the tpu-aot extra and no TPU. BERT-BASE has as many learned positions as a row has tokens. Tokens per second
are those of a chip, by XLA's estimate, which leaves out collectives and kernels: a row with `attention=splash` adds the
nine products of the kernel for each block of L x L, at the peak of matrix units that heads of 64 fill by half. A run
that is stopped continues with the first command that lacks rows of this code.
"""

import json
from functools import partial

from processes import bert_jax
from record import Record, make_parser

from bert_jax.ahead_of_time.compiled_step import open_target
from bert_jax.config import load_config
from bert_jax.tracking.throughput import peak_flops

LENGTHS = {1_024: ("global_batch_size=256",), 8_192: ("global_batch_size=16", "remat=attention")}
"""Tokens of a row, and the keys that go with them."""
NO_NSP = ("objective.nsp=False", "objective.mask_rate=0.3")
MODELS = {"modernbert_base": (), "modernbert_base, splash": ("attention=splash",), "bert_base": NO_NSP}
COMMANDS = {
    " ".join([
        f"bert-jax compile --config={model.partition(',')[0]} --topology={topology} --config.data.seq_len={tokens}",
        f"--config.model.max_position_embeddings={tokens} --config.data.packing=False",
        *(f"--config.{key}" for key in (*MODELS[model], *LENGTHS[tokens])),
    ]): model
    for topology in ("v5e:4x4", "v5p:2x2x4") for tokens in LENGTHS for model in MODELS
    if tokens == max(LENGTHS) or "splash" not in model
}  # fmt: skip
SPLASH_BLOCK = 256
"""Tokens of a block of local layers, which see at most three; `bert_jax.model.pallas_attention` chooses it."""
MEASURES = (
    "bert_jax/ahead_of_time/compiled_step.py", "bert_jax/ahead_of_time/hlo.py", "bert_jax/model", "bert_jax/parallel",
    "bert_jax/tracking/throughput.py", "bert_jax/training/train_step.py", "configs/modernbert.py",
)  # fmt: skip
COLUMNS = {
    "model": "{model}",
    "topology": "{topology}",
    "rows x tokens": "{rows} x {tokens:,}",
    "peak / HBM, GiB": "{peak_gib:.2f} / {hbm_gib:.2f}",
    "reduced, MiB": "{reduced_mib:,.0f}",
    "gathered, MiB": "{gathered_mib:,.0f}",
    "estimated ms": "{step_ms:,.1f}",
    "estimated MFU": "{mfu:.1%}",
    "tokens per second": "{tokens_per_second:,.0f}",
}


def kernel_seconds(tokens: int, device_kind: str) -> float:
    """Returns the time of splash attention's products in ModernBERT-BASE, for a row, at the peak of a chip."""
    model = load_config("modernbert_base").model
    layers = range(model.num_hidden_layers)
    seen = sum(3 * SPLASH_BLOCK if layer % model.global_attn_every_n_layers else tokens for layer in layers)
    head = model.hidden_size / model.num_attention_heads
    # Two forward; backward three for the queries, and four for keys and values.
    flops = (2 + 3 + 4) * 2 * tokens * seen * model.hidden_size
    return flops / (peak_flops(device_kind) * head / 128)


def measure(command: str, model: str) -> list[dict]:
    (phase,) = json.loads(bert_jax(*command.split()[1:], "--json"))["phases"]
    rows, tokens, chip = phase["rows_per_device"], phase["seq_len"], open_target(phase["topology"]).devices[0]
    kernel = rows * kernel_seconds(tokens, chip.device_kind) if "," in model else 0.0
    seconds = phase["estimate"]["seconds"] + kernel
    mfu = phase["estimate"]["mfu"] * phase["estimate"]["seconds"] / seconds
    sent = {kind: sum(one["bytes"] for one in phase["collectives"] if kind in one["kind"]) for kind in
            ("reduce", "gather")}  # fmt: skip
    return [{
        "command": command, "model": model, "topology": phase["topology"],
        "rows": rows, "tokens": tokens, "peak_gib": phase["peak_bytes"] / 2**30, "hbm_gib": phase["hbm_bytes"] / 2**30,
        "reduced_mib": sent["reduce"] / 2**20, "gathered_mib": sent["gather"] / 2**20, "step_ms": 1e3 * seconds,
        "mfu": mfu, "kernel_ms": 1e3 * kernel, "tokens_per_second": rows * tokens / seconds,
    }]  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__, "tpu_modernbert")
    parser.add_argument("--only", default="", metavar="TEXT", help="commands that contain the text, such as v5p")
    options = parser.parse_args()
    record = Record(options.json, MEASURES, packages=("libtpu",))
    works = {(command,): partial(measure, command, model) for command, model in COMMANDS.items()}
    record.fill("steps", COLUMNS, ["command"], works, options.only)
    print(record.render("steps"))


if __name__ == "__main__":
    main()
