"""Export of a folder for `transformers` and for its Hub: weights, config, tokenizer and model card."""

import json
import logging
import os
from typing import Any

from safetensors.numpy import save_file

from bert_jax.files import provenance
from bert_jax.files.output_folder import new_folder, whole_folder
from bert_jax.interop.architectures import ARCHITECTURES
from bert_jax.interop.huggingface_weights import state_dict
from bert_jax.interop.model_card import CARD, Publication, model_card
from bert_jax.interop.task_weights import task_model
from bert_jax.interop.weight_files import WHOLE
from bert_jax.model import BertConfig
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpointing.checkpoints import Checkpoint, check_finite

log = logging.getLogger(__name__)

CONFIG = "config.json"
"""Written last: a remote folder with it is complete."""

_LEFT_TO_RIGHT = ("BertLMHeadModel", "BertModel")  # architectures of a left-to-right model


def model_config(config: BertConfig, tokenizer: Tokenizer, architecture: str) -> dict[str, Any]:
    """Returns the contents of `config.json`."""
    return {
        "architectures": [architecture],
        "model_type": "bert",
        **config.to_dict(),
        "pad_token_id": tokenizer.pad_id,
        "dtype": "float32",
    }


def export(checkpoint: Checkpoint, output: str, publication: Publication | None = None) -> str:
    """Writes `config.json`, `model.safetensors`, the tokenizer's files, a model card and the provenance to `output`.

    Returns the name of the architecture: the one with the checkpoint's heads, BertLMHeadModel for a left-to-right
    model, or that of the fine-tuned task. The folder is written atomically.

    Raises InputError if `output` is a file or a folder that is not empty, and as `task_model` does.
    """
    folder = new_folder(output)
    log.info("Reading %s and writing %s", checkpoint.path, folder)
    config, tokenizer = checkpoint.bert_config, checkpoint.tokenizer
    if checkpoint.task is not None:
        architecture, task_config, weights = task_model(checkpoint)
        described = {**model_config(config, tokenizer, architecture), **task_config}
    else:
        architecture = _architecture(checkpoint)
        heads = [head for head in ARCHITECTURES[architecture] if head in checkpoint.heads]
        if dropped := [head for head in checkpoint.heads if head not in heads]:
            log.warning("%s does not support these heads, which are not exported: %s", architecture, ", ".join(dropped))
        if not heads:
            log.warning(
                "Exported without a pooler; load it with BertModel.from_pretrained(..., add_pooling_layer=False)"
            )
        described = model_config(config, tokenizer, architecture)
        parameters = checkpoint.load_parameters()
        check_finite(checkpoint, parameters)
        weights = state_dict(parameters, config, heads)
    with whole_folder(folder, last=CONFIG) as partial:
        longest = checkpoint.task["max_seq_len"] if checkpoint.task is not None else config.max_position_embeddings
        tokenizer.save_huggingface(str(partial), model_max_length=longest)
        (partial / CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
        provenance.write(partial, provenance.record({"checkpoint": checkpoint.reference()}))
        count = sum(value.size for value in weights.values())
        card = model_card(checkpoint, architecture, folder.name, publication or Publication(), parameters=count)
        (partial / CARD).write_text(card, encoding="utf-8")
        save_file(weights, str(partial / WHOLE), metadata={"format": "pt"})
        os.chmod(partial / WHOLE, os.stat(partial / CONFIG).st_mode & 0o777)  # save_file makes it 0600
    return architecture


def _architecture(checkpoint: Checkpoint) -> str:
    candidates = _LEFT_TO_RIGHT if checkpoint.bert_config.is_decoder else ARCHITECTURES
    return next((name for name in candidates if {*ARCHITECTURES[name]} <= {*checkpoint.heads}), "BertModel")
