"""Commands that use a checkpoint: evaluation, predictions, scores of texts, features, export and import."""

from collections.abc import Sequence
from typing import Literal

from bert_jax.command_line.arguments import Checkpoint, File, FileOrFolder, Folder, command
from bert_jax.commands import Result
from bert_jax.config_keys import NotNegative
from bert_jax.errors import InputError
from bert_jax.progress import Bars, silent


@command
def evaluate(checkpoint: Checkpoint, data: FileOrFolder, *, batch_size: int = 64, bars: Bars = silent) -> Result:
    """Prints JSON: loss and accuracy on a dataset's eval split, or a fine-tuned model's scores on files.

    Reads: a checkpoint, and a prepared dataset or a labelled file
    Writes: nothing

    Args:
      checkpoint: a workdir, a checkpoints/STEP folder, or what import reads or writes
      data: a prepared dataset; for a fine-tuned model, a labelled file or its folder
      batch_size: sequences per batch

    Examples:
      bert-jax evaluate --checkpoint=runs/base --data=data
      bert-jax evaluate --checkpoint=runs/mine --data=dev.csv
    """
    from bert_jax.finetuning.fine_tuned import evaluate_finetuned
    from bert_jax.inference.pretrained import open_model_of
    from bert_jax.runtime.processes import check_agreement
    from bert_jax.training.evaluation import evaluate_checkpoint

    found = open_model_of(checkpoint)
    check_agreement("checkpoint", found.path.name)
    score = evaluate_checkpoint if found.task is None else evaluate_finetuned
    return Result(score(found, data, batch_size=batch_size, bars=bars))


@command
def predict(
    checkpoint: Checkpoint, input: File, output: File, *, text: Sequence[str] = (),
    strict: bool = False, batch_size: int = 64, bars: Bars = silent,
) -> Result:  # fmt: skip
    """Writes a fine-tuned model's predictions for a file, for any kind of task.

    Reads: a fine-tuned checkpoint and a file
    Writes: FILE, one JSON object a line

    Args:
      checkpoint: a workdir, a checkpoints/STEP folder, or what import reads or writes
      input: a file in the format of the training file, labels ignored; with --text, a tagger reads a table of texts
      output: JSON lines with id, prediction and scores
      text: one or two text columns; default: those of the training file
      strict: fail on a bad row instead of skipping it
      batch_size: texts per batch

    Examples:
      bert-jax predict --checkpoint=runs/mine --input=new.csv --output=predictions.jsonl
      bert-jax predict --checkpoint=runs/mine --input=new.csv --output=predictions.jsonl --text text --strict
    """
    from bert_jax.finetuning import fine_tuned
    from bert_jax.inference.pretrained import open_model_of

    count = fine_tuned.predict(
        open_model_of(checkpoint), input, output, texts=text, strict=strict, batch_size=batch_size, bars=bars
    )
    return Result({"output": output, "predictions": count})


@command
def fill_mask(text: Sequence[str], /, checkpoint: Checkpoint, *, top: int = 5) -> Result:
    """Prints the most probable words for each [MASK].

    Reads: a pre-trained checkpoint
    Writes: nothing

    Args:
      text: for example "Paris is the [MASK] of France."
      checkpoint: a workdir, a checkpoints/STEP folder, or what import reads or writes
      top: candidates per mask

    Examples:
      bert-jax fill-mask --checkpoint=runs/base 'Paris is the [MASK] of France.'
    """
    from bert_jax.inference import pretrained

    model = pretrained.load(checkpoint)
    found = [(one, model.fill_mask(one, top)) for one in text]
    lines = [
        "".join(f"{filling.probability:.4f}  {filling.token:<16}  {filling.text}\n" for filling in fillings)
        for _, masks in found for fillings in masks
    ]  # fmt: skip
    return Result({"texts": [{"text": one, "masks": masks} for one, masks in found]}, "\n".join(lines))


@command
def score(
    checkpoint: Checkpoint, input: File, output: File, *,
    masking: Literal["token", "within_word_l2r"] = "token", batch_size: int = 32, bars: Bars = silent,
) -> Result:  # fmt: skip
    """Writes the pseudo-log-likelihood of each line of a text file, and prints the pseudo-perplexity of all.

    Reads: a pre-trained checkpoint and a text file
    Writes: FILE, one JSON object a line

    Args:
      checkpoint: a workdir, a checkpoints/STEP folder, or what import reads or writes
      input: one text per line; also compressed
      output: JSON lines with text, score in nats, tokens and truncated
      masking: what is masked at once: a token, or a token and the later ones of its word
      batch_size: masked copies of lines per batch

    Examples:
      bert-jax score --checkpoint=runs/base --input=lines.txt --output=scores.jsonl
      bert-jax score --checkpoint=runs/base --input=lines.txt --output=words.jsonl --masking=within_word_l2r
    """
    from bert_jax.inference.pretrained import open_model_of
    from bert_jax.inference.scores import score_lines

    found = open_model_of(checkpoint)
    return Result(score_lines(found, input, output, masking=masking, batch_size=batch_size, bars=bars))


@command
def features(
    checkpoint: Checkpoint, input: File, output: File, *, layers: str | None = None,
    seq_len: int | None = None, batch_size: int = 32, bars: Bars = silent,
) -> Result:  # fmt: skip
    """Writes the hidden states of each token of a text file.

    Reads: a checkpoint and a text file
    Writes: FILE, one JSON object a line, or arrays in .npz

    Args:
      checkpoint: a workdir, a checkpoints/STEP folder, or what import reads or writes
      input: one text per line, or two: `first ||| second`; also compressed
      output: JSON lines, or arrays if it ends in .npz
      layers: numbers (0 is the first, -1 the last), embeddings or all; default: the last four
      seq_len: maximum tokens per line; default: the model's maximum
      batch_size: lines per batch

    Examples:
      bert-jax features --checkpoint=runs/base --input=lines.txt --output=features.jsonl
      bert-jax features --checkpoint=runs/base --input=lines.txt --output=features.npz --layers=-1,-2
    """
    from bert_jax.inference.features import extract

    return Result(extract(checkpoint, input, output, layers=layers, seq_len=seq_len, batch_size=batch_size, bars=bars))


@command
def export(checkpoint: Checkpoint, output: Folder, *, format: Literal["hf", "stablehlo"] = "hf") -> Result:
    """Writes a checkpoint for Hugging Face transformers and its Hub, or as StableHLO.

    Reads: a checkpoint
    Writes: DIR: config.json, model.safetensors, tokenizer.json; or model.stablehlo

    Args:
      checkpoint: a workdir, a checkpoints/STEP folder, or what import reads or writes
      output: a new folder
      format: of the folder

    Examples:
      bert-jax export --checkpoint=runs/base --output=hf
      bert-jax export --checkpoint=runs/base/checkpoints/1000 --output=step1000
      bert-jax export --checkpoint=runs/mine --output=hlo --format=stablehlo
    """
    from bert_jax.inference.pretrained import open_model_of
    from bert_jax.interop import huggingface, stablehlo

    opened = open_model_of(checkpoint)
    values = {"output": output, "checkpoint": str(opened.path)}
    if format == "stablehlo":
        stablehlo.export(opened, output)
        return Result(values)
    return Result({**values, "architecture": huggingface.export(opened, output)})


@command
def import_(
    source: FileOrFolder, output: Folder, *, cased: bool = False, uncased: bool = False,
    layers: tuple[NotNegative, ...] = (), drop: Sequence[str] = (),
) -> Result:  # fmt: skip
    """Imports a checkpoint from another library's format, to evaluate, train or export it.

    Reads: a folder of Hugging Face transformers, or a TensorFlow checkpoint
    Writes: DIR, a checkpoint without optimizer state

    Args:
      source: a transformers folder: config.json, weights, and vocab.txt or tokenizer.json; or a file of weights in
        one; or a TensorFlow checkpoint (its folder, or such as DIR/bert_model.ckpt) beside bert_config.json and
        vocab.txt
      output: a new folder
      cased: a vocab.txt keeps case and accents, regardless of the source's settings
      uncased: a vocab.txt is lowercase without accents, regardless of the source's settings
      layers: import these layers alone, from 0 and in this order, such as 0,2,4; a layer may be repeated
      drop: beginnings of the names of weights that are not imported; any other unused weight is refused

    Examples:
      bert-jax import --source=hf --output=imported
      bert-jax import --source=hf --output=smaller --layers=0,2,4
    """
    from bert_jax.interop.importing import import_checkpoint

    if cased and uncased:
        raise InputError("cased: contradicts uncased; remove one")
    rule = uncased if cased or uncased else None
    checkpoint = import_checkpoint(source, output, lowercase=rule, layers=layers or None, drop=drop)
    return Result({
        "output": output, "vocab_size": checkpoint.tokenizer.vocab_size,
        "cased": not checkpoint.tokenizer.lowercase, "heads": list(checkpoint.heads),
        "task": None if checkpoint.task is None else checkpoint.task["name"],
    })  # fmt: skip
