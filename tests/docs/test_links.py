"""Links of the documentation: pages, anchors and images that exist, and a table of contents of all pages."""

import re
from pathlib import Path

import pytest
from generators import write_pages
from support import doc_pages
from support.helpers import REPOSITORY

PAGES = [*doc_pages.PAGES, *doc_pages.OTHER_PAGES, REPOSITORY / "CONTRIBUTING.md"]


@pytest.fixture(scope="module", autouse=True)
def _generated():
    """Writes the generated parts, which pages include."""
    write_pages(doc_pages.DOCS / "_generated")


def find_broken(page: Path) -> list[str]:
    """Returns the links of a page to files or anchors that do not exist."""
    broken = []
    for link in doc_pages.links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in doc_pages.anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=doc_pages.name)
def test_internal_links_resolve(page: Path):
    assert not find_broken(page)


def is_orphan(page: Path) -> bool:
    """Returns True for a page that only other pages lead to, as its front matter says."""
    return re.match(r"---\n(?:.+\n)*orphan: true\n", page.read_text()) is not None


def test_every_page_is_in_the_table_of_contents_once():
    trees = re.findall(r"^```\{toctree\}\n((?:.*\n)*?)```$", (doc_pages.DOCS / "index.md").read_text(), re.MULTILINE)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    pages = [page for page in doc_pages.PAGES if not is_orphan(page)]
    found = [str(page.relative_to(doc_pages.DOCS).with_suffix("")) for page in pages]
    assert sorted(listed) == sorted(set(found) - {"index"})
