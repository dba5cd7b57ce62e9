"""The model card of an exported folder: `README.md` with the Hub's metadata, from what the checkpoint knows.

The metadata is YAML between two lines `---`; see https://huggingface.co/docs/hub/model-cards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from bert_jax import __version__
from bert_jax.interop.architectures import PIPELINES, TASK_ARCHITECTURES
from bert_jax.interop.evaluation_results import SplitScores, read_results
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpoints import Checkpoint

CARD = "README.md"

_SETTINGS = (  # of the run's config, without those that name files
    "total_steps", "num_epochs", "global_batch_size", "gradient_accumulation", "optimizer.name",
    "optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.warmup_proportion", "optimizer.decay_power",
    "optimizer.weight_decay", "optimizer.b1", "optimizer.b2", "optimizer.eps", "optimizer.grad_clip_norm",
    "optimizer.bias_correction", "objective.lm", "objective.nsp", "objective.mask_rate", "objective.whole_word",
    "task.max_seq_len", "head.dropout", "dtype", "seed",
)  # fmt: skip
_NOT_METRICS = ("unigram_loss", "best_f1_thresh", "best_exact_thresh")  # of the data, and settings
_CALLS = {  # by pipeline of transformers 5, which has none for questions: the input of the example
    "fill-mask": 'model("Paris is the [MASK] of France.")',
    "text-classification": 'model("A text.")',
    "token-classification": 'model("Ada Lovelace was born in London.")',
    "feature-extraction": 'model("A text.")',
    "text-generation": 'model("The ship")',
}


@dataclass(frozen=True)
class Publication:
    """Facts about a model that its checkpoint does not know; each is in the card only if it is given.

    Attributes:
      license: the Hub's identifier of the license, such as `apache-2.0`.
      languages: ISO 639-1 codes.
      datasets: names of data sets on the Hub.
    """

    license: str = ""
    languages: Sequence[str] = ()
    datasets: Sequence[str] = ()


def model_card(
    checkpoint: Checkpoint, architecture: str, name: str, publication: Publication, *, parameters: int,
    revision: str = "",
) -> str:  # fmt: skip
    """Returns the text of the card of a model that is exported as `architecture`.

    `name` is its title, `parameters` the number of its parameters, and `revision` the name of a step among others.
    """
    results = read_results(checkpoint)
    metadata = card_metadata(checkpoint, architecture, name, publication, results)
    sections = [
        _description(checkpoint, architecture, parameters),
        _usage(checkpoint, architecture, metadata.get("pipeline_tag")),
        _revisions(checkpoint, architecture, name, revision),
        _labels(checkpoint),
        _training(checkpoint),
        _evaluation(results),
    ]
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n# {name}\n\n" + "\n".join(section for section in sections if section)


def card_metadata(
    checkpoint: Checkpoint, architecture: str, name: str, publication: Publication, results: Sequence[SplitScores]
) -> dict[str, Any]:
    """Returns the metadata of the card; unknown keys are absent."""
    pipeline = _pipeline(checkpoint, architecture)
    metadata: dict[str, Any] = {
        "language": list(publication.languages),
        "license": publication.license,
        "library_name": "transformers",
        "pipeline_tag": pipeline,
        "tags": ["bert", "jax", "bert_jax"],
        "datasets": list(publication.datasets),
        "metrics": sorted({metric for scores in results for metric in _metrics(scores)}),
    }
    if pipeline and results:
        metadata["model-index"] = [{"name": name, "results": [_result(checkpoint, pipeline, s) for s in results]}]
    return {key: value for key, value in metadata.items() if value}


def _pipeline(checkpoint: Checkpoint, architecture: str) -> str | None:
    if checkpoint.task is not None:
        return TASK_ARCHITECTURES[checkpoint.task["kind"]].pipeline
    return PIPELINES.get(architecture)


def _result(checkpoint: Checkpoint, pipeline: str, scores: SplitScores) -> dict[str, Any]:
    metrics = [{"type": name, "value": round(value, 6), "name": name} for name, value in _metrics(scores).items()]
    return {"task": {"type": pipeline}, "dataset": _dataset(checkpoint, scores.split), "metrics": metrics}


def _metrics(scores: SplitScores) -> dict[str, float]:
    return {name: value for name, value in scores.metrics.items() if name not in _NOT_METRICS}


def _dataset(checkpoint: Checkpoint, split: str) -> dict[str, Any]:
    """Returns the data set of a result, by its name on the Hub if it is a public one."""
    kind, _, rest = (checkpoint.task or {"name": "pretraining"})["name"].partition("/")
    public = split.replace("dev", "validation")
    if kind == "glue":
        return {"type": "nyu-mll/glue", "name": f"GLUE {rest}", "config": rest, "split": public}
    if kind == "squad":
        hub = {"1.1": "rajpurkar/squad", "2.0": "rajpurkar/squad_v2"}.get(rest, "squad")
        return {"type": hub, "name": f"SQuAD {rest}", "split": public}
    if kind == "pretraining":
        return {"type": "prepared", "name": "the eval split of the pre-training data", "split": split}
    return {"type": kind, "name": f"the {split} split of the fine-tuning data", "split": split}


def _description(checkpoint: Checkpoint, architecture: str, parameters: int) -> str:
    config = checkpoint.bert_config
    made = "Fine-tuned" if checkpoint.task is not None else "Pre-trained" if checkpoint.config else "Converted"
    return (
        f"{made} with bert_jax {__version__}, as `{architecture}`.\n\n"
        f"- {config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} heads, "
        f"feed-forward size {config.intermediate_size}, `hidden_act` {config.hidden_act}\n"
        f"- {parameters:,} parameters\n"
        f"- {_vocabulary(checkpoint.tokenizer)}\n"
        f"- at most {_longest(checkpoint)} tokens\n"
    )


def _vocabulary(tokenizer: Tokenizer) -> str:
    case = "uncased" if tokenizer.lowercase else "cased"
    accents = "stripped" if tokenizer.strip_accents else "kept"
    is_split = tokenizer.is_pretokenized
    split = ", for text with white space between its words or morphemes" if is_split else ""
    return f"{tokenizer.vocab_size:,} pieces of {tokenizer.title}, {case}, accents {accents}{split}"


def _longest(checkpoint: Checkpoint) -> int:
    task = checkpoint.task
    return checkpoint.bert_config.max_position_embeddings if task is None else task["max_seq_len"]


def _usage(checkpoint: Checkpoint, architecture: str, pipeline: str | None) -> str:
    if pipeline in _CALLS:
        load = f'from transformers import pipeline\n\nmodel = pipeline("{pipeline}", model="FOLDER")'
        code = f"{load}\n{_CALLS[pipeline].replace('[MASK]', checkpoint.tokenizer.special_tokens[4])}"
    else:
        code = f'from transformers import {architecture}\n\nmodel = {architecture}.from_pretrained("FOLDER")'
    note = ""
    if "pooler" not in checkpoint.heads and architecture == "BertModel":
        code = code.replace('"FOLDER")', '"FOLDER", model_kwargs={"add_pooling_layer": False})')
        note = "\nThe model has no pooler.\n"
    return f"## Use\n\n```python\n{code}\n```\n{note}"


def _revisions(checkpoint: Checkpoint, architecture: str, name: str, revision: str) -> str:
    if not revision:
        return ""
    return (
        f"## Revisions\n\nThis is the model after step {checkpoint.step:,}. "
        f"The steps of its training are revisions of one model, `stepN` after N steps:\n\n"
        f"```python\nfrom transformers import {architecture}\n\n"
        f'model = {architecture}.from_pretrained("USER/{name}", revision="{revision}")\n```\n\n'
        "Each is uploaded from its folder, and the newest also without `--revision`:\n\n"
        f"```bash\nhf upload USER/{name} {revision} --revision {revision}\n```\n"
    )


def _labels(checkpoint: Checkpoint) -> str:
    task = checkpoint.task or {}
    names = task.get("classes") or task.get("tags")
    return f"## Labels\n\n{', '.join(f'`{name}`' for name in names)}\n" if names else ""


def _training(checkpoint: Checkpoint) -> str:
    rows = [(key, value) for key in _SETTINGS if (value := _setting(checkpoint.config, key)) is not None]
    if not rows:
        return ""
    lines = [f"| step | {checkpoint.step:,} |", *(f"| `{key}` | {value} |" for key, value in rows)]
    return "## Training\n\n| setting | value |\n| --- | --- |\n" + "\n".join(lines) + "\n"


def _setting(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _evaluation(results: Sequence[SplitScores]) -> str:
    if not results:
        return ""
    lines = [
        f"| {scores.split} | {name} | {value:.4f} |" for scores in results for name, value in scores.metrics.items()
    ]
    return "## Evaluation\n\n| split | metric | value |\n| --- | --- | --- |\n" + "\n".join(lines) + "\n"
