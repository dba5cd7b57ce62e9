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
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export as jax_export
from safetensors.numpy import save_file

from bert_jax.errors import InputError, install_hint
from bert_jax.files import provenance
from bert_jax.files.atomic import new_folder, whole_folder
from bert_jax.interop.huggingface_weights import model_settings
from bert_jax.model import abstract_parameters
from bert_jax.model.bert import Parameters
from bert_jax.training.checkpoints import Checkpoint, check_finite

PLATFORMS = ("cpu", "cuda", "tpu")
INPUTS = ("input_ids", "token_type_ids", "attention_mask")

_README = """# BERT as StableHLO

Programs: {programs}, for {platforms}.
Batch and length are free; a text has at most {max_length} tokens.
Inputs are int32 [batch, length]: {inputs}; padding is at the end, with 0 in `attention_mask`.
Loading needs `pip install jax flatbuffers safetensors tokenizers`.

```python
import jax
import numpy as np
from jax import export
from safetensors.numpy import load_file
from tokenizers import Tokenizer

with open("{program}.stablehlo", "rb") as file:
    program = jax.jit(export.deserialize(bytearray(file.read())).call)
parameters = load_file("parameters.safetensors")
tokenizer = Tokenizer.from_file("tokenizer.json")
tokenizer.enable_padding(pad_id={pad_id})
texts = tokenizer.encode_batch(["A text.", "Another, longer text."])
inputs = [
    np.array([getattr(text, field) for text in texts], np.int32) for field in ("ids", "type_ids", "attention_mask")
]
result = program(parameters, *inputs)
```

Written with jax {version}; jax keeps reading such files for six months at least
(https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees).
"""


def export(checkpoint: Checkpoint, output: str) -> list[str]:
    """Writes the programs of a checkpoint, its parameters, tokenizer, README and provenance to the folder `output`.

    `encode` returns the last hidden state [B, L, D]. `logits` returns a dict: of a pre-trained model `mlm` [B, L, V]
    and `nsp` [B, 2], those whose heads it has; of a fine-tuned model `outputs`, [B, N], or [B, L, N] per token.
    Returns the names of the programs. The folder is written atomically.

    Raises InputError if `output` is a file or a folder that is not empty, or flatbuffers is not installed.
    """
    folder = new_folder(output)
    if importlib.util.find_spec("flatbuffers") is None:
        raise InputError(
            "format=stablehlo: jax writes programs with flatbuffers, which is not installed; run: "
            f"{install_hint('stablehlo')}"
        )
    config, task = checkpoint.bert_config, checkpoint.task or {}
    parameters = checkpoint.load_parameters(**model_settings(checkpoint.heads, checkpoint.task))
    check_finite(checkpoint, parameters)
    flat = flatten(parameters)
    weights = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in flat.items()}
    limit = f"length <= {config.max_position_embeddings}"
    shape = jax_export.symbolic_shape("batch, length", constraints=[limit])
    inputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for _ in INPUTS]
    programs = _programs(checkpoint)
    described = {
        "programs": list(programs), "inputs": list(INPUTS), "platforms": list(PLATFORMS),
        "max_length": task.get("max_seq_len", config.max_position_embeddings), "jax": jax.__version__,
        "config": config.to_dict(),
    }  # fmt: skip
    readme = _README.format(
        programs=", ".join(f"`{name}.stablehlo`" for name in programs), program=[*programs][-1],
        platforms=", ".join(PLATFORMS), max_length=described["max_length"], inputs=", ".join(INPUTS),
        pad_id=checkpoint.tokenizer.pad_id, version=jax.__version__,
    )  # fmt: skip
    with whole_folder(folder, last="stablehlo.json") as partial:  # a remote folder with this file is complete
        for name, program in programs.items():
            exported = jax_export.export(jax.jit(program), platforms=PLATFORMS)(weights, *inputs)
            (partial / f"{name}.stablehlo").write_bytes(exported.serialize())
        save_file(flat, str(partial / "parameters.safetensors"))
        checkpoint.tokenizer.save(partial, model_max_length=described["max_length"])
        (partial / "README.md").write_text(readme)
        provenance.append(partial, provenance.record({"checkpoint": checkpoint.reference()}))
        (partial / "stablehlo.json").write_text(json.dumps(described, indent=2) + "\n")
        mode = os.stat(partial / "stablehlo.json").st_mode & 0o777
        os.chmod(partial / "parameters.safetensors", mode)  # save_file makes it 0600
    return list(programs)


def flatten(parameters: Parameters) -> dict[str, np.ndarray]:
    """Returns the parameters by dotted name, as contiguous arrays."""
    return {name: np.ascontiguousarray(leaf) for name, leaf in flatten_dict(parameters, sep=".").items()}


def _programs(checkpoint: Checkpoint) -> dict[str, Callable[..., Any]]:
    config, is_task = checkpoint.bert_config, checkpoint.task is not None
    graph, _, _ = abstract_parameters(config, **model_settings(checkpoint.heads, checkpoint.task))

    def bind(flat: dict[str, jax.Array], inputs: tuple[jax.Array, ...]) -> tuple[Any, dict[str, jax.Array]]:
        model = nnx.merge(graph, unflatten_dict(flat, sep="."))
        return model, _batch(*inputs, last=is_task and config.is_decoder)

    def encode(flat: dict[str, jax.Array], *inputs: jax.Array) -> jax.Array:
        model, batch = bind(flat, inputs)
        result: jax.Array = model.features(batch) if is_task else model.encode(batch)[0]
        return result

    def logits(flat: dict[str, jax.Array], *inputs: jax.Array) -> dict[str, jax.Array]:
        model, batch = bind(flat, inputs)
        if is_task:
            return {"outputs": model(batch)}
        mlm, nsp = model(batch)
        result = {} if mlm is None else {"mlm": mlm[..., : config.vocab_size]}
        return result if nsp is None else {**result, "nsp": nsp[:, 0]}

    has_logits = is_task or {"mlm_head", "nsp_head"} & {*checkpoint.heads}
    return {"encode": encode, **({"logits": logits} if has_logits else {})}


def _batch(
    input_ids: jax.Array, token_type_ids: jax.Array, attention_mask: jax.Array, *, last: bool
) -> dict[str, jax.Array]:
    """Returns the model's batch for three int32 [B, L] of `transformers`, whose padding is at the end.

    Every position is predicted; a sequence is pooled from its first token, or its `last` one.
    """
    positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1], dtype=jnp.int32), input_ids.shape)
    ends = attention_mask.sum(axis=1, keepdims=True, dtype=jnp.int32) - 1
    return {
        "input_ids": input_ids, "token_type_ids": token_type_ids, "positions": positions,
        "sequence_ids": attention_mask, "masked_positions": positions,
        "cls_positions": ends if last else jnp.zeros_like(ends),
    }  # fmt: skip
