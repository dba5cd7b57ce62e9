"""The model card of an exported folder: `README.md` with the Hub's metadata, from what the checkpoint knows.

The metadata is YAML between two lines `---`; see https://huggingface.co/docs/hub/model-cards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from flax.traverse_util import flatten_dict

from bert_jax import __version__
from bert_jax.files import remote
from bert_jax.finetuning.results import RESULT_FILE, read_result
from bert_jax.interop.architectures import ARCHITECTURES
from bert_jax.tracking.metrics import read_metrics
from bert_jax.training.checkpoints import Checkpoint

CARD = "README.md"

_SETTINGS = (  # of the run's config, without those that name files
    "total_steps", "num_epochs", "global_batch_size", "gradient_accumulation", "optimizer.name",
    "optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.warmup_proportion", "optimizer.decay_power",
    "optimizer.weight_decay", "optimizer.b1", "optimizer.b2", "optimizer.eps", "optimizer.grad_clip_norm",
    "optimizer.bias_correction", "objective.lm", "objective.nsp", "objective.mask_rate", "objective.whole_word",
    "task.max_seq_len", "head.dropout", "dtype", "seed",
)  # fmt: skip
_NOT_METRICS = (  # of rows and results: the progress of a run, counts, settings, and what only the data determines
    "step", "time", "tokens_seen", "examples_seen", "sequences", "old_sequences", "unigram_loss", "total",
    "HasAns_total", "NoAns_total", "best_f1_thresh", "best_exact_thresh",
)  # fmt: skip

Results = Sequence[tuple[str, Mapping[str, float]]]
"""The name of each split, such as `dev` or `eval`, with its scores by name."""


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


def read_results(checkpoint: Checkpoint) -> Results:
    """Returns what a run recorded of each split at the checkpoint's step, in its workdir; [] if there is nothing.

    It is in `result.json` of a fine-tuning run, and in the rows of metrics of pre-training.
    """
    if not checkpoint.config:  # imported
        return []
    workdir = checkpoint.path.parent.parent
    if checkpoint.task is not None:
        path = workdir / RESULT_FILE
        result = read_result(path) if remote.exists(path) else {}
        return [*result["scores"].items()] if result.get("step") == checkpoint.step and result.get("scores") else []
    rows = [row for row in read_metrics(workdir) if (row["step"], row.get("split")) == (checkpoint.step, "eval")]
    return [("eval", {name: value for name, value in rows[-1].items() if name != "split"})] if rows else []


def model_card(
    checkpoint: Checkpoint, architecture: str, name: str, publication: Publication, *, parameters: int,
    revision: str = "",
) -> str:  # fmt: skip
    """Returns the text of the card of a model that is exported as `architecture`.

    `name` is its title, `parameters` the number of its parameters, and `revision` the name of a step among others.
    The card names no data set but those of the publication: a file in the format of a benchmark may be anyone's.
    """
    config, tokenizer, task = checkpoint.bert_config, checkpoint.tokenizer, checkpoint.task or {}
    scores = [
        (split, metric, value)
        for split, values in read_results(checkpoint) for metric, value in values.items()
        if metric not in _NOT_METRICS and isinstance(value, (int, float))
    ]  # fmt: skip
    metadata = {
        "language": list(publication.languages),
        "license": publication.license,
        "library_name": "transformers",
        "pipeline_tag": ARCHITECTURES[architecture].pipeline,
        "tags": ["bert", "jax", "bert_jax"],
        "datasets": list(publication.datasets),
        "metrics": sorted({metric for _, metric, _ in scores}),
        "model-index": _model_index(name, ARCHITECTURES[architecture].pipeline, scores),
    }
    front = yaml.safe_dump({k: v for k, v in metadata.items() if v}, sort_keys=False, allow_unicode=True)
    origin = "Fine-tuned" if task else "Pre-trained" if checkpoint.config else "Converted"
    case, accents = "uncased" if tokenizer.lowercase else "cased", "stripped" if tokenizer.strip_accents else "kept"
    place = f'"USER/{name}", revision="{revision}"' if revision else '"FOLDER"'
    bare = ", add_pooling_layer=False" if architecture == "BertModel" and not checkpoint.heads else ""
    lines = [
        f"---\n{front}---\n\n# {name}\n",
        f"{origin} with bert_jax {__version__}, as `{architecture}`, after step {checkpoint.step:,}.\n",
        f"- {config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} heads, "
        f"feed-forward size {config.intermediate_size}, `hidden_act` {config.hidden_act}",
        f"- {parameters:,} parameters",
        f"- {tokenizer.vocab_size:,} pieces of {tokenizer.title}, {case}, accents {accents}",
        f"- at most {task.get('max_seq_len', config.max_position_embeddings)} tokens",
        f"\n## Use\n\n```python\nfrom transformers import AutoTokenizer, {architecture}\n",
        f"tokenizer = AutoTokenizer.from_pretrained({place})",
        f"model = {architecture}.from_pretrained({place}{bare})\n```",
    ]
    if names := task.get("classes") or task.get("tags"):
        lines.append(f"\n## Labels\n\n{', '.join(f'`{label}`' for label in names)}")
    config_keys = flatten_dict(checkpoint.config, sep=".")
    settings = [f"| `{key}` | {config_keys[key]} |" for key in _SETTINGS if config_keys.get(key) is not None]
    if settings:
        lines += ["\n## Training\n\n| setting | value |\n| --- | --- |", *settings]
    if scores:
        lines.append("\n## Evaluation\n\n| split | metric | value |\n| --- | --- | --- |")
        lines += [f"| {split} | {metric} | {value:.4f} |" for split, metric, value in scores]
    return "\n".join(lines) + "\n"


def _model_index(name: str, pipeline: str | None, scores: Sequence[tuple[str, str, float]]) -> list[dict[str, Any]]:
    """Returns the Hub's form of scores (split, metric, value)."""
    results = [
        {
            "task": {"type": pipeline},
            "dataset": {"type": "unpublished", "name": f"the split {split} of the run", "split": split},
            "metrics": [{"type": metric, "value": round(value, 6)} for part, metric, value in scores if part == split],
        }
        for split in dict.fromkeys(split for split, _, _ in scores)
    ]
    return [{"name": name, "results": results}] if pipeline and results else []
