"""Export of a model's forward pass as StableHLO, which any release of JAX within the format's limits can load.

Batch and length are symbolic, and the parameters are arguments: the program is small, and the parameters are one
safetensors file. Loading needs jax, flatbuffers and safetensors, and nothing of this package; see
docs/guides/import_export_formats.md.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export as jax_export
from safetensors.numpy import save

from bert_jax.errors import InputError, install_hint
from bert_jax.files import provenance
from bert_jax.files.atomic import new_folder, whole_folder
from bert_jax.model import abstract_parameters
from bert_jax.model.task_heads import model_settings
from bert_jax.training.checkpoints import Checkpoint, check_finite

PROGRAM, PARAMETERS = "model.stablehlo", "parameters.safetensors"
PLATFORMS = ("cpu", "cuda", "tpu")


def export(checkpoint: Checkpoint, output: str) -> None:
    """Writes the program of a checkpoint, its parameters, tokenizer and provenance to the folder `output`.

    The program maps parameters by dotted name, and ids, segments and attention mask [B, L], to a dict. It has `hidden`
    [B, L, D], `mlm` [B, L, V] and `nsp` [B, 2] of a pre-trained model with these heads; and of a fine-tuned model
    `outputs`, [B, N], or [B, L, N] per token. The folder is written atomically.

    Raises InputError if `output` is a file or a folder that is not empty, or flatbuffers is not installed.
    """
    folder = new_folder(output)
    if importlib.util.find_spec("flatbuffers") is None:
        raise InputError(
            f"format=stablehlo: flatbuffers is not installed, with which jax writes; {install_hint('stablehlo')}"
        )
    config, task = checkpoint.bert_config, checkpoint.task
    settings = model_settings(checkpoint.heads, task)
    parameters = checkpoint.load_parameters(**settings)
    check_finite(checkpoint, parameters)
    flat = {name: np.ascontiguousarray(leaf) for name, leaf in flatten_dict(parameters, sep=".").items()}
    graph, _, _ = abstract_parameters(config, **settings)

    def run(
        flat: dict[str, jax.Array], input_ids: jax.Array, token_type_ids: jax.Array, attention_mask: jax.Array
    ) -> dict[str, jax.Array]:
        model = nnx.merge(graph, unflatten_dict(flat, sep="."))
        positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1], dtype=jnp.int32), input_ids.shape)
        ends = attention_mask.sum(axis=1, keepdims=True, dtype=jnp.int32) - 1
        pooled_from_last = task is not None and config.is_decoder
        batch = {
            "input_ids": input_ids, "token_type_ids": token_type_ids, "positions": positions,
            "sequence_ids": attention_mask, "cls_positions": ends if pooled_from_last else jnp.zeros_like(ends),
        }  # fmt: skip
        if task is not None:
            return {"outputs": model(batch)}
        hidden, _ = model.encode(batch)
        result = {"hidden": hidden}
        if model.mlm_head is not None:
            logits = model.mlm_head(hidden, positions, model.embeddings.word[...]).logits()
            result["mlm"] = logits[..., : config.vocab_size]
        if model.nsp_head is not None:
            result["nsp"] = model.nsp_head(model.pooler(hidden, batch["cls_positions"]))[:, 0]
        return result

    shape = jax_export.symbolic_shape("batch, length", constraints=[f"length <= {config.max_position_embeddings}"])
    weights = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in flat.items()}
    program = jax_export.export(jax.jit(run), platforms=PLATFORMS)(
        weights, *[jax.ShapeDtypeStruct(shape, jnp.int32)] * 3
    )
    longest = task["max_seq_len"] if task else config.max_position_embeddings
    with whole_folder(folder, last=PROGRAM) as partial:
        checkpoint.tokenizer.save(partial, model_max_length=longest)
        provenance.append(partial, provenance.record({"checkpoint": checkpoint.reference()}))
        (partial / PARAMETERS).write_bytes(save(flat))
        (partial / PROGRAM).write_bytes(program.serialize())
