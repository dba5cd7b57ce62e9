"""Measures preparation and loading on one core, beside a pipeline of `datasets`, `tokenizers` and `transformers`.

    python benchmarks/data_pipeline.py --input 'wiki/*.jsonl.gz' --vocab vocab.txt [--rounds 6]

The five sides run in turn in every round, each in its own process; figures are medians of CPU time over the rounds. The
peer's preparation is that of the `run_mlm` example: tokenize documents, join them, cut rows of 128; it makes no
sentences and no pairs. Its loading passes random batches of rows through DataCollatorForLanguageModeling.
"""

import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from glob import glob
from pathlib import Path

from processes import call
from record import Record, make_parser, spread

SEQ_LEN = 128
BATCH = 256
BATCHES = 400

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"


def tokenizer_alone(files: list[str], vocab: str, folder: Path) -> tuple[int, float]:
    """Runs `tokenizers`' BertNormalizer and WordPiece on sentences that are already split."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    from bert_jax.data.corpora import corpus
    from bert_jax.data.options import CorpusOptions
    from bert_jax.text import sentences

    pieces = {piece: number for number, piece in enumerate(Path(vocab).read_text().splitlines())}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    options = CorpusOptions()
    documents = (document for piece in corpus.plan(files, options) for document in corpus.read(piece, options))
    split = [sentence for document in documents for sentence in sentences.split(document)]
    start, tokens = time.process_time(), 0
    for first in range(0, len(split), 2048):
        encoded = tokenizer.encode_batch_fast(split[first : first + 2048], add_special_tokens=False)
        tokens += sum(len(encoding.ids) for encoding in encoded)
    return tokens, time.process_time() - start


def prepare(files: list[str], vocab: str, folder: Path) -> tuple[int, float]:
    from bert_jax.data.options import PrepareOptions
    from bert_jax.data.preparation.pipeline import prepare
    from bert_jax.text.conversion import convert_vocabulary

    shutil.rmtree(folder / "ours", ignore_errors=True)
    start = time.process_time()
    tokenizer = convert_vocabulary(vocab)
    info = prepare(files, tokenizer, str(folder / "ours"), PrepareOptions(seq_len=SEQ_LEN), workers=1)
    return sum(split.tokens for split in info.splits.values()), time.process_time() - start


def peer_prepare(files: list[str], vocab: str, folder: Path) -> tuple[int, float]:
    import datasets
    from transformers import BertTokenizerFast

    datasets.disable_progress_bars()
    shutil.rmtree(folder / "peer", ignore_errors=True)
    tokenizer = BertTokenizerFast(vocab=vocab)
    start = time.process_time()

    def tokenize(examples: dict) -> dict:
        return tokenizer(examples["text"], return_special_tokens_mask=True, return_token_type_ids=False)

    def group(examples: dict) -> dict:
        joined = {name: [token for row in rows for token in row] for name, rows in examples.items()}
        total = len(joined["input_ids"]) // SEQ_LEN * SEQ_LEN
        return {name: [row[i : i + SEQ_LEN] for i in range(0, total, SEQ_LEN)] for name, row in joined.items()}

    corpus = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(folder / "peer"))
    tokens = corpus.map(tokenize, batched=True, remove_columns=corpus.column_names)
    rows = tokens.map(group, batched=True)
    rows.save_to_disk(str(folder / "peer" / "rows"))
    return len(rows) * SEQ_LEN, time.process_time() - start


def load(files: list[str], vocab: str, folder: Path) -> tuple[int, float]:
    from bert_jax.data.dataset import PreparedDataset
    from bert_jax.data.loading.loader import TrainLoader, TrainRows
    from bert_jax.data.loading.masking import Masking

    rows = TrainRows(PreparedDataset(str(folder / "ours")), seed=0, masking=Masking(20))
    loader = TrainLoader([rows], seed=0, global_batch_size=BATCH)
    loader.batch(0)
    start = time.process_time()
    for step in range(BATCHES):
        loader.batch(step)
    return BATCHES * BATCH, time.process_time() - start


def peer_load(files: list[str], vocab: str, folder: Path) -> tuple[int, float]:
    import datasets
    import torch
    from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

    torch.set_num_threads(1)
    rows = datasets.load_from_disk(str(folder / "peer" / "rows")).with_format("torch")
    collate = DataCollatorForLanguageModeling(BertTokenizerFast(vocab=vocab))
    loader = torch.utils.data.DataLoader(rows, BATCH, shuffle=True, collate_fn=collate, drop_last=True)
    batches = iter(loader)
    next(batches)
    count, start = 0, time.process_time()
    for batch in batches:
        count += len(batch["input_ids"])
        if count >= BATCHES * BATCH // 8:
            break
    return count, time.process_time() - start


SIDES: dict[str, tuple[Callable, str]] = {
    "tokenizer_alone": (tokenizer_alone, "tokens per second: Rust tokenizer alone, on split sentences"),
    "prepare": (prepare, "tokens per second: bert-jax prepare, raw text to a finished dataset"),
    "peer_prepare": (peer_prepare, "tokens per second: datasets + tokenizers, raw text to rows"),
    "load": (load, "examples per second: bert-jax, masked batches"),
    "peer_load": (peer_load, "examples per second: DataLoader + DataCollatorForLanguageModeling"),
}

MEASURES = ("bert_jax/data", "bert_jax/text")
COLUMNS = {
    "quantity": "{quantity}",
    "per second, on one core": "{per_second:,.0f}",
    "minimum and maximum": "{per_second_min:,.0f}-{per_second_max:,.0f}",
    "peak memory": "{peak_mb:,.0f} MB",
}


def run_side(side: str, files: list[str], vocab: str, folder: str) -> tuple[float, float]:
    """Returns the rate of a side, per second of CPU time, and the peak memory of this process in MB."""
    count, seconds = SIDES[side][0](files, vocab, Path(folder))
    return count / seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = make_parser(__doc__, "data_pipeline")
    parser.add_argument("--input", required=True)
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    record = Record(options.json, MEASURES, packages=("tokenizers", "datasets", "transformers", "torch"))
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    peaks: dict[str, float] = dict.fromkeys(SIDES, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for side in SIDES:
                rate, peak = call(run_side, side, sorted(glob(options.input)), options.vocab, folder)
                rates[side].append(rate)
                peaks[side] = max(peaks[side], peak)
                print(f"round {number + 1}: {side} {rate:,.0f}", file=sys.stderr, flush=True)
    rows = [
        {"quantity": text, "per_second": statistics.median(rates[side]), "peak_mb": peaks[side]}
        | spread("per_second", rates[side])
        for side, (_, text) in SIDES.items()
    ]  # fmt: skip
    record.set_table("rates", COLUMNS, rows)
    print(record.render("rates"))
    for ours, peer in (("prepare", "peer_prepare"), ("load", "peer_load")):
        ratio = statistics.median(one / other for one, other in zip(rates[ours], rates[peer], strict=True))
        record.set_values(**{f"{ours}_times_the_peer": ratio})
        print(f"\n{ours}: {ratio:.2f} times the peer")


if __name__ == "__main__":
    main()
