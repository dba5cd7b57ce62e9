"""Export of a model's forward pass as StableHLO, which any release of JAX within the format's limits can load.

Batch and length are symbolic, and the parameters are arguments: the programs are small, and the parameters are one
safetensors file. Loading needs jax, flatbuffers and safetensors, and nothing of this package.
"""

import importlib.util
import json
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export as jax_export
from safetensors.numpy import save_file

from bert_jax.errors import InputError
from bert_jax.extras import install_hint
from bert_jax.files import provenance
from bert_jax.files.atomic import new_folder, whole_folder
from bert_jax.model import abstract_parameters
from bert_jax.model.bert import Parameters
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.training.checkpoints import Checkpoint, check_finite

PARAMETERS = "parameters.safetensors"
DESCRIPTION = "stablehlo.json"
"""Written last: a remote folder with it is complete."""
PLATFORMS = ("cpu", "cuda", "tpu")
INPUTS = ("input_ids", "token_type_ids", "attention_mask")

Program = Callable[..., Any]


def export(checkpoint: Checkpoint, output: str) -> list[str]:
    """Writes the programs of a checkpoint, its parameters, tokenizer, README and provenance to the folder `output`.

    `encode` returns the last hidden state [B, L, D]. `logits` returns a dict: of a pre-trained model `mlm` [B, L, V]
    and `nsp` [B, 2], those whose heads it has; of a fine-tuned model `outputs`, [B, N], or [B, L, N] per token.
    Returns the names of the programs. The folder is written atomically.

    Raises InputError if `output` is a file or a folder that is not empty, or flatbuffers is not installed.
    """
    folder = new_folder(output)
    _check_installed()
    settings: dict[str, Any] = {"heads": checkpoint.heads}
    if checkpoint.task is not None:
        settings = {"build": BertForTask, "head": TaskHead.from_dict(checkpoint.task)}
    parameters = checkpoint.load_parameters(**(settings if checkpoint.task is not None else {}))
    check_finite(checkpoint, parameters)
    flat = flatten(parameters)
    programs = _programs(checkpoint, settings)
    with whole_folder(folder, last=DESCRIPTION) as partial:
        for name, program in programs.items():
            (partial / f"{name}.stablehlo").write_bytes(_serialize(program, flat, checkpoint))
        save_file(flat, str(partial / PARAMETERS))
        checkpoint.tokenizer.save(partial, model_max_length=_longest(checkpoint))
        (partial / "README.md").write_text(_readme(checkpoint, list(programs)))
        described = {
            "programs": list(programs), "inputs": list(INPUTS), "platforms": list(PLATFORMS),
            "max_length": _longest(checkpoint), "jax": jax.__version__,
            "calling_convention_version": jax_export.maximum_supported_calling_convention_version,
            "config": checkpoint.bert_config.to_dict(),
        }  # fmt: skip
        provenance.append(partial, provenance.record({"checkpoint": checkpoint.reference()}))
        (partial / DESCRIPTION).write_text(json.dumps(described, indent=2) + "\n")
        os.chmod(partial / PARAMETERS, os.stat(partial / DESCRIPTION).st_mode & 0o777)  # save_file makes it 0600
    return list(programs)


def flatten(parameters: Parameters) -> dict[str, np.ndarray]:
    """Returns the parameters by dotted name, as contiguous arrays."""
    leaves = jax.tree_util.tree_flatten_with_path(parameters)[0]
    return {".".join(str(part.key) for part in path): np.ascontiguousarray(leaf) for path, leaf in leaves}


def unflatten(flat: dict[str, Any]) -> Parameters:
    """Returns the nested parameters of `flatten`."""
    nested: Parameters = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        inside = nested
        for part in parents:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return nested


def _programs(checkpoint: Checkpoint, settings: dict[str, Any]) -> dict[str, Program]:
    graph, _, _ = abstract_parameters(checkpoint.bert_config, **settings)
    is_task = checkpoint.task is not None
    last_position = is_task and checkpoint.bert_config.is_decoder

    def model_and_batch(flat: dict[str, jax.Array], *inputs: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        batch = make_batch(*inputs, last_position=last_position)
        return nnx.merge(graph, unflatten(flat)), batch

    def encode(flat: dict[str, jax.Array], *inputs: jax.Array) -> jax.Array:
        model, batch = model_and_batch(flat, *inputs)
        result: jax.Array = model.features(batch) if is_task else model.encode(batch)[0]
        return result

    def logits(flat: dict[str, jax.Array], *inputs: jax.Array) -> dict[str, jax.Array]:
        model, batch = model_and_batch(flat, *inputs)
        if is_task:
            return {"outputs": model(batch)}
        mlm, nsp = model(batch)
        found = {
            "mlm": None if mlm is None else mlm[..., : checkpoint.bert_config.vocab_size],
            "nsp": None if nsp is None else nsp[:, 0],
        }
        return {name: value for name, value in found.items() if value is not None}

    has_logits = is_task or {"mlm_head", "nsp_head"} & {*checkpoint.heads}
    return {"encode": encode, **({"logits": logits} if has_logits else {})}


def make_batch(
    input_ids: jax.Array, token_type_ids: jax.Array, attention_mask: jax.Array, *, last_position: bool
) -> dict[str, jax.Array]:
    """Returns the model's batch for three int32 [B, L] of `transformers`, whose padding is at the end.

    Every position is predicted; a sequence is pooled from its first token, or its last one if `last_position`.
    """
    batch, length = input_ids.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    last = attention_mask.sum(axis=1, keepdims=True, dtype=jnp.int32) - 1
    return {
        "input_ids": input_ids, "token_type_ids": token_type_ids, "positions": positions,
        "sequence_ids": attention_mask, "masked_positions": positions,
        "cls_positions": last if last_position else jnp.zeros((batch, 1), jnp.int32),
    }  # fmt: skip


def _check_installed() -> None:
    """Raises InputError without flatbuffers, in which jax serializes programs."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise InputError(
            "--format=stablehlo: jax writes programs with flatbuffers, which is not installed; run: "
            f"{install_hint('stablehlo')}"
        )


def _serialize(program: Program, flat: dict[str, np.ndarray], checkpoint: Checkpoint) -> bytearray:
    longest = checkpoint.bert_config.max_position_embeddings
    shape = jax_export.symbolic_shape("batch, length", constraints=[f"length <= {longest}"])
    inputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for _ in INPUTS]
    weights = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in flat.items()}
    return jax_export.export(jax.jit(program), platforms=PLATFORMS)(weights, *inputs).serialize()


def _longest(checkpoint: Checkpoint) -> int:
    task = checkpoint.task
    return checkpoint.bert_config.max_position_embeddings if task is None else task["max_seq_len"]


def _readme(checkpoint: Checkpoint, programs: list[str]) -> str:
    program = programs[-1]
    return f"""# BERT as StableHLO

Programs: {", ".join(f"`{name}.stablehlo`" for name in programs)}, for {", ".join(PLATFORMS)}.
Batch and length are free; a text has at most {_longest(checkpoint)} tokens.
Inputs are int32 [batch, length]: {", ".join(f"`{name}`" for name in INPUTS)}; padding is at the end, with 0 in
`attention_mask`.
Loading needs `pip install jax flatbuffers safetensors tokenizers`.

```python
import jax
import numpy as np
from jax import export
from safetensors.numpy import load_file
from tokenizers import Tokenizer

with open("{program}.stablehlo", "rb") as file:
    program = jax.jit(export.deserialize(bytearray(file.read())).call)
parameters = load_file("{PARAMETERS}")
tokenizer = Tokenizer.from_file("tokenizer.json")
tokenizer.enable_padding(pad_id={checkpoint.tokenizer.pad_id})
texts = tokenizer.encode_batch(["A text.", "Another, longer text."])
inputs = [
    np.array([getattr(text, field) for text in texts], np.int32) for field in ("ids", "type_ids", "attention_mask")
]
result = program(parameters, *inputs)
```

Written with jax {jax.__version__}; jax keeps reading such files for six months at least
(https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees).
"""
