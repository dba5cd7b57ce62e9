"""`vocab`, `prepare` and `inspect`: from text to a prepared dataset, and the batches of a run."""

import logging
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bert_jax.command_line.arguments import PATH, File, Folder, command
from bert_jax.commands import Result
from bert_jax.config_keys import NotNegative, Positive
from bert_jax.data.options import CorpusOptions, PrepareOptions
from bert_jax.errors import InputError
from bert_jax.progress import Bars, available_cores, silent
from bert_jax.text.vocabulary_options import VocabularyOptions

if TYPE_CHECKING:
    from bert_jax.data.corpora.corpus import Slice
    from bert_jax.data.dataset import DatasetInfo

log = logging.getLogger(__name__)

Inputs = Sequence[Annotated[str, "GLOB", PATH]]
_POSITIONS = 512  # of bert_tiny


@command
def vocab(
    output: File, *, input: Inputs = (), from_: File | None = None, reading: CorpusOptions | None = None,
    training: VocabularyOptions | None = None, bars: Bars = silent,
) -> Result:  # fmt: skip
    """Trains a vocabulary: WordPiece, Unigram, BPE or byte-level BPE; or converts one.

    Reads: text, JSON lines, CSV, Parquet, Arrow, TFDS datasets, or stdin
    Writes: FILE, a tokenizer.json

    Args:
      output: a new tokenizer.json: the vocabulary and the rules for text
      input: files, folders or patterns: text (a blank line between documents), JSON lines, CSV, TSV, also .gz, .bz2,
        .xz, .zst; Parquet, Arrow; `hf://datasets/NAME/...` and other stores; `-` is stdin;
        `tfds:NAME[:SPLIT[:FEATURE]]` is a TFDS dataset
      from_: instead of --input: convert a vocab.txt, or a SentencePiece model (its name ends in .model)

    Examples:
      bert-jax vocab --input 'text/*.txt' --output tokenizer.json
      bert-jax vocab --input 'wiki/*.jsonl.gz' --output tokenizer.json --cased --size 28996
      bert-jax vocab --input reviews.csv --text_field body --output tokenizer.json --size 8192
      bert-jax vocab --input 'thai/*.txt' --output thai.json --kind unigram --size 32000
    """
    from bert_jax.files import atomic, remote
    from bert_jax.text.tokenizer import FILE

    reading, training = reading or CorpusOptions(), training or VocabularyOptions()
    if bool(input) == bool(from_):
        raise InputError(f"from={from_}: has no effect with --input" if from_ else "expected --input, or --from FILE")
    if from_:
        training.check_unused(("cased", "keep_accents"), f"with from={from_}; remove it")
        reading.check_unused((), f"with from={from_}; remove it")
    path = remote.parse_path(output)
    if path.suffix != ".json":
        raise InputError(f"output={output}: expected a name that ends in .json, such as {FILE}")
    atomic.check_file_output(output, is_new=True)
    if from_:
        from bert_jax.text.conversion import convert_vocabulary

        tokenizer = convert_vocabulary(from_, cased=training.cased, keep_accents=training.keep_accents)
    else:
        from bert_jax.data.corpora import corpus
        from bert_jax.data.corpora.corpus_inputs import spool
        from bert_jax.text.vocabulary_training import train_vocabulary

        with tempfile.TemporaryDirectory(prefix="bert-jax-vocab-") as folder, spool(input, Path(folder)) as paths:
            slices = corpus.plan(list(paths.values()), reading)
            corpus.warn_of_text(slices, reading, lowercase=not training.cased)
            tokenizer = train_vocabulary(_documents(slices, reading, bars), training)
    atomic.write_whole(path, tokenizer.file_bytes())
    found = {"pieces": tokenizer.vocab_size, "kind": tokenizer.kind, "cased": not tokenizer.lowercase}
    return Result({"output": output, **found})


def _documents(slices: Sequence["Slice"], reading: CorpusOptions, bars: Bars) -> Iterator[str]:
    """Yields the documents of a corpus, with a progress bar."""
    from bert_jax.data.corpora import corpus

    with bars(total=sum(piece.bytes for piece in slices), desc="read", unit="B", unit_scale=True) as bar:
        for piece in slices:
            yield from corpus.read(piece, reading)
            bar.update(piece.bytes)
    log.info("Corpus read; choosing the pieces ...")


@command
def prepare(
    input: Inputs, vocab: Annotated[str, "FILE|CHECKPOINT", PATH], output: Folder,
    options: PrepareOptions | None = None, *, workers: Positive | None = None, seed: int = 0, runner: str = "local",
    beam_options: Sequence[str] = (), bars: Bars = silent,
) -> Result:  # fmt: skip
    """Prepares a dataset from raw text.

    Reads: text, JSON lines, CSV, Parquet, Arrow, TFDS datasets, or stdin; and a tokenizer.json or a checkpoint
    Writes: DIR, a dataset for pretrain: dataset.json, tokenizer.json and shards

    Args:
      input: files, folders or patterns, as `vocab` reads them
      vocab: a tokenizer.json, or a folder with one: a dataset, an export or a model of transformers; or a checkpoint
      output: the dataset's folder, new or empty
      workers: processes of the local runner; default: the cores that it may use
      seed: seed of pairs, lengths and labels
      runner: local, or an Apache Beam runner: DirectRunner, DataflowRunner, FlinkRunner, SparkRunner, ...; its options
        follow `--` at the end of the command

    Examples:
      bert-jax prepare --input 'text/*.txt' --vocab tokenizer.json --output data
      bert-jax prepare --input 'wiki/*.jsonl.gz' --vocab tokenizer.json --output data512 --seq_len 512 --workers 8
      bert-jax prepare --input reviews.csv --text_field body --vocab tokenizer.json --output reviews
      bert-jax prepare --input hf://datasets/wikimedia/wikipedia/20231101.en --vocab tokenizer.json --output wiki
      bert-jax prepare --input 'domain/*.txt' --vocab imported --output data
    """
    from bert_jax.data import report
    from bert_jax.data.preparation import pipeline
    from bert_jax.text.tokenizer import read_tokenizer

    if vocab.endswith(".json"):
        tokenizer = read_tokenizer(vocab)
    else:
        from bert_jax.interop.importing import open_tokenizer  # which imports JAX

        tokenizer = open_tokenizer(vocab)
    info = pipeline.prepare(
        input, tokenizer, output, options or PrepareOptions(), seed=seed, runner=runner,
        workers=available_cores() if workers is None else workers, beam_options=beam_options, bars=bars,
    )  # fmt: skip
    counts = report.describe(info)
    return Result({"output": output, **counts}, "\n".join([*report.render(counts), *_next(output, info)]))


@command
def inspect(
    data: Folder | None = None, /, *, workdir: Folder | None = None, step: int | None = None, samples: NotNegative = 3,
    seed: int = 0,
) -> Result:  # fmt: skip
    """Shows counts, lengths, padding and instances of a prepared dataset, or the batch of a step of a run.

    Reads: a prepared dataset; or a workdir and its datasets
    Writes: nothing

    Args:
      data: a prepared dataset
      workdir: a workdir of pretrain, in place of a dataset: shows the batch that --step trains on, and its losses by
        the newest checkpoint before that step
      step: the step of the workdir's run, from 1
      samples: instances to show; of a step, those with the highest loss
      seed: seed of the sampled instances of a dataset and their masks

    Examples:
      bert-jax inspect data
      bert-jax inspect data --samples 10 --json
      bert-jax inspect --workdir=runs/base --step=4
    """
    if (workdir is None) != (step is None) or (workdir is None) == (data is None):
        raise InputError("expected either a dataset, or --workdir with --step")
    if workdir is not None and step is not None:
        from bert_jax.training.inspection import inspect_step, render_step

        report = inspect_step(workdir, step, samples=samples)
        return Result(report, "\n".join(render_step(report)))
    from bert_jax.data.report import inspect_dataset, render

    report = inspect_dataset(str(data), samples=samples, seed=seed)
    return Result(report, "\n".join(render(report)))


def _next(data: str, info: "DatasetInfo") -> list[str]:
    """Returns the command that pre-trains on a dataset; none for a path that the key with several cannot name."""
    if "," in data or data != data.strip():
        return []
    command = f"bert-jax pretrain --config=bert_tiny --workdir=runs/tiny --config.data.path={shlex.quote(data)}"
    command += " --config.objective.nsp=False" if info.options.get("pairs") == "none" else ""
    longer = f" --config.model.max_position_embeddings={info.seq_len}"
    return ["", f"Next: {command}{longer if info.seq_len > _POSITIONS else ''}"]
