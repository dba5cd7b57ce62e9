"""Compiles BERT-LARGE's training steps of other projects for 16 chips of TPU v5e, beside those of bert_jax.

    pip install --target peers --no-deps 'transformers==4.57.6' 'huggingface_hub==0.36.0' 'tokenizers==0.22.2' \\
        clu immutabledict
    git clone --depth=1 https://github.com/google-research/scenic scenic
    python benchmarks/tpu_peers.py --scenic=scenic --packages=peers       # some 40 minutes on two cores

Requires the tpu-aot extra and no TPU. The time is that of XLA's cost model, which leaves out collectives. All steps are
data parallel, with masked-LM and next-sentence loss, all dropout, bfloat16 compute and float32 state.

- Scenic: its model, loss and clipping of gradients, as its config of BERT pre-training sets them (PreLN), in the large
  variant, and `optax.scale_by_adam`. `shard_map` takes the place of its `pmap`.
- transformers: `FlaxBertForPreTraining` of 4.57, the last version with Flax models, with `optax.adamw` and the loss of
  its example run_mlm_flax.py. Its head predicts all positions. It drops the same probabilities of attention in all rows
  and heads; "BERT's dropout" is the same model with a mask for each, which BERT and all other steps have.
- plain: the functions below, with gathered predictions and `optax.adamw`; layers unrolled, which is better than a scan.

A peer that does not fit is compiled with half of the rows. One that is absent is left out, with a line that says so. A
run that is stopped continues with the first step that lacks a row of this code.
"""

import functools
import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from record import Record, make_parser

from bert_jax.ahead_of_time.compiled_step import compile_step, estimate_time, open_target, out_of_memory
from bert_jax.ahead_of_time.hlo import read_collectives, read_parts
from bert_jax.config import load_config
from bert_jax.model import BertConfig
from bert_jax.tracking.throughput import training_flops
from bert_jax.training.phases import plan_phases

COMMAND = "python benchmarks/tpu_peers.py --scenic=scenic --packages=peers"
TOPOLOGY = "v5e:4x4"
SHAPES = {128: (32, 20), 512: (16, 76)}
"""Rows of a chip and predictions, by tokens."""
LARGE = BertConfig(vocab_size=30_522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                   intermediate_size=4096)  # fmt: skip
COLUMNS = {
    "step": "{program}", "tokens": "{seq_len}", "rows a chip": "{rows}", "estimate, ms": "{step_ms:,.1f}",
    "products, ms": "{products_ms:,.1f}", "estimated MFU": "{mfu_percent:.1f}%", "peak, GiB": "{peak_gib:.2f}",
    "collectives": "{collectives}", "MiB": "{collectives_mib:,.0f}", "bert_jax is faster": "{ratio:.2f}x",
}  # fmt: skip
MEASURES = ("bert_jax/ahead_of_time/compiled_step.py", "bert_jax/ahead_of_time/hlo.py", "bert_jax/model",
            "bert_jax/parallel", "bert_jax/training/train_step.py", "bert_jax/training/optimizer.py")  # fmt: skip


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


class Scenic:
    """google-research/scenic, projects/baselines/bert."""

    optimizer = optax.chain(optax.scale_by_adam(b1=0.9, b2=0.999), optax.scale(-1e-4))

    def __init__(self) -> None:
        package = "scenic.projects.baselines.bert"
        self.losses = importlib.import_module(f"{package}.bert_base_model")
        config = importlib.import_module("ml_collections").ConfigDict
        width, rates = 1024, {"dropout_rate": 0.1}
        self.model = importlib.import_module(f"{package}.model").BERT(
            stem_config=config(rates | {"hidden_size": width, "embedding_width": width, "vocab_size": LARGE.vocab_size,
                                        "type_vocab_size": 2, "max_position_embeddings": 512}),
            encoder_config=config(rates | {"num_heads": 16, "mlp_dim": 4096, "num_layers": 24,
                                           "attention_dropout_rate": 0.1, "pre_norm": True}),
            head_config=config({"type": "pretraining", "hidden_size": width}), dtype=jnp.bfloat16,
        )  # fmt: skip

    def init(self, key: Any, batch: dict) -> Any:
        return self.model.init(key, batch, train=False)["params"]

    def loss(self, params: Any, batch: dict, key: Any) -> Any:
        outputs = self.model.apply({"params": params}, batch, train=True, rngs={"dropout": key})
        return self.losses.compute_bert_loss(outputs["mlm_logits"], outputs["nsp_logits"], batch)

    def clip(self, gradients: Any) -> Any:
        return importlib.import_module("jax.example_libraries.optimizers").clip_grads(gradients, 1.0)


class Transformers:
    """FlaxBertForPreTraining; with `own_masks`, attention dropout differs between rows and heads."""

    optimizer = optax.adamw(1e-4)

    def __init__(self, *, own_masks: bool = False) -> None:
        transformers = importlib.import_module("transformers")
        sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        module: Any = importlib.import_module("transformers.models.bert.modeling_flax_bert")
        weights = importlib.import_module("flax.linen.attention").dot_product_attention_weights
        module.dot_product_attention_weights = lambda *inputs, **options: weights(
            *inputs, **options | {"broadcast_dropout": not own_masks}
        )
        self.model = module.FlaxBertForPreTrainingModule(transformers.BertConfig(**sizes), dtype=jnp.bfloat16)

    def _inputs(self, batch: dict) -> tuple:
        positions = jnp.broadcast_to(jnp.arange(batch["input_word_ids"].shape[1]), batch["input_word_ids"].shape)
        return batch["input_word_ids"], batch["input_mask"], batch["input_type_ids"], positions, None

    def init(self, key: Any, batch: dict) -> Any:
        return self.model.init(key, *self._inputs(batch))["params"]

    def loss(self, params: Any, batch: dict, key: Any) -> Any:
        outputs = self.model.apply({"params": params}, *self._inputs(batch), deterministic=False, rngs={"dropout": key})
        labels = batch["all_labels"]  # -100 where nothing is predicted
        losses = optax.softmax_cross_entropy(outputs.prediction_logits, jax.nn.one_hot(labels, LARGE.vocab_size))
        losses *= labels > 0
        nsp = cross_entropy(outputs.seq_relationship_logits, batch["next_sentence_labels"])
        return losses.sum() / (labels > 0).sum() + nsp.mean()

    def clip(self, gradients: Any) -> Any:
        return gradients


class Plain:
    """A step as one writes it in an afternoon."""

    optimizer = optax.adamw(1e-4)
    clip = Transformers.clip

    def init(self, key: Any, batch: dict) -> Any:
        d, f, h = 1024, 4096, 16
        dense = {"q": (d, h, 64), "k": (d, h, 64), "v": (d, h, 64), "out": (h, 64, d), "up": (d, f), "down": (f, d)}
        biases = {"q": (h, 64), "k": (h, 64), "v": (h, 64), "out": (d,), "up": (f,), "down": (d,)}
        layer = {name: {"w": jnp.zeros(shape), "b": jnp.zeros(biases[name])} for name, shape in dense.items()}
        norm = {"w": jnp.zeros(d), "b": jnp.zeros(d)}
        layer |= {"norm1": norm, "norm2": norm}
        top = {name: {"w": jnp.zeros((d, size)), "b": jnp.zeros(size)}
               for name, size in {"pooler": d, "nsp": 2, "mlm": d}.items()}  # fmt: skip
        return top | {"words": jnp.zeros((LARGE.vocab_size, d)), "bias": jnp.zeros(LARGE.vocab_size), "norm": norm,
                      "positions": jnp.zeros((512, d)), "types": jnp.zeros((2, d)), "mlm_norm": norm,
                      "layers": [layer] * 24}  # fmt: skip

    def loss(self, params: Any, batch: dict, key: Any) -> Any:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        keys = iter(jax.random.split(key, 3 * 24 + 1))

        def norm(x, p):
            wide = x.astype(jnp.float32)
            wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-12)
            return wide.astype(x.dtype) * p["w"] + p["b"]

        def drop(x):
            return jnp.where(jax.random.bernoulli(next(keys), 0.9, x.shape), x / 0.9, 0).astype(x.dtype)

        def product(equation, x, p):
            return jnp.einsum(equation, x, p["w"]) + p["b"]

        x = params["words"][batch["input_word_ids"]] + params["types"][batch["input_type_ids"]]
        x = drop(norm(x + params["positions"][: x.shape[1]], params["norm"]))
        bias = jnp.where(batch["input_mask"][:, None, None] > 0, 0, -1e9).astype(jnp.float32)
        for p in params["layers"]:
            q, k, v = (product("bld,dnh->blnh", x, p[name]) for name in "qkv")
            scores = jnp.einsum("blnh,bmnh->bnlm", q, k).astype(jnp.float32) / 8 + bias
            context = jnp.einsum("bnlm,bmnh->blnh", drop(jax.nn.softmax(scores).astype(x.dtype)), v)
            x = norm(x + drop(product("blnh,nhd->bld", context, p["out"])), p["norm1"])
            hidden = jax.nn.gelu(product("bld,df->blf", x, p["up"]), approximate=False)
            x = norm(x + drop(product("blf,fd->bld", hidden, p["down"])), p["norm2"])
        picked = jnp.take_along_axis(x, batch["masked_lm_positions"][..., None], axis=1)
        picked = norm(jax.nn.gelu(product("bpd,de->bpe", picked, params["mlm"]), approximate=False), params["mlm_norm"])
        losses = cross_entropy(picked @ params["words"].T + params["bias"], batch["masked_lm_ids"])
        pooled = jnp.tanh(product("bd,de->be", x[:, 0], params["pooler"]))
        nsp = cross_entropy(product("bd,de->be", pooled, params["nsp"]), batch["next_sentence_labels"])
        return jnp.average(losses, weights=batch["masked_lm_weights"]) + nsp.mean()


PEERS = {
    "Scenic": Scenic, "transformers, Flax": Transformers,
    "transformers, Flax, BERT's dropout": functools.partial(Transformers, own_masks=True), "plain": Plain,
}  # fmt: skip


def compile_peer(peer: Any, target: Any, seq_len: int, rows: int, predictions: int) -> Any:
    """Compiles the data-parallel step of a peer; `rows` are those of a chip."""
    mesh = jax.make_mesh((len(target.devices),), ("batch",), devices=target.devices)

    def step(params, state, batch, key):
        own = jax.random.fold_in(key, jax.lax.axis_index("batch"))
        loss, gradients = jax.value_and_grad(peer.loss)(params, batch, own)
        gradients = jax.lax.pmean(peer.clip(gradients), "batch")
        updates, state = peer.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "batch")

    def shapes(tree, spec):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    count = rows * len(target.devices)
    tokens, targets = np.zeros((count, seq_len), np.int32), np.zeros((count, predictions), np.int32)
    batch = dict.fromkeys(("input_word_ids", "input_type_ids", "input_mask", "all_labels"), tokens)
    batch |= {"masked_lm_positions": targets, "masked_lm_ids": targets, "masked_lm_weights": targets.astype(np.float32)}
    batch |= {"next_sentence_labels": np.zeros(count, np.int32)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(peer.init, key, batch)
    state = jax.eval_shape(peer.optimizer.init, params)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("batch"), P()), out_specs=P(), check_vma=False)
    arguments = shapes(params, P()), shapes(state, P()), shapes(batch, P("batch")), shapes(key, P())
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(*arguments).compile()


def peer_row(name: str, target: Any, seq_len: int) -> dict:
    (rows, predictions), peer = SHAPES[seq_len], PEERS[name]()
    while True:
        try:
            compiled = compile_peer(peer, target, seq_len, rows, predictions)
            break
        except jax.errors.JaxRuntimeError as error:
            if out_of_memory(error) is None:
                raise
            print(f"{name}, {seq_len} tokens: {rows} rows do not fit", flush=True)
            rows //= 2
    program, flops = compiled.as_text(), rows * training_flops(LARGE, seq_len, predictions)
    estimate: Any = estimate_time(program, target.devices[0].device_kind, flops)
    parts = read_parts(program)
    products = sum(part.cycles for part in parts if "dot_general" in part.operation) / sum(
        part.cycles for part in parts
    )
    sent = [(one.count, one.bytes) for one in read_collectives(program, len(target.devices))]
    return make_row(name, seq_len, rows, estimate, products, compiled.memory_analysis().peak_memory_in_bytes, sent)


def own_row(target: Any, seq_len: int) -> dict:
    rows = SHAPES[seq_len][0]
    config = load_config("bert_large", {"global_batch_size": rows * len(target.devices), "data.seq_len": seq_len})
    found = compile_step(target, plan_phases(config)[0], profile=True)
    products = sum(part["share"] for part in found["estimate"]["parts"] if "dot_general" in part["operation"])
    sent = [(one["count"], one["bytes"]) for one in found["collectives"]]
    return make_row("bert_jax", seq_len, rows, found["estimate"], products, found["peak_bytes"], sent)


def make_row(name: str, seq_len: int, rows: int, estimate: dict, products: float, peak: int, sent: list) -> dict:
    """Returns a row; `products` is the share of matrix products in the estimate."""
    return {
        "program": name, "seq_len": seq_len, "rows": rows, "step_ms": 1e3 * estimate["seconds"],
        "products_ms": 1e3 * products * estimate["seconds"], "mfu_percent": 100 * estimate["mfu"],
        "peak_gib": peak / (1 << 30), "sequences_per_second": rows / estimate["seconds"],
        "collectives": sum(count for count, _ in sent), "collectives_mib": sum(size for _, size in sent) / (1 << 20),
    }  # fmt: skip


def measure(name: str, target: Any, seq_len: int) -> list[dict]:
    """Returns the row of a step, or none if its project is absent."""
    try:
        return [own_row(target, seq_len) if name == "bert_jax" else peer_row(name, target, seq_len)]
    except ImportError as error:
        print(f"{name} is left out: {error}", flush=True)
        return []


def main() -> None:
    parser = make_parser(__doc__, "tpu_peers")
    parser.add_argument("--scenic", type=Path, metavar="FOLDER", help="a clone of google-research/scenic")
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help="where pip installed the packages above")
    arguments = parser.parse_args()
    sys.path[:0] = [str(folder) for folder in (arguments.packages, arguments.scenic) if folder]
    record, target = Record(arguments.json, MEASURES, ["libtpu"], command=COMMAND), open_target(TOPOLOGY)
    steps = itertools.product(SHAPES, ("bert_jax", *PEERS))
    works = {(name, seq_len): functools.partial(measure, name, target, seq_len) for seq_len, name in steps}
    rows = record.fill("steps", COLUMNS, ["program", "seq_len"], works)
    own = {row["seq_len"]: row["sequences_per_second"] for row in rows if row["program"] == "bert_jax"}
    for row in rows:
        row["ratio"] = own[row["seq_len"]] / row["sequences_per_second"]
    record.set_table("steps", COLUMNS, rows)
    print(record.render("steps"))


if __name__ == "__main__":
    main()
