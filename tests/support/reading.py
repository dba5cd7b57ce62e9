"""Reads the documents of a corpus, and counts how much of a text file is read."""

import pytest

from bert_jax.data.corpora.corpus import plan, read
from bert_jax.data.options import CorpusOptions
from bert_jax.files import text_files


def documents(path: object, slice_bytes: int = 1 << 30, **options: object) -> list[str]:
    """Returns the documents of an input, read in slices."""
    chosen = CorpusOptions(**options)  # type: ignore[arg-type]
    return [document for piece in plan([str(path)], chosen, slice_bytes) for document in read(piece, chosen)]


def counted_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that grows with the bytes of each line and block that is read of a text file."""
    counts: list[int] = []
    real = text_files.open_text

    class Counted:
        def __init__(self, path: str):
            self._file = real(path)

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def __getattr__(self, name: str):
            def call(*arguments):
                found = getattr(self._file, name)(*arguments)
                counts.append(len(found) if isinstance(found, bytes) else 0)
                return found

            return call

    monkeypatch.setattr(text_files, "open_text", Counted)
    return counts
