"""Compiles every program of the commands for TPUs; prints their memory beside that of the training step.

    python benchmarks/tpu_programs.py                  # some 120 minutes on two cores; --only v5e:2x2 for one topology

Requires the tpu-aot extra and no TPU. Each row is written to the JSON as soon as it exists: a run that is stopped
continues with the first program that lacks a row of this code.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from record import Record, make_parser

from bert_jax.ahead_of_time.compiled_step import open_target, out_of_memory
from bert_jax.batch import pretraining_shapes
from bert_jax.config import FinetuneConfig, PretrainConfig, load_config
from bert_jax.config_keys import MeshKeys
from bert_jax.finetuning import run
from bert_jax.finetuning.batches import run_model
from bert_jax.inference.features import select_hidden_states
from bert_jax.inference.pretrained import text_states, top_words
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.parallel.mesh import abstract_batch, batch_mesh_axes, fill_in_accumulation, make_mesh
from bert_jax.parallel.sharding import make_forward_step, parameter_shardings
from bert_jax.sections import flatten
from bert_jax.training import phases
from bert_jax.training.evaluation import SAMPLE_FILLS, SAMPLE_MASKS, make_eval_step, make_samples_step
from bert_jax.training.objectives import make_objective
from bert_jax.training.phases import Plan
from bert_jax.training.pretrain import plan_step
from bert_jax.training.train_step import key_data, model_settings

GIB = 1 << 30
TOPOLOGIES = ("v5e:2x2", "v5e:4x4", "v4:2x2x2", "v6e:2x2")
CONFIGS = ("bert_large", "bert")
HEADS = {
    "classify": TaskHead("classify", 3),
    "regress": TaskHead("regress", 1),
    "choose": TaskHead("choose", 4),
    "span": TaskHead("span", 2),
    "tag": TaskHead("tag", 9),
    "tag, BiLSTM on frozen features": TaskHead("tag", 9, bilstm=768, bilstm_layers=2, features="concat_last_four"),
}
TRAINING_STEP = "pretrain: training step"
MEASURES = ("bert_jax/finetuning", "bert_jax/inference", "bert_jax/model", "bert_jax/parallel", "bert_jax/training")
COLUMNS = {
    "config": "{config}",
    "topology": "{topology}",
    "program": "{program}",
    "name": "`{name}`",
    "peak GiB": "{peak_gib:.2f}",
    "training step's": "{step_gib:.2f}",
    "HBM": "{hbm_gib:.2f}",
}


def programs(
    mesh: Mesh, config: PretrainConfig, model: BertConfig, seq_len: int, rows: int
) -> dict[str, Callable[[], Any]]:
    """Returns every program of the commands, by the command and what it does: functions for `lower`.

    `config` is that of a pre-training run. Fine-tuning and inference run on sequences of `seq_len` tokens, in batches
    of `rows` sequences on a mesh whose devices all share the batch.
    """
    config = fill_in_accumulation(mesh, config)
    sequences = config.data.max_sequences if config.data.packing else 1
    spec, step = plan_step(mesh, Plan(0, config.total_steps, config), model)
    parameters = spec.abstract.parameters
    batch = phases.abstract_batch(mesh, config, seq_len, config.data.max_predictions, sequences)
    evaluate = functools.partial(make_eval_step, objective=make_objective(config))
    everywhere = make_mesh(MeshKeys(data=-1, fsdp=1, tensor=1), list(mesh.devices.flat))
    first = make_mesh(MeshKeys(data=1, fsdp=1, tensor=1), [mesh.devices.flat[0]])

    def evaluation(mesh: Mesh, rows: int, predictions: int, make: Any, *entries: str) -> tuple[Any, ...]:
        shapes: Any = pretraining_shapes(rows, seq_len, predictions, sequences)
        shapes |= dict.fromkeys(entries, ((rows, predictions), np.float32))
        described: Any = {name: jax.ShapeDtypeStruct(*entry) for name, entry in shapes.items()}
        placed = placed_shapes(mesh)
        return mesh, make(mesh, spec.graph, placed[1]), placed[0], abstract_batch(mesh, described, batch_size=rows)

    def placed_shapes(mesh: Mesh, **settings: Any) -> tuple[Any, Any]:
        _, shapes, info = abstract_parameters(model, **settings)
        placed = parameter_shardings(mesh, info)
        return with_shardings(shapes, placed), placed

    def forward(mesh: Mesh, rows: int, function: Any, **settings: Any) -> Any:
        graph, _, _ = abstract_parameters(model, **settings)
        values, placed = placed_shapes(mesh, **settings)
        step = make_forward_step(mesh, graph, placed, function, PartitionSpec(batch_mesh_axes(mesh)))
        return mesh, step, values, abstract_batch(mesh, task_batch(rows, seq_len), batch_size=rows)

    found = {
        TRAINING_STEP: lambda: (mesh, step, spec.abstract, batch),
        "pretrain: initial state": lambda: (mesh, spec.initialize, key_data(0), None),
        "pretrain: initial state of loaded parameters": lambda: (mesh, spec.initialize, key_data(0), parameters),
        "pretrain: evaluation": lambda: evaluation(
            mesh, config.global_batch_size // config.gradient_accumulation, config.data.max_predictions, evaluate,
            "unigram_nats",
        ),
        "pretrain: samples": lambda: evaluation(
            mesh, everywhere.size, SAMPLE_MASKS, functools.partial(make_samples_step, top=SAMPLE_FILLS)
        ),
        "evaluate": lambda: evaluation(
            everywhere, rows, config.data.max_predictions, evaluate, "unigram_nats"
        ),
        "features: four layers": lambda: forward(
            everywhere, rows, select_hidden_states(tuple(range(max(-4, -model.num_hidden_layers), 0)))
        ),
        "load: encode": lambda: forward(first, 1, text_states("")),
        "load: embed": lambda: forward(first, 32, text_states("mean")),
        "fill-mask: top words": lambda: (
            first, top_words, spec.graph, placed_shapes(first)[0], np.zeros((4, model.hidden_size), np.float32), 5
        ),
    }  # fmt: skip
    task = load_config("finetune/default", [("global_batch_size", str(rows))], kind=FinetuneConfig)
    for name, head in HEADS.items():
        labels = {"regress": ((), np.float32), "span": ((2,), np.int32), "tag": ((seq_len,), np.int32)}
        shape, dtype = labels.get(head.kind, ((), np.int32))
        examples = task_batch(rows, seq_len) | {
            "labels": jax.ShapeDtypeStruct((rows, *shape), dtype),
            "weights": jax.ShapeDtypeStruct((rows,), np.float32),
        }
        found[f"finetune: {name}, training step"] = functools.partial(
            tuning_step, mesh, task, model, head, abstract_batch(mesh, examples, batch_size=rows)
        )
        settings = model_settings(task, model.num_hidden_layers, "tpu", mesh)
        found[f"finetune, predict: {name}"] = functools.partial(
            forward, mesh, rows, run_model, build=BertForTask, head=head, **settings
        )
    return found


def tuning_step(mesh: Mesh, config: PretrainConfig, model: BertConfig, head: TaskHead, batch: Any) -> Any:
    spec, step = run.plan_step(mesh, config, model, head, 100)
    return mesh, step, spec.abstract, batch


def task_batch(rows: int, seq_len: int) -> Any:
    """Returns the shapes of a batch without labels."""
    names = ("input_ids", "token_type_ids", "positions", "sequence_ids")
    tokens = dict.fromkeys(names, jax.ShapeDtypeStruct((rows, seq_len), np.int32))
    return tokens | {"cls_positions": jax.ShapeDtypeStruct((rows, 1), np.int32)}


def with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


def lower(program: Callable[[], Any]) -> Any:
    """Lowers one of `programs`."""
    mesh, jitted, *arguments = program()
    with jax.set_mesh(mesh):
        return jitted.lower(*arguments)


def name_of(lowered: Any) -> str:
    """Returns the name of a lowered program in JAX's log."""
    return lowered.as_text()[:200].partition("@jit_")[2].split()[0]


def peak_bytes(lowered: Any) -> int:
    """Compiles a program; returns the peak bytes of a device, also if they exceed its memory."""
    try:
        return lowered.compile().memory_analysis().peak_memory_in_bytes
    except jax.errors.JaxRuntimeError as error:
        if needs := out_of_memory(error):
            return needs[0]
        raise


def rows_of(config_name: str, topology: str, rows: dict[tuple[str, str, str], dict], code: str) -> Iterator[dict]:
    """Yields the missing rows of a config on a topology, the training step's first."""
    target = open_target(topology)
    pod = len(target.devices)
    config = load_config(config_name, [("global_batch_size", str(8 * pod)), ("data.max_predictions", "76")])
    mesh = make_mesh(config.mesh, target.devices)
    sizes = {key: value for key, value in flatten(config.model) if value != -1}
    model = BertConfig(**{**sizes, "vocab_size": 30_522})
    step_gib = rows.get((config_name, topology, TRAINING_STEP), {}).get("peak_gib")
    for program, function in programs(mesh, config, model, 512, 8 * pod).items():
        if rows.get((config_name, topology, program), {}).get("code") == code:
            continue
        lowered = lower(function)
        peak_gib = peak_bytes(lowered) / GIB
        step_gib = peak_gib if program == TRAINING_STEP else step_gib
        yield {
            "config": config_name, "topology": topology, "program": program, "name": name_of(lowered),
            "peak_gib": peak_gib, "step_gib": step_gib, "hbm_gib": target.hbm_bytes / GIB,
        }  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__, "tpu_programs")
    parser.add_argument("--only", default="", metavar="TOPOLOGY", help="one of " + ", ".join(TOPOLOGIES))
    options = parser.parse_args()
    record = Record(options.json, MEASURES, packages=("libtpu",))
    rows = {(row["config"], row["topology"], row["program"]): row for row in record.earlier("programs")}
    for config in CONFIGS:
        for topology in TOPOLOGIES:
            if options.only not in ("", topology):
                continue
            for row in rows_of(config, topology, rows, record.stamp["code"]):
                print(row, file=sys.stderr, flush=True)
                rows[config, topology, row["program"]] = row | record.stamp
                record.set_table("programs", COLUMNS, rows.values())
    record.set_table("programs", COLUMNS, rows.values())
    print(record.render("programs"))


if __name__ == "__main__":
    main()
