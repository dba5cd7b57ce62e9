"""Parquet and Arrow files as a corpus."""

import json
import random

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from support import helpers
from support.preparing import files, run
from support.reading import documents

from bert_jax.data.corpora import corpus
from bert_jax.data.corpora.corpus import CorpusOptions, Slice, plan, read
from bert_jax.errors import InputError
from bert_jax.files import tables
from bert_jax.text.sentences import lines

TEXTS = [f"Document {number}.\n{'It has words. ' * (number % 7)}" for number in range(100)]


def table(texts, **columns):
    return pa.table({"id": list(range(len(texts))), "text": texts, **columns})


def write(folder, kind, texts, rows=1000):
    path = folder / f"a.{kind}"
    batches = table(texts).to_batches(max_chunksize=rows)
    if kind == "parquet":
        pq.write_table(table(texts), path, row_group_size=rows)
    elif kind == "stream":
        path = folder / "data-00000-of-00001.arrow"
        with pa.ipc.new_stream(path, batches[0].schema) as stream:
            for batch in batches:
                stream.write(batch)
    else:
        with pa.ipc.new_file(path, batches[0].schema) as file:
            for batch in batches:
                file.write(batch)
    return path


KINDS = ["parquet", "arrow", "stream"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_documents_whatever_the_slices(kind, tmp_path):
    expected = [text.strip() for text in TEXTS]
    path = write(tmp_path, kind, TEXTS, rows=8)
    size = path.stat().st_size
    for slice_bytes in (1, size // 3, size):
        assert documents(path, slice_bytes) == expected
    counts = [len(plan([str(path)], CorpusOptions(), slice_bytes)) for slice_bytes in (1, size // 3, size)]
    assert counts == ([13, 3, 1] if kind == "parquet" else [1, 1, 1])


def test_memory_holds_no_row_group(tmp_path):
    random_bytes = random.Random(0).randbytes
    texts = [random_bytes(2000).hex() for _ in range(8000)]  # 32 MB
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=10**9, compression="none", use_dictionary=False)
    del texts
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in read(Slice(str(path), 0, None, 0), CorpusOptions())]
    assert len(held) == 8000
    assert pq.ParquetFile(path).num_row_groups == 1
    assert path.stat().st_size > 30 << 20
    assert max(held) < 14 << 20


TYPES = {
    "large_string": pa.array(["a", "é"], pa.large_string()),
    "binary": pa.array([b"a", "é".encode()]),
    "dictionary": pa.array(["a", "é"]).dictionary_encode(),
    "null first": pa.array([None, "a", None, " ", "é"]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("found", list(TYPES))
def test_types_of_text(kind, found, tmp_path):
    assert documents(write(tmp_path, kind, TYPES[found])) == ["a", "é"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_without_text_gives_no_documents(kind, tmp_path):
    assert documents(write(tmp_path, kind, pa.array([None, None]))) == []
    if kind == "parquet":
        assert documents(write(tmp_path, kind, pa.array([], pa.string()))) == []
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet", row_group_size=1)
        assert documents(tmp_path / "none.parquet", slice_bytes=1) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("texts", "found"), [([["a"], ["b"]], "list"), ([1, 2], "int64")])
def test_a_column_of_another_type_is_refused(kind, texts, found, tmp_path):
    path = write(tmp_path, kind, texts)
    with pytest.raises(InputError, match=rf'{path.name}: .*"text".*{found}.*--text_field'):
        documents(path)


def test_bytes_that_are_no_text_are_named_by_their_row(tmp_path):
    path = write(tmp_path, "parquet", [b"caf\xe9"] * 9 + [b"a"], rows=4)
    path = write(tmp_path, "parquet", [b"a"] * 9 + [b"caf\xe9"], rows=4)
    for slice_bytes in (1, 1 << 30):
        with pytest.raises(InputError, match=r"a\.parquet: row 10: .*byte 0xe9.*--errors replace"):
            documents(path, slice_bytes)
    assert documents(path, errors="replace")[-1] == "caf\ufffd"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["truncated", "half", "empty", "text"])
def test_a_damaged_file_is_named(kind, fault, tmp_path):
    path = write(tmp_path, kind, TEXTS, rows=8)
    content = path.read_bytes()
    changed = {"truncated": content[:-9], "half": content[: len(content) // 2], "empty": b"", "text": b"some text\n"}
    path.write_bytes(changed[fault])
    with pytest.raises(InputError, match=rf"{path.name}: cannot be read"):
        documents(path)
    with pytest.raises(InputError, match=rf"{path.name}: cannot be read"):
        documents(path, slice_bytes=1)


@pytest.mark.parametrize("kind", KINDS)
def test_text_field_selects_a_column_or_a_field_of_a_struct(kind, tmp_path):
    texts = pa.array([{"body": "a", "n": 1}, None, {"body": None, "n": 2}, {"body": "b", "n": 3}])
    path = write(tmp_path, kind, texts)
    assert documents(path, text_field="text.body") == ["a", "b"]
    for field in ("text.boddy", "body"):
        with pytest.raises(InputError, match=rf'{path.name}: .*"{field}".*id, text.*--text_field'):
            documents(path, text_field=field)
    with pytest.raises(InputError, match=r'"text".*struct'):
        documents(path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_after_a_struct_whose_field_has_its_name(kind, tmp_path):
    columns = pa.table({"page": [{"body": "no"}], "page.body": ["one"]})
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(columns, path)
    else:
        pyarrow.feather.write_feather(columns, path)
    assert documents(path, text_field="page.body") == ["one"]


def test_a_file_in_a_store(store, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_BUFFER_BYTES", 1 << 12)
    store.put("corpus/a.parquet", write(tmp_path, "parquet", TEXTS, rows=8).read_bytes())
    store.put("corpus/b.arrow", write(tmp_path, "arrow", TEXTS, rows=8).read_bytes())
    expected = [text.strip() for text in TEXTS]
    assert documents("gs://bucket/corpus", slice_bytes=1) == expected + expected


# --- Documents that are already tokenized, as lists of ids -------------------------------------------------------


DOCUMENTS = helpers.make_corpus(documents=60).strip().split("\n\n")


def tokenized(tokenizer):
    return [[ids for line in lines(text) if (ids := tokenizer.encode_batch([line])[0])] for text in DOCUMENTS]


def write_ids(path, rows, kind=None):
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
    path = write_ids(tmp_path / "a.parquet", tokenized(tokenizer))
    for name, source, options in (("text", tmp_path / "a.txt", {}), ("ids", path, {"ids_field": "input_ids"})):
        run(source, tokenizer, tmp_path / name, pairs=pairs, **options)
    assert counts(tmp_path / "text") == counts(tmp_path / "ids")


def test_formats_workers_and_slices_do_not_matter(tokenizer, tmp_path, monkeypatch):
    rows = tokenized(tokenizer)
    run(write_ids(tmp_path / "a.arrow", rows), tokenizer, tmp_path / "data", ids_field="input_ids")
    plan = corpus.plan
    monkeypatch.setattr(corpus, "plan", lambda inputs, options, **_: plan(inputs, options, 100))
    monkeypatch.setattr(corpus, "SLICE_BYTES", 100)
    path = write_ids(tmp_path / "a.parquet", rows, pa.large_list(pa.list_(pa.uint16())))
    for workers in (1, 2):
        run(path, tokenizer, tmp_path / str(workers), workers=workers, ids_field="input_ids")
        assert files(tmp_path / str(workers)) == files(tmp_path / "data")
    assert "ids_field" not in json.loads((tmp_path / "data" / "dataset.json").read_text())["options"]


def test_a_list_of_ids_is_a_document(tokenizer, tmp_path):
    rows = [[token for sentence in document for token in sentence] for document in tokenized(tokenizer)]
    path = write_ids(tmp_path / "a.parquet", [*rows, None, []])
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
    path = write_ids(tmp_path / "a.parquet", [*[[[7, 8], [9]]] * 8, None, row, [[7]]])
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
        write_ids(path, rows)
    with pytest.raises(InputError, match=rf"{name}.*{words}"):
        run(path, tokenizer, tmp_path / "data", ids_field=field)
