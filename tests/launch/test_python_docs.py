"""The corpora of launch/python_docs.py: docstrings of Python's own modules, and of installed packages."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import helpers
from support.reading import documents

SCRIPT = helpers.REPOSITORY / "launch" / "python_docs.py"
SOURCES = {
    "__init__.py": b'"""The package that holds a few modules for this test."""\n',
    "b.py": b'"""The module that is called b has words."""\n',
    "a/c.py": b'def f():\n    """Returns the value that the caller has asked for."""\n    x = lambda: "no docstring"\n',
    "a/latin.py": b'# -*- coding: latin-1 -*-\n"""The caf\xe9 is a place to drink coffee."""\n',
    "a/broken.py": b'"""A module that no version of Python parses."""\nprint "x"\n',
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
    "c.py": b'''"""A module that does a thing
which takes two lines to say.

Heading of It All
=================

    >>> example(1, 2)
    the output of the example

.. note:: a directive

* the first of the bullets
  continues here
* the second of the bullets"""
class Thing:
    """A thing made of :class:`other` things."""
    def act(self):
        """Acts."""
''',
}
DOCUMENTS = [
    "The package that holds a few modules for this test.",
    "Returns the value that the caller has asked for.",
    "The café is a place to drink coffee.",
    "The function inside of a handler has words.\nThe coroutine inside of a case has words.",
    "The lone surrogate ? is not a character.",
    "The module that is called b has words.",
    "A module that does a thing which takes two lines to say.\nHeading of It All\n"
    "the first of the bullets continues here\nthe second of the bullets\nA thing made of other things.",
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


def run(packages: Path, *names: str) -> subprocess.CompletedProcess:
    environment = helpers.child_environment(PYTHONPATH=str(packages))
    command = [sys.executable, SCRIPT, packages / "text", *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_package_is_a_file_with_a_document_a_module_in_the_order_of_paths(packages: Path):
    done = run(packages, "one_module", "some_docs")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (packages / "text").iterdir()) == ["one_module.txt", "some_docs.txt"]
    assert documents(packages / "text" / "some_docs.txt") == DOCUMENTS
    assert documents(packages / "text" / "one_module.txt") == ["The module that is alone has words."]
