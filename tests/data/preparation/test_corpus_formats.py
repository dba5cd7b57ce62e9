"""The same documents in any format give the same dataset, for any number of workers, slices and on Beam."""

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import helpers
from support.preparing import files, run

from bert_jax.data.corpora import corpus

DOCUMENTS = helpers.make_corpus(documents=300).strip().split("\n\n")  # those of `whole`
OPTIONS = {"bucket_tokens": 4096, "dupe_factor": 2, "tsv_quotes": True}


def write_parquet(folder, rows=20):
    pq.write_table(table(DOCUMENTS[:200]), folder / "train-0.parquet", row_group_size=rows)
    pq.write_table(table(DOCUMENTS[200:]), folder / "train-1.parquet")
    (folder / "README.md").write_text("---\nlicense: mit\n---\nThe card.\n")


def write_arrow(folder):
    batches = table(DOCUMENTS).to_batches(max_chunksize=20)
    with pa.ipc.new_file(folder / "a.arrow", batches[0].schema) as file:
        for batch in batches[:8]:
            file.write(batch)
    with pa.ipc.new_stream(folder / "b.arrow", batches[0].schema) as stream:
        for batch in batches[8:]:
            stream.write(batch)


def write_tables(folder):
    with open(folder / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(DOCUMENTS[:150])])
    with gzip.open(folder / "b.tsv.gz", "wt", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([("text", "id"), *((text, 0) for text in DOCUMENTS[150:])])


def write_mixture(folder):
    pq.write_table(table(DOCUMENTS[:100]), folder / "a.parquet", row_group_size=20)
    lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in DOCUMENTS[100:200])
    (folder / "b.jsonl").write_text(lines)
    with open(folder / "c.csv", "w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(DOCUMENTS[200:250])])
    (folder / "d.txt").write_text("\n\n".join(DOCUMENTS[250:]))


def table(documents):
    return pa.table({"id": [str(number) for number in range(len(documents))], "text": documents})


WRITERS = {"parquet": write_parquet, "arrow": write_arrow, "tables": write_tables, "mixture": write_mixture}


def write_corpus(form, tmp_path):
    (tmp_path / "corpus").mkdir()
    WRITERS[form](tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.mark.parametrize(
    ("form", "workers", "slice_bytes"),
    [
        *((form, 1, 1500) for form in WRITERS),
        ("mixture", 3, 5000),
        *(pytest.param(form, 3, 5000, marks=pytest.mark.long) for form in WRITERS if form != "mixture"),
    ],
)
def test_formats_workers_and_slices_do_not_matter(whole, form, tokenizer, tmp_path, workers, slice_bytes, monkeypatch):
    folder = write_corpus(form, tmp_path)
    plan = corpus.plan
    monkeypatch.setattr(corpus, "plan", lambda inputs, options, **_: plan(inputs, options, slice_bytes))
    monkeypatch.setattr(corpus, "SLICE_BYTES", slice_bytes)
    run(folder, tokenizer, tmp_path / "data", workers=workers, **OPTIONS)
    assert files(tmp_path / "data") == files(whole)
