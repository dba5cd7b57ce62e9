"""Sets the estimated times of `bert-jax compile` beside times that were measured on TPUs and published.

    python benchmarks/tpu_calibration.py                  # some ten minutes on two cores

Requires the tpu-aot extra and no TPU. Programs are products of matrices, copies through memory, and the training steps
of decoder-only models that MaxText publishes, of one device. A ratio above 1 is an estimate that is too long.

A step has three parts. XLA estimates a program of one layer with embedding and loss, and one of two layers; the
difference, times the number of layers, completes the model. The kernel of attention has no estimate and counts its
FLOPs at the peak of the chip. The optimizer, all collectives and transfers to the host are left out: on so many chips
the first is short, and the publications overlap the others with the products.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from record import Record, make_parser

from bert_jax.ahead_of_time.compiled_step import estimate_time, open_target
from bert_jax.tracking.throughput import peak_flops

VMEM_KIB = {"v6e": 65_536}
"""Limit of vector memory that a publication set for products by `xla_tpu_scoped_vmem_limit_kib`."""
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
GITHUB = "https://github.com/AI-Hypercomputer"
RECIPES, MAXTEXT = f"{GITHUB}/tpu-recipes/blob/main", f"{GITHUB}/maxtext/blob/main/src/maxtext/configs/tpu"
PALLAS = ("JAX: Matrix Multiplication", "https://docs.jax.dev/en/latest/pallas/tpu/matmul.html")
V6E = ("tpu-recipes: Microbenchmarks", f"{RECIPES}/microbenchmarks/README.md")
TPU7X = ("tpu-recipes: Ironwood, results", f"{RECIPES}/microbenchmarks/ironwood/README.md")
TPU7X_HBM = ("tpu-recipes: HBM on tpu7x", f"{RECIPES}/microbenchmarks/ironwood/hbm/hbm.md")
PRODUCTS = [  # chip, size of the three dimensions, milliseconds, source
    ("v5e", 4096, 0.82729, PALLAS),  # timed on the host, with the dispatch of each call
    ("v5e", 8192, 6.04715, PALLAS),
    ("v6e", 8192, 1.32876, V6E),
    *(("tpu7x", size, 2e-9 * size**3 / rate, TPU7X) for size, rate in {
        1024: 349.727, 2048: 679.285, 4096: 892.945,
    }.items()),  # TFLOP/s of a device
]  # fmt: skip
COPIES = [  # chip, bytes of the array, GB/s read and written, source
    ("v6e", 1 << 25, 1359.596, V6E),
    ("tpu7x", 1 << 25, 3009.836, TPU7X_HBM),
    ("tpu7x", 1 << 29, 3199.021, TPU7X_HBM),
    ("tpu7x", 1 << 32, 3197.880, TPU7X_HBM),
]  # fmt: skip


@dataclass(frozen=True)
class Decoder:
    """A step of MaxText on one device: rows of tokens, widths and layers; of 32B on v5p the shards of four devices.

    The backward pass recomputes all of a layer, or with `saves_products` all but its products of weights.
    `tflops` is the published rate of a device, by FLOPs with attention as if it were not causal.
    """

    name: str
    chip: str
    sizes: tuple[int, ...]  # rows, tokens, width, heads, MLP's width, layers, vocabulary
    saves_products: bool
    tflops: float
    source: tuple[str, str]

    @property
    def published(self) -> float:
        rows, seq_len, width, heads, mlp, layers, vocab = self.sizes
        weights = layers * width * (128 * 4 * heads + 3 * mlp) + width * vocab
        total = rows * seq_len * (6 * weights + 12 * layers * seq_len * 128 * heads)
        return total / self.tflops / 1e12

    @property
    def attention(self) -> float:
        """FLOPs of the kernels, causal: forward, forward again, and 2.5 times backward."""
        rows, seq_len, _, heads, _, layers, _ = self.sizes
        return 4.5 * 2 * rows * layers * seq_len**2 * 128 * heads


V5E, V5P = (("MaxText: performance on " + chip, f"{MAXTEXT}/{chip}/README.md") for chip in ("v5e", "v5p"))
STEPS = [
    Decoder("16B, v5e-256", "v5e", (6, 2048, 4096, 64, 28672, 32, 32000), False, 120, V5E),
    Decoder("32B, v5e-256", "v5e", (4, 2048, 8192, 64, 28672, 32, 32000), False, 132, V5E),
    Decoder("32B, v5p-128", "v5p", (24, 2048, 8192, 16, 7168, 32, 8000), True, 328, V5P),
]
KINDS = ("product", "copy", "step")
COLUMNS = {
    "program": "{program}", "chip": "{chip}", "estimate, ms": "{estimate_ms:,.3f}",
    "published, ms": "{published_ms:,.3f}", "ratio": "{ratio:.2f}", "source": "[{title}]({url})",
}  # fmt: skip


def loss(saves_products: bool, params: list[dict], table: Any, head: Any, ids: Any) -> Any:
    """Returns the loss of a Llama: RMSNorm, rotary positions, SwiGLU; ids [B, L], all in bfloat16."""
    vocab, heads, length = table.shape[0], params[0]["query"].shape[1], ids.shape[1]
    sizes = splash.BlockSizes(*[512] * 6, block_q_dq=None, block_kv_dq=None, use_fused_bwd_kernel=True)
    mask = splash.MultiHeadMask([splash.CausalMask((length, length))] * heads)
    angles = jnp.arange(length)[:, None] * 10_000 ** (-jnp.arange(64) / 64)
    policies = jax.checkpoint_policies
    policy = policies.dots_with_no_batch_dims_saveable if saves_products else policies.nothing_saveable

    def norm(x):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    def rotate(x):  # [B, H, L, 128]
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)

    @partial(jax.checkpoint, policy=policy)
    def layer(x, p):
        y = norm(x)
        q, k, v = (jnp.einsum("bld,dhk->bhlk", y, p[name]) for name in ("query", "key", "value"))
        kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes)
        context = jax.vmap(kernel)(rotate(q) / 128**0.5, rotate(k), v)
        x = x + jnp.einsum("bhlk,hkd->bld", context, p["out"])
        y = norm(x)
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    x = jax.nn.one_hot(ids, vocab, dtype=table.dtype) @ table
    for p in params:
        x = layer(x, p)
    logits = (norm(x) @ head).astype(jnp.float32)
    picked = jnp.sum(logits * jax.nn.one_hot(jnp.roll(ids, -1, 1), vocab), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def seconds(device: Any, function: Any, *shapes: Any, vmem_kib: int = 0) -> float:
    """Returns the estimated seconds of a function of arrays of these shapes, within so much vector memory if given."""
    options = {"xla_tpu_scoped_vmem_limit_kib": str(vmem_kib)} if vmem_kib else None
    sharding = jax.sharding.SingleDeviceSharding(device)
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    program = jax.jit(function).lower(*arrays).compile(compiler_options=options).as_text()
    return (estimate_time(program, device.device_kind, 1.0) or {})["seconds"]


def step_seconds(device: Any, step: Decoder) -> float:
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    rows, seq_len, d, heads, f, layers, vocab = step.sizes
    layer = dict.fromkeys(("query", "key", "value"), shape((d, heads, 128))) | {"out": shape((heads, 128, d))}
    layer |= {"gate": shape((d, f)), "up": shape((d, f)), "down": shape((f, d))}
    rest = shape((vocab, d)), shape((d, vocab)), jax.ShapeDtypeStruct((rows, seq_len), jnp.int32)
    gradient = jax.grad(partial(loss, step.saves_products), argnums=(0, 1, 2))
    one, two = (seconds(device, gradient, [layer] * count, *rest) for count in (1, 2))
    return one + (layers - 1) * (two - one) + step.attention / (peak_flops(device.device_kind) or 1.0)


def main() -> None:
    measures = [f"bert_jax/ahead_of_time/{name}.py" for name in ("compiled_step", "hlo")]
    record = Record(make_parser(__doc__, "tpu_calibration").parse_args().json, measures, ["libtpu"])
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    rows: list[dict] = []
    for chip, topology in TOPOLOGIES.items():
        device = open_target(topology).devices[0]
        cases: list[tuple[str, str, Any, float, tuple[str, str]]] = [
            *(("product", f"{n:,}³",
               partial(seconds, device, jnp.matmul, *[shape((n, n))] * 2, vmem_kib=VMEM_KIB.get(chip, 0)),
               ms / 1e3, at) for on, n, ms, at in PRODUCTS if on == chip),
            *(("copy", f"{size >> 20:,} MiB", partial(seconds, device, jnp.copy, shape((size // 2048, 1024))),
               2 * size / rate / 1e9, at) for on, size, rate, at in COPIES if on == chip),
            *(("step", step.name, partial(step_seconds, device, step), step.published, step.source)
              for step in STEPS if step.chip == chip),
        ]  # fmt: skip
        for kind, name, estimate, published, (title, url) in cases:
            estimated = estimate()
            rows.append({
                "kind": kind, "program": f"{kind}, {name}", "chip": chip, "estimate_ms": 1e3 * estimated,
                "published_ms": 1e3 * published, "ratio": estimated / published, "title": title, "url": url,
            })  # fmt: skip
            print(*(rows[-1][key] for key in ("program", "chip", "estimate_ms", "published_ms", "ratio")), flush=True)
            record.set_table("ratios", COLUMNS, sorted(rows, key=lambda row: KINDS.index(row["kind"])))
    for kind in KINDS:
        ratios = [row["ratio"] for row in rows if row["kind"] == kind]
        record.set_values(**{f"{kind}_least": min(ratios), f"{kind}_most": max(ratios)})


if __name__ == "__main__":
    main()
