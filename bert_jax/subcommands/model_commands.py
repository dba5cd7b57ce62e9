"""Commands that use a checkpoint: evaluation, predictions, features, export and import."""

import argparse
import dataclasses
import json
from typing import Any

from bert_jax.command_line.command_results import print_result, suggest
from bert_jax.command_line.console import bars
from bert_jax.errors import InputError
from bert_jax.progress import silent


def run_evaluate(options: argparse.Namespace) -> None:
    """Runs `bert-jax evaluate`."""
    from bert_jax.finetuning.fine_tuned import evaluate_finetuned
    from bert_jax.inference.opening import open_model_of
    from bert_jax.runtime.processes import is_first, joined_processes
    from bert_jax.tracking.metrics import finite_json
    from bert_jax.training.evaluation import evaluate_checkpoint, evaluate_steps

    with joined_processes():
        progress = bars(quiet=options.quiet) if is_first() else silent
        if options.steps:
            scores = evaluate_steps(
                options.checkpoint, options.steps, options.data, batch_size=options.batch_size, bars=progress
            )
            if is_first():
                print(finite_json({"steps": scores}, indent=2))
            return
        found = open_model_of(options.checkpoint)
        evaluate = evaluate_checkpoint if found.task is None else evaluate_finetuned
        values = evaluate(found, options.data, batch_size=options.batch_size, bars=progress)
        if is_first():
            print(finite_json(values, indent=2))
            suggest(options)


def run_predict(options: argparse.Namespace) -> None:
    """Runs `bert-jax predict`."""
    from bert_jax.finetuning.fine_tuned import predict
    from bert_jax.inference.opening import open_model_of

    count = predict(
        open_model_of(options.checkpoint), options.input, options.output,
        texts=options.text, with_text=options.with_text, strict=options.strict, batch_size=options.batch_size,
        bars=bars(quiet=options.quiet),
    )  # fmt: skip
    values = {"output": options.output, "predictions": count}
    print_result(options, values, f"{options.output}: {count:,} predictions")
    suggest(options)


def run_fill_mask(options: argparse.Namespace) -> None:
    """Runs `bert-jax fill-mask`."""
    from bert_jax.inference.pretrained import check_mask, fill_mask, load
    from bert_jax.inference.text_encoder import check_text

    for text in options.text:
        check_text(text)
    pretrained = load(options.checkpoint)
    for text in options.text:
        check_mask(text, pretrained.tokenizer)
    if options.json:
        found = [{"text": text, "masks": fill_mask(pretrained, text, options.top)} for text in options.text]
        print(json.dumps({"texts": found}, indent=2, ensure_ascii=False, default=dataclasses.asdict))
        return
    for text in options.text:
        for fillings in fill_mask(pretrained, text, options.top):
            for filling in fillings:
                print(f"{filling.probability:.4f}  {filling.token:<16}  {filling.text}")
            print()


def run_features(options: argparse.Namespace) -> None:
    """Runs `bert-jax features`."""
    from bert_jax.inference.features import extract

    extracted = extract(
        options.checkpoint, options.input, options.output,
        layers=options.layers, pool=options.pool, seq_len=options.seq_len, batch_size=options.batch_size,
        bars=bars(quiet=options.quiet),
    )  # fmt: skip
    lines = f"{extracted.cut:,} line{'' if extracted.cut == 1 else 's'}"
    text = f"{options.output}: {extracted.lines:,} lines, {extracted.tokens:,} tokens, layers {extracted.layers}"
    text += f", pooled by {options.pool}" if options.pool else ""
    text += f"; truncated to {extracted.seq_len} tokens: {lines}" if extracted.cut else ""
    values = {
        "output": options.output, "lines": extracted.lines, "tokens": extracted.tokens, "layers": extracted.layers,
        "pool": options.pool, "seq_len": extracted.seq_len, "truncated_lines": extracted.cut,
    }  # fmt: skip
    print_result(options, values, text)


def run_export(options: argparse.Namespace) -> None:
    """Runs `bert-jax export`."""
    from bert_jax.inference.opening import open_model_of
    from bert_jax.interop import huggingface, stablehlo
    from bert_jax.interop.model_card import Publication

    publication = Publication(options.license, options.language, options.datasets)
    if options.steps and options.format == "hf":
        _export_steps(options, publication)
        return
    checkpoint = open_model_of(options.checkpoint)
    if options.format == "stablehlo":
        if publication != Publication():
            raise InputError("--license, --language and --datasets are those of a model card; use --format=hf")
        if options.steps:
            raise InputError(
                f"--steps={options.steps}: exports revisions for the Hub; use --format=hf, or export one "
                "WORKDIR/checkpoints/STEP as a program"
            )
        programs = stablehlo.export(checkpoint, options.output)
        values = {"output": options.output, "checkpoint": str(checkpoint.path), "programs": list(programs)}
        text = f"{options.output}: {checkpoint.path} as StableHLO, programs: {', '.join(programs)}"
        print_result(options, values, text)
        return
    architecture = huggingface.export(checkpoint, options.output, publication)
    values = {"output": options.output, "checkpoint": str(checkpoint.path), "architecture": architecture}
    text = f"{options.output}: {checkpoint.path} in Hugging Face format, as {architecture}"
    print_result(options, values, text)
    suggest(options)


def _export_steps(options: argparse.Namespace, publication: Any) -> None:
    from bert_jax.interop.huggingface import export_steps

    revisions = export_steps(options.checkpoint, options.output, options.steps, publication)
    values = {
        "output": options.output, "checkpoint": options.checkpoint, "steps": [vars(revision) for revision in revisions]
    }  # fmt: skip
    lines = [
        f"{revision.folder}: step {revision.step} in Hugging Face format, as {revision.architecture}"
        f"{'' if revision.is_new else ', written before'}"
        for revision in revisions
    ]
    print_result(options, values, "\n".join(lines))


def run_import(options: argparse.Namespace) -> None:
    """Runs `bert-jax import`."""
    from bert_jax.interop.importing import import_checkpoint

    checkpoint = import_checkpoint(
        options.source, options.output, lowercase=options.lowercase, layers=options.layers, drop=options.drop
    )
    heads = ", ".join(checkpoint.heads) or "none"
    task = None if checkpoint.task is None else checkpoint.task["name"]
    values = {
        "output": options.output, "vocab_size": checkpoint.tokenizer.vocab_size,
        "cased": not checkpoint.tokenizer.lowercase, "heads": list(checkpoint.heads), "task": task,
    }  # fmt: skip
    fine_tuned = "" if task is None else f", fine-tuned: {task}"
    print_result(options, values, f"{options.output}: {checkpoint.tokenizer}, heads: {heads}{fine_tuned}")
    suggest(options)
