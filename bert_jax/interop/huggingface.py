"""Export of a folder for `transformers` and for its Hub: weights, config, tokenizer and model card.

The card is `README.md`: the Hub's metadata, YAML between two lines `---`, and what the checkpoint knows; see
https://huggingface.co/docs/hub/model-cards.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict
from safetensors.numpy import save

from bert_jax import __version__
from bert_jax.config_keys import PretrainConfig
from bert_jax.files import provenance, remote
from bert_jax.files.atomic import new_folder, read_json, whole_folder
from bert_jax.finetuning.fine_tuned import RESULT_FILE
from bert_jax.interop.architectures import ARCHITECTURES, architecture_of, model_config, model_type_of, task_config
from bert_jax.interop.importing import CONFIG
from bert_jax.interop.weights import WHOLE, layout, state_dict
from bert_jax.model.task_heads import TaskHead, model_settings
from bert_jax.sections import flatten, from_mapping
from bert_jax.text.conversion import VOCABULARY
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training.checkpoints import Checkpoint, check_finite
from bert_jax.training.phases import plan_at

log = logging.getLogger(__name__)

CARD = "README.md"
_SETTINGS = (  # keys of the run's config in the card, and beginnings of keys
    "total_steps", "num_epochs", "global_batch_size", "optimizer.", "objective.", "task.max_seq_len", "dtype", "seed",
)  # fmt: skip


def export(checkpoint: Checkpoint, output: str) -> str:
    """Writes `config.json`, `model.safetensors`, the tokenizer's files, a model card and the provenance to `output`.

    Returns the name of the class; see `architecture_of`. The folder is written atomically.

    Raises InputError if `output` is a file or a folder that is not empty, and as `architecture_of` does.
    """
    folder = new_folder(output)
    log.info("Reading %s and writing %s", checkpoint.path, folder)
    config, tokenizer, task = checkpoint.bert_config, checkpoint.tokenizer, checkpoint.task
    architecture = architecture_of(checkpoint)
    heads = [head for head in ARCHITECTURES[architecture].heads if head in checkpoint.heads]
    if dropped := [head for head in checkpoint.heads if head not in heads]:
        log.warning("%s does not support these heads, which are not exported: %s", architecture, ", ".join(dropped))
    parameters = checkpoint.load_parameters(**model_settings(checkpoint.heads, task))
    check_finite(checkpoint, parameters)
    outputs = TaskHead.from_dict(task).outputs if task else 0
    weights = state_dict(parameters, layout(config, architecture, heads, outputs))
    longest = task["max_seq_len"] if task else config.max_position_embeddings
    special_ids = {"cls_token_id": tokenizer.cls_id, "sep_token_id": tokenizer.sep_id,
                   "bos_token_id": tokenizer.cls_id, "eos_token_id": tokenizer.sep_id}  # fmt: skip
    described = {
        "architectures": [architecture], **model_config(config), "pad_token_id": tokenizer.pad_id, "dtype": "float32",
        **(special_ids if architecture.startswith("Modern") else {}), **(task_config(task) if task else {}),
    }  # fmt: skip
    size = sum(value.size for value in weights.values())
    card = model_card(checkpoint, architecture, folder.name, parameters=size)
    with whole_folder(folder, last=CONFIG) as partial:  # a remote folder with the config is complete
        tokenizer.save(partial, model_max_length=longest, has_segments=config.type_vocab_size > 0)
        if tokenizer.kind == "wordpiece" and "" not in tokenizer.vocab:  # for BertTokenizer of version 4, and others
            (partial / VOCABULARY).write_text("".join(f"{piece}\n" for piece in tokenizer.vocab), encoding="utf-8")
        (partial / CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
        (partial / CARD).write_text(card, encoding="utf-8")
        (partial / WHOLE).write_bytes(save(weights, metadata={"format": "pt"}))
        provenance.append(partial, provenance.record({"checkpoint": checkpoint.reference()}))
    return architecture


def model_card(checkpoint: Checkpoint, architecture: str, name: str, *, parameters: int) -> str:
    """Returns the text of the card of a model that is exported as `architecture`.

    `name` is its title, and `parameters` the number of its parameters. The card names no data set: a file in the format
    of a benchmark may be anyone's.
    """
    config, tokenizer, task = checkpoint.bert_config, checkpoint.tokenizer, checkpoint.task or {}
    pipeline = ARCHITECTURES[architecture].pipeline
    line = f"pipeline_tag: {pipeline}" if pipeline else ""
    tags = f"library_name: transformers\n{line}\ntags: [{model_type_of(config)}, jax, bert_jax]"
    origin = "Fine-tuned" if task else "Pre-trained" if checkpoint.config else "Converted"
    case, accents = "uncased" if tokenizer.lowercase else "cased", "stripped" if tokenizer.strip_accents else "kept"
    bare = ", add_pooling_layer=False" if architecture == "BertModel" and not checkpoint.heads else ""
    lines = [
        f"---\n{tags}\n---\n\n# {name}\n",
        f"{origin} with bert_jax {__version__}, as `{architecture}`, after step {checkpoint.step:,}.\n",
        f"- {config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} heads, "
        f"feed-forward size {config.intermediate_size}, `hidden_act` {config.hidden_act}",
        f"- {parameters:,} parameters",
        f"- {tokenizer.vocab_size:,} pieces, {tokenizer.kind}, {case}, accents {accents}",
        f"- at most {task.get('max_seq_len', config.max_position_embeddings)} tokens",
        f"\n## Use\n\n```python\nfrom transformers import AutoTokenizer, {architecture}\n",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        f'model = {architecture}.from_pretrained("FOLDER"{bare})\n```',
    ]
    keys = flatten_dict(checkpoint.config, sep=".")
    if keys.get("phases"):
        keys = dict(flatten(plan_at(from_mapping(PretrainConfig, checkpoint.config), checkpoint.step).config))
    settings = [
        f"| `{key}` | {value} |" for key, value in keys.items() if key.startswith(_SETTINGS) and value is not None
    ]
    if settings:
        lines += ["\n## Training\n\n| setting | value |\n| --- | --- |", *settings]
    if scores := _scores(checkpoint):
        lines += ["\n## Evaluation\n\n| split | metric | value |\n| --- | --- | --- |", *scores]
    return "\n".join(lines) + "\n"


def _scores(checkpoint: Checkpoint) -> list[str]:
    """Returns rows of what a run recorded at the checkpoint's step, without counts, thresholds and times.

    It is in `result.json` of a fine-tuning run, and in the rows of metrics of pre-training.
    """
    workdir = checkpoint.path.parent.parent
    found: dict[str, Mapping[str, Any]] = {}
    if checkpoint.config and checkpoint.task is not None and remote.exists(workdir / RESULT_FILE):
        result = read_json(workdir / RESULT_FILE)
        found = result.get("scores") or {} if result.get("step") == checkpoint.step else {}
    elif checkpoint.config and checkpoint.task is None:
        rows = [row for row in read_metrics(workdir) if (row["step"], row.get("split")) == (checkpoint.step, "eval")]
        found = {"eval": rows[-1]} if rows else {}
    return [
        f"| {split} | {name} | {value:.4f} |"
        for split, metrics in found.items()
        for name, value in metrics.items()
        if isinstance(value, float) and name != "time" and not name.endswith("_thresh")
    ]
