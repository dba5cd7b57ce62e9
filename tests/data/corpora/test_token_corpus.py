"""Documents that are already tokenized, as lists of ids in Parquet and Arrow."""

import json

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from support import helpers
from support.preparing import files, run

from bert_jax.data.corpora import corpus
from bert_jax.errors import InputError
from bert_jax.text.sentences import lines

DOCUMENTS = helpers.make_corpus(documents=60).strip().split("\n\n")


def tokenized(tokenizer):
    return [[ids for line in lines(text) if (ids := tokenizer.encode_batch([line])[0])] for text in DOCUMENTS]


def write(path, rows, kind=None):
    table = pa.table({"id": list(range(len(rows))), "input_ids": pa.array(rows, kind)})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=7)
    else:
        pyarrow.feather.write_feather(table, path)
    return path


def counts(folder):
    splits = json.loads((folder / "dataset.json").read_text())["splits"].values()
    return {name: sum(split[name] for split in splits) for name in ("documents", "sentences", "tokens")}


@pytest.mark.parametrize("pairs", ["nsp", "none"])
def test_sentences_of_ids_make_as_many_as_their_text(pairs, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(DOCUMENTS))
    path = write(tmp_path / "a.parquet", tokenized(tokenizer))
    for name, source, options in (("text", tmp_path / "a.txt", {}), ("ids", path, {"ids_field": "input_ids"})):
        run(source, tokenizer, tmp_path / name, pairs=pairs, **options)
    assert counts(tmp_path / "text") == counts(tmp_path / "ids")


def test_formats_workers_and_slices_do_not_matter(tokenizer, tmp_path, monkeypatch):
    rows = tokenized(tokenizer)
    run(write(tmp_path / "a.arrow", rows), tokenizer, tmp_path / "data", ids_field="input_ids")
    plan = corpus.plan
    monkeypatch.setattr(corpus, "plan", lambda inputs, options, **_: plan(inputs, options, 100))
    monkeypatch.setattr(corpus, "SLICE_BYTES", 100)
    path = write(tmp_path / "a.parquet", rows, pa.large_list(pa.list_(pa.uint16())))
    for workers in (1, 2):
        run(path, tokenizer, tmp_path / str(workers), workers=workers, ids_field="input_ids")
        assert files(tmp_path / str(workers)) == files(tmp_path / "data")
    assert "ids_field" not in json.loads((tmp_path / "data" / "dataset.json").read_text())["options"]


def test_a_list_of_ids_is_a_document(tokenizer, tmp_path):
    rows = [[token for sentence in document for token in sentence] for document in tokenized(tokenizer)]
    path = write(tmp_path / "a.parquet", [*rows, None, []])
    run(path, tokenizer, tmp_path / "data", pairs="none", ids_field="input_ids")
    assert counts(tmp_path / "data") == {"documents": 60, "sentences": 60, "tokens": sum(map(len, rows))}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([[7, 8], [9, 10_000]], "row 10: .*10000.*vocab"),
        ([[7], [-1, 8]], "row 10: .*-1"),
        ([[7, None]], "row 10: .*None"),
        ([["CLS", 7]], "row 10: .*special token"),
    ],
)
def test_ids_that_no_text_has_are_named_by_their_row(row, words, tokenizer, tmp_path):
    row = [[tokenizer.cls_id if token == "CLS" else token for token in sentence] for sentence in row]
    path = write(tmp_path / "a.parquet", [*[[[7, 8], [9]]] * 8, None, row, [[7]]])
    with pytest.raises(InputError, match=rf"a\.parquet: {words}"):
        run(path, tokenizer, tmp_path / "data", ids_field="input_ids", allow_unk=1)


@pytest.mark.parametrize(
    ("name", "rows", "field", "words"),
    [
        ("a.parquet", [[1.5]], "input_ids", "list<.*double>.*list<int32>"),
        ("a.parquet", ["text"], "input_ids", "string.*list<int32>"),
        ("a.parquet", [[7]], "input_idz", "input_ids.*--ids_field"),
        ("a.jsonl", None, "input_ids", "Parquet or Arrow"),
    ],
)
def test_what_has_no_ids_is_refused(name, rows, field, words, tokenizer, tmp_path):
    path = tmp_path / name
    if rows is None:
        path.write_text('{"input_ids": [7]}')
    else:
        write(path, rows)
    with pytest.raises(InputError, match=rf"{name}.*{words}"):
        run(path, tokenizer, tmp_path / "data", ids_field=field)
