"""docs/results: every file is linked from a page, and every link of a page has its file."""

from __future__ import annotations

import re

from benchmarks.results import RESULTS, ROOT
from evidence.index import PAGE, page

PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def test_the_index_names_every_file():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m evidence.index`"
    linked = set(re.findall(r"\]\(([^)/#]+)", page()))
    assert {path.name for path in RESULTS.iterdir()} - {PAGE.name} <= linked


def test_links_between_pages():
    missing = [(file.relative_to(ROOT), link) for file in PAGES
               for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", file.read_text(encoding="utf-8"))
               if not (file.parent / link).exists()]
    assert missing == []
