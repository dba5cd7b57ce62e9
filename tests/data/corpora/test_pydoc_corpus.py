"""The corpora made of docstrings: Python's own, and those of installed packages."""

import os
import sys
from itertools import islice
from pathlib import Path

import pytest

from bert_jax.data.corpora import pydoc_corpus
from bert_jax.data.corpora.corpus import CorpusOptions, expand, fingerprint, plan, read
from bert_jax.errors import InputError


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.long)])
def test_pydoc_is_a_corpus_of_prose(every, monkeypatch):
    sources = pydoc_corpus._sources("pydoc")[::every]
    monkeypatch.setattr(pydoc_corpus, "_sources", lambda name: sources)
    pieces = plan(["pydoc"], CorpusOptions())
    assert len(pieces) == 1
    assert pieces[0].bytes > (1 << 20) // every
    documents = list(read(pieces[0], CorpusOptions()))
    assert documents[:90] == list(islice(pydoc_corpus.documents(), 90))  # In the same order each time.
    text = "\n".join(documents)
    assert len(text) > 1_000_000 // every
    assert len(documents) > 300 // every
    assert ">>>" not in text
    assert "====" not in text
    assert 'The "if" statement is used for conditional execution:' in text
    letters = sum(character.isalpha() or character.isspace() for character in text)
    assert letters > 0.9 * len(text)


def test_the_docstrings_of_a_module_become_paragraphs(tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text(
        '"""A module that does a thing\nwhich takes two lines to say.\n\nHeading of It All\n=================\n\n'
        "    >>> example(1, 2)\n    the output of the example\n\n.. note:: a directive\n\n* the first of the bullets\n"
        '  continues here\n* the second of the bullets\n"""\nimport does_not_exist\n\n\nclass Thing:\n'
        '    """A thing made of :class:`other` things."""\n\n    def act(self):\n        """Acts."""\n'
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_module.py").write_text('"""A docstring that nobody wants to read."""\n')
    monkeypatch.setattr(pydoc_corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(pydoc_corpus.documents())[-1].split("\n") == [
        "A module that does a thing which takes two lines to say.",
        "Heading of It All",
        "the first of the bullets continues here",
        "the second of the bullets",
        "A thing made of other things.",
    ]


SOURCES = {
    "__init__.py": b'"""The package that holds a few modules for this test."""\n',
    "b.py": b'"""The module that is called b has words."""\n',
    "a/c.py": b'def f():\n    """Returns the value that the caller has asked for."""\n    x = lambda: "no docstring"\n',
    "a/latin.py": b'# -*- coding: latin-1 -*-\n"""The caf\xe9 is a place to drink coffee."""\n',
    "a/tests/test_c.py": b'"""A test that has no place in a corpus."""\n',
    "a/utf8.py": b'"""The caf\xe9 is written in an unknown encoding."""\n',
    "a/broken.py": b'"""A module that no version of Python parses."""\nprint "x"\n',
    "a/null.py": b'"""A module with a null byte in its source."""\n\x00\n',
    "a/surrogate.py": b'"""The lone surrogate \\ud800 is not a character."""\n',
    "a/nested.py": b"""class A:
    if True:
        def f(self):
            try:
                pass
            except ValueError:
                def g():
                    'The function inside of a handler has words.'
            match 1:
                case 1:
                    async def h():
                        'The coroutine inside of a case has words.'
""",
    "a/data.txt": b"A file that is not Python source at all.",
}
DOCUMENTS = [
    "The package that holds a few modules for this test.",
    "Returns the value that the caller has asked for.",
    "The café is a place to drink coffee.",
    "The function inside of a handler has words.\nThe coroutine inside of a case has words.",
    "The lone surrogate ? is not a character.",
    "The module that is called b has words.",
]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of importable packages: `some_docs` with SOURCES, `one_module`, and `no_sources`."""
    for name, content in SOURCES.items():
        path = tmp_path / "some_docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "one_module.py").write_text('"""The module that is alone has words."""\nraise ImportError\n')
    (tmp_path / "no_sources").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def documents(*inputs: str) -> list[str]:
    return [document for piece in plan(inputs, CorpusOptions()) for document in read(piece, CorpusOptions())]


def test_a_package_is_a_document_a_module_in_the_order_of_paths(packages: Path):
    found = documents("pydoc:some_docs")
    assert found == DOCUMENTS
    assert "".join(found).encode()  # no lone surrogate


def test_packages_are_read_in_the_order_given_without_an_import(packages: Path):
    (only,) = documents("pydoc:one_module")
    assert documents("pydoc:one_module,some_docs") == [only, *DOCUMENTS]
    assert documents("pydoc:some_docs", "pydoc:one_module", "pydoc:some_docs") == [*DOCUMENTS, only]
    assert expand(["pydoc:one_module,some_docs", "pydoc"]) == ["pydoc:one_module", "pydoc:some_docs", "pydoc"]
    assert not {"one_module", "some_docs"} & sys.modules.keys()


@pytest.mark.parametrize("package", ["not_installed_anywhere", "", "some_docs.a", "../some_docs", "scikit-learn"])
def test_a_missing_package_is_named(packages: Path, package: str):
    with pytest.raises(InputError, match=f"--input=pydoc:{package}: .*{package!r}"):
        expand([f"pydoc:some_docs,{package}"])


@pytest.mark.parametrize("package", ["no_sources", "itertools", "sys"])
def test_a_package_without_sources_is_named(packages: Path, package: str):
    with pytest.raises(InputError, match=f"--input=pydoc:{package}: "):
        plan([f"pydoc:{package}"], CorpusOptions())


def test_a_change_of_a_package_changes_its_fingerprint(packages: Path):
    before = fingerprint("pydoc:some_docs")
    assert fingerprint("pydoc:some_docs") == before
    assert fingerprint("pydoc:one_module") != before
    source = packages / "some_docs" / "b.py"
    os.utime(source, ns=(0, source.stat().st_mtime_ns + 1))
    assert fingerprint("pydoc:some_docs") != before
