"""Table of faults: each row has a test, and each test exists."""

import re
from pathlib import Path

from support import doc_pages
from support.helpers import REPOSITORY

TEXT = (doc_pages.DOCS / "concepts" / "fault_tolerance.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.*?) ?\| (.+?) \|$", TEXT, re.MULTILINE)
TESTS = re.findall(r"^(\d+)\. `(.+)::(.+)`$", TEXT, re.MULTILINE)


def test_rows_and_tests_are_numbered_alike():
    numbers = [int(row[0]) for row in ROWS]
    assert len(numbers) > 20
    assert numbers == [int(number) for number, _, _ in TESTS] == sorted(set(numbers))


def test_the_test_of_each_row_exists():
    missing = []
    for number, path, name in TESTS:
        file: Path = REPOSITORY / "tests" / path
        if not file.is_file() or not re.search(rf"^def {name}\(", file.read_text(), re.MULTILINE):
            missing.append((number, path, name))
    assert not missing


def test_statuses_are_ones_that_the_program_has():
    words = {"", "the signal's", "continues", "that status", "the same"}
    for number, fault, _, status, _ in ROWS:
        assert status in words or set(status.split(" or ")) <= {"0", "1", "2", "75", "134"}, (number, fault)
