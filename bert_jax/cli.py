"""The `bert-jax` command: parses options, calls one function per subcommand, maps failures to exit statuses.

0   success
1   the run failed
2   invalid input that the user can fix; one line on stderr says how
75  stopped and saved; the same command resumes the run
"""

import argparse
import dataclasses
import errno
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_jax import config_listing
from bert_jax.command_line.arguments import completion, make_options
from bert_jax.command_line.arguments import parse as parse_arguments
from bert_jax.command_line.console import bars, set_up_logging
from bert_jax.command_line.next_steps import NEXT_STEPS
from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.data.preparation.options import PrepareOptions
from bert_jax.errors import BertJaxError, InputError
from bert_jax.files.local_listing import similar_name
from bert_jax.files.remote import RetryWarnings
from bert_jax.progress import Bars, silent
from bert_jax.runtime.background_errors import show_background_errors
from bert_jax.runtime.malloc import tune_malloc

if TYPE_CHECKING:
    from bert_jax.text.tokenizer import Tokenizer
    from bert_jax.text.vocabulary_options import ExtensionOptions, VocabularyOptions

_PATH_ERRORS = {  # errno of a bad path given by the user
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EROFS,
}  # fmt: skip

log = logging.getLogger(__name__)

_COMPUTING = {"pretrain", "evaluate", "finetune", "predict", "study"}
_IMPORTS_JAX = _COMPUTING | {"fill-mask", "features", "export", "import", "compile"}

# Each subcommand imports what it needs: `bert-jax prepare` does not wait for JAX.


def entry_point() -> int:
    """Runs `main` as the program and returns its exit status."""
    show_background_errors()
    if sys.argv[1:2] and sys.argv[1] in _COMPUTING:
        tune_malloc()
    status = main()
    if status and "bert_jax.runtime.processes" in sys.modules:
        from bert_jax.runtime.processes import ends_alone

        if ends_alone():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    set_up_logging(quiet=options.quiet)
    RetryWarnings.attach()
    if options.command in _IMPORTS_JAX and "jax" not in sys.modules:
        log.info("Importing JAX")
    try:
        options.run(options)
        return 0
    except BertJaxError as error:
        return _fail(options.command, f"{error}{_similar_name(error.__cause__)}", error.exit_status)
    except KeyboardInterrupt:
        return _fail(options.command, "interrupted", 130)
    except Exception as error:
        if _is_disk_full(error):
            where = getattr(error, "filename", None)
            return _fail(
                options.command, f"the disk is full{f' ({where})' if where else ''}; free space and run it again", 2
            )
        if isinstance(error, BrokenPipeError):  # the reader of the pipe, such as `head`, has exited
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        if isinstance(error, OSError) and error.errno in _PATH_ERRORS:
            return _fail(options.command, f"{error.filename or error}: {error.strerror}{_similar_name(error)}", 2)
        if (failure := _storage_failure(error)) is not None:
            return _fail(options.command, *failure)
        traceback.print_exc()
        return 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a subcommand, as `arguments.parse` does."""
    return parse_arguments(arguments, _RUN)


def _similar_name(error: BaseException | None) -> str:
    """Returns a hint with the path that is most similar to the one that was not found."""
    return similar_name(error.filename) if isinstance(error, FileNotFoundError) and error.filename else ""


def _fail(command: str, message: str, status: int) -> int:
    print(f"bert-jax {command}: {' '.join(message.split())}", file=sys.stderr)
    return status


def _print_result(options: argparse.Namespace, values: Mapping[str, Any], text: str) -> None:
    """Prints a result on stdout, as one JSON object with `--json`."""
    print(json.dumps(values, indent=2, ensure_ascii=False) if options.json else text)


def _suggest(options: argparse.Namespace, name: str = "") -> None:
    """Logs the commands that usually follow, unless programs read the output."""
    if not options.json:
        for command in NEXT_STEPS[name or options.command](options):
            log.info("Next: %s", command)


def _storage_failure(error: Exception) -> tuple[str, int] | None:
    """Maps a storage error raised inside a library to a message and an exit status; None for any other error."""
    from bert_jax.files import remote

    found: BaseException | None = error
    while found is not None:
        if not getattr(found, "errno", None):
            if (reason := remote.permanent_reason(found)) is not None:
                return f"{reason} ({remote.describe_error(found)})", 2
            if remote.is_transient(found):
                return f"the storage kept failing ({remote.describe_error(found)}); run it again", 1
        found = found.__cause__ or found.__context__
    return None


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(error):  # as TensorStore and ArrayRecord say it
            return True
        error = error.__cause__ or error.__context__
    return False


# --- Subcommands -------------------------------------------------------------------------------------------------


def _vocab(options: argparse.Namespace) -> None:
    from bert_jax.files import atomic, remote
    from bert_jax.text.vocabulary_options import ExtensionOptions, VocabularyOptions, check_extension
    from bert_jax.text.vocabulary_record import check_free

    training, extension = make_options(VocabularyOptions, options), make_options(ExtensionOptions, options)
    check_extension(options.extend, training, extension)
    check_free(options.output)
    atomic.make_folder(remote.parse_path(options.output).parent)
    if options.extend:
        values, text = _extend_vocabulary(options, extension)
    else:
        values, text = _train_vocabulary(options, training)
    _print_result(options, values, text)
    _suggest(options)


def _train_vocabulary(options: argparse.Namespace, training: "VocabularyOptions") -> tuple[dict[str, Any], str]:
    from bert_jax.text.vocabulary_record import save_vocabulary
    from bert_jax.text.vocabulary_training import train_vocabulary

    with _documents(options) as documents:
        tokenizer = train_vocabulary(documents, training)
    save_vocabulary(options.output, tokenizer)
    values = {
        "output": options.output, "pieces": tokenizer.vocab_size, "kind": training.kind, "cased": training.cased,
    }  # fmt: skip
    return values, f"{options.output}: {tokenizer.vocab_size:,} pieces"


def _extend_vocabulary(options: argparse.Namespace, extension: "ExtensionOptions") -> tuple[dict[str, Any], str]:
    from bert_jax.text.vocabulary_extension import check_wordpiece, extend_by_documents
    from bert_jax.text.vocabulary_record import save_vocabulary

    old = check_wordpiece(_open_tokenizer(options.extend, options), f"--extend={options.extend}")
    with _documents(options) as documents:
        extended = extend_by_documents(
            documents, old, number=extension.add, min_count=extension.min_count,
            replace_unused=extension.replace_unused,
        )  # fmt: skip
    save_vocabulary(options.output, extended.tokenizer, extends=old)
    pieces, words = extended.tokenizer.vocab_size, extended.words
    values = {
        "output": options.output, "pieces": pieces, "kind": old.kind, "cased": not old.lowercase,
        "extends": options.extend, "added": len(words), "replaced_unused": old.vocab_size + len(words) - pieces,
        "tokens_before": extended.tokens_before, "tokens_after": extended.tokens_after,
    }  # fmt: skip
    text = (
        f"{options.output}: {pieces:,} pieces, {len(words):,} of them new, such as {', '.join(words[:5])}; "
        f"{extended.tokens_after:,} tokens in the input instead of {extended.tokens_before:,}"
    )
    return values, text


@contextmanager
def _documents(options: argparse.Namespace) -> Iterator[Iterator[str]]:
    """Gives the documents of `--input`, read with a progress bar. Raises InputError at once for a missing file."""
    from bert_jax.data.corpora import corpus
    from bert_jax.data.corpora.standard_input import spooled

    reading = make_options(CorpusOptions, options)
    with (
        tempfile.TemporaryDirectory(prefix="bert-jax-vocab-") as folder,
        spooled(options.input, Path(folder), reading.text_field) as (inputs, _),
    ):
        yield _read_documents(corpus.plan(inputs, reading), reading, bars(quiet=options.quiet))


def _open_tokenizer(location: str, options: argparse.Namespace) -> "Tokenizer":
    """Opens the tokenizer of a vocabulary's file; or, after the import of JAX, that of a folder."""
    from bert_jax.files import remote
    from bert_jax.text.vocabulary_record import open_vocabulary

    given = {name: getattr(options, name) for name in ("cased", "keep_accents", "pretokenized")}
    if not remote.parse_path(location).is_dir():
        return open_vocabulary(location, **given)
    log.info("Importing JAX")
    from bert_jax.interop.importing import open_tokenizer

    return open_tokenizer(location, **given)


def _read_documents(slices: Sequence[Any], reading: CorpusOptions, progress: Bars) -> Iterator[str]:
    """Yields the documents of a corpus, with a progress bar."""
    from bert_jax.data.corpora import corpus

    with closing(progress(total=sum(piece.bytes for piece in slices), desc="read", unit="B", unit_scale=True)) as bar:
        for piece in slices:
            yield from corpus.read(piece, reading)
            bar.update(piece.bytes)
    log.info("Corpus read; choosing the pieces ...")


def _prepare(options: argparse.Namespace) -> None:
    from bert_jax.data.preparation.pipeline import describe, prepare

    prepare_options = make_options(PrepareOptions, options)
    tokenizer = _open_tokenizer(options.vocab, options)
    info = prepare(
        options.input, tokenizer, options.output, prepare_options,
        seed=options.seed, workers=options.workers, scratch=options.scratch, runner=options.runner,
        beam_options=options.beam_options, allow_unk=options.allow_unk,
        bars=bars(quiet=options.quiet),
    )  # fmt: skip
    print(json.dumps({"output": options.output, **describe(info)}, indent=2))
    _suggest(options)


def _inspect(options: argparse.Namespace) -> None:
    from bert_jax.data.inspection import inspect_dataset, render

    report = inspect_dataset(options.data, samples=options.samples, seed=options.seed)
    _print_result(options, report, "" if options.json else render(report))
    _suggest(options)


def _pretrain(options: argparse.Namespace) -> None:
    if options.dry_run:
        _dry_run(options)
        return
    from bert_jax.runtime.preemption import StopSignal

    with StopSignal() as stop:  # before the imports, which take seconds: a signal during them stops the run
        from bert_jax.config import load_config
        from bert_jax.runtime.processes import is_first, joined_processes
        from bert_jax.tracking.metrics import finite_json
        from bert_jax.training.pretrain import pretrain

        with joined_processes():
            progress = bars(quiet=options.quiet) if is_first() else silent
            config = load_config(options.config, options.overrides)
            scores = pretrain(config, options.workdir, stop=stop, bars=progress)
            if is_first() and options.json:
                print(finite_json({"workdir": options.workdir, "step": config.total_steps, "eval": scores}, indent=2))


def _dry_run(options: argparse.Namespace) -> None:
    from bert_jax.ahead_of_time.dry_run import plan_run
    from bert_jax.ahead_of_time.dry_run_text import render_plan
    from bert_jax.config import load_config
    from bert_jax.tracking.metrics import finite_json

    kind = config_listing.keys_of("pretrain")
    plan = plan_run(
        load_config(options.config, options.overrides, keys_of=kind), load_config(kind),
        workdir=options.workdir, device=options.device, devices=options.devices, mfu=options.mfu,
    )  # fmt: skip
    print(finite_json(plan, indent=2) if options.json else render_plan(plan))
    _suggest(options, "dry_run")


def _finetune(options: argparse.Namespace) -> None:
    from bert_jax.runtime.preemption import StopSignal

    with StopSignal() as stop:
        from bert_jax.config import load_config
        from bert_jax.finetuning.finetune import finetune
        from bert_jax.finetuning.results import unscored
        from bert_jax.finetuning.search import is_search, search
        from bert_jax.runtime.processes import is_first, joined_processes
        from bert_jax.tracking.metrics import finite_json

        with joined_processes():
            progress = bars(quiet=options.quiet) if is_first() else silent
            strict = [("data.strict", "True")] if options.strict else []
            config = load_config(options.config, [*options.overrides, *strict], keys_of="finetune/default")
            run = search if is_search(config) else finetune
            scores = run(config, options.workdir, stop=stop, bars=progress)
            if is_first():
                print(finite_json(scores or unscored(options.workdir), indent=2))


def _study(options: argparse.Namespace) -> None:
    from bert_jax.runtime.preemption import StopSignal

    with StopSignal() as stop:
        from bert_jax.runtime.processes import is_first, joined_processes
        from bert_jax.studies.study import load_study, study
        from bert_jax.studies.study_table import render

        with joined_processes():
            progress = bars(quiet=options.quiet) if is_first() else silent
            table = study(load_study(options.config, options.overrides), options.workdir, stop=stop, bars=progress)
            if is_first():
                _print_result(options, table.as_json(), render(table).rstrip("\n"))


def _predict(options: argparse.Namespace) -> None:
    from bert_jax.finetuning.fine_tuned import predict
    from bert_jax.inference.opening import open_model_of

    count = predict(
        open_model_of(options.checkpoint), options.input, options.output,
        texts=options.text, with_text=options.with_text, strict=options.strict, batch_size=options.batch_size,
        bars=bars(quiet=options.quiet),
    )  # fmt: skip
    values = {"output": options.output, "predictions": count}
    _print_result(options, values, f"{options.output}: {count:,} predictions")
    _suggest(options)


def _evaluate(options: argparse.Namespace) -> None:
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
            _suggest(options)


def _fill_mask(options: argparse.Namespace) -> None:
    from bert_jax.inference.pretrained import check_mask, fill_mask, load

    for text in options.text:
        check_mask(text)
    pretrained = load(options.checkpoint)
    if options.json:
        found = [{"text": text, "masks": fill_mask(pretrained, text, options.top)} for text in options.text]
        print(json.dumps({"texts": found}, indent=2, ensure_ascii=False, default=dataclasses.asdict))
        return
    for text in options.text:
        for fillings in fill_mask(pretrained, text, options.top):
            for filling in fillings:
                print(f"{filling.probability:.4f}  {filling.token:<16}  {filling.text}")
            print()


def _features(options: argparse.Namespace) -> None:
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
    _print_result(options, values, text)


def _export(options: argparse.Namespace) -> None:
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
        _print_result(options, values, text)
        return
    architecture = huggingface.export(checkpoint, options.output, publication)
    values = {"output": options.output, "checkpoint": str(checkpoint.path), "architecture": architecture}
    text = f"{options.output}: {checkpoint.path} in Hugging Face format, as {architecture}"
    _print_result(options, values, text)
    _suggest(options)


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
    _print_result(options, values, "\n".join(lines))


def _import(options: argparse.Namespace) -> None:
    from bert_jax.interop.importing import import_checkpoint

    checkpoint = import_checkpoint(options.source, options.output, lowercase=options.lowercase)
    heads = ", ".join(checkpoint.heads) or "none"
    task = None if checkpoint.task is None else checkpoint.task["name"]
    values = {
        "output": options.output, "vocab_size": checkpoint.tokenizer.vocab_size,
        "cased": not checkpoint.tokenizer.lowercase, "heads": list(checkpoint.heads), "task": task,
    }  # fmt: skip
    fine_tuned = "" if task is None else f", fine-tuned: {task}"
    _print_result(options, values, f"{options.output}: {checkpoint.tokenizer}, heads: {heads}{fine_tuned}")
    _suggest(options)


def _compile(options: argparse.Namespace) -> None:
    from bert_jax.ahead_of_time.command import compile_config
    from bert_jax.ahead_of_time.table import render
    from bert_jax.config import load_config

    described, problems = compile_config(
        load_config(options.config, options.overrides), options.topology,
        slices=options.num_slices, phase=options.phase, largest_batch=options.find_batch, advice=options.advice,
        show=lambda description: None if options.json else print(render(description), end="\n\n", flush=True),
    )  # fmt: skip
    if options.json:
        print(json.dumps(described, indent=2))
    if problems:
        raise InputError("; ".join(problems))
    _suggest(options)


def _report(options: argparse.Namespace) -> None:
    from bert_jax.tracking.report.report_page import write_report

    write_report(options.workdir, options.output)
    _print_result(options, {"output": options.output, "workdirs": options.workdir}, options.output)


def _configs(options: argparse.Namespace) -> None:
    if options.config is None:
        found = config_listing.summaries()
        width = max(map(len, found))
        _print_result(options, found, "\n".join(f"{name:<{width}}  {text}" for name, text in found.items()))
        return
    from bert_jax.config import flatten, load_config

    kind = config_listing.kind_of(options.config)
    config = load_config(options.config, options.overrides, keys_of=config_listing.keys_of(kind))
    comments, values = config_listing.key_comments(kind), dict(flatten(config))
    if options.json:
        keys = {key: {"value": value, "comment": comments.get(key, "")} for key, value in values.items()}
        print(json.dumps({"config": options.config, "keys": keys}, indent=2, ensure_ascii=False, default=vars))
        return
    lines = [
        f"{key} = {value!r}" + (f"  # {comments[key]}" if key in comments else "") for key, value in values.items()
    ]
    print("\n".join([*config_listing.docstring(options.config).split("\n"), "", *lines]))


def _completion(options: argparse.Namespace) -> None:
    print(completion(options.shell))


_RUN = {
    "vocab": _vocab, "prepare": _prepare, "inspect": _inspect, "pretrain": _pretrain, "evaluate": _evaluate,
    "finetune": _finetune, "predict": _predict, "study": _study, "fill-mask": _fill_mask, "features": _features,
    "export": _export, "import": _import, "compile": _compile, "report": _report, "configs": _configs,
    "completion": _completion,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(entry_point())
