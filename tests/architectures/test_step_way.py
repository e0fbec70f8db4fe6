"""docs/architecture.md follows one environment step: every function on the way exists, and the way is short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def section(name):
    return TEXT.split(f"\n### {name}\n")[1].split("\n## ")[0].split("\n### ")[0]


def links(name):
    return re.findall(r"\[`([\w.]+)`\]\(\.\./(src/[\w/]+\.py)\)", section(name))


@pytest.mark.parametrize(("name", "most"), [("impala", 14), ("apex", 16), ("seed", 14)])
def test_short(name, most):
    files = {path for _, path in links(name)}
    assert 2 <= len(files) <= most
    assert all(len((ROOT / path).read_text().splitlines()) <= 500 for path in files)


@pytest.mark.parametrize("name", ["impala", "apex", "seed"])
def test_exists(name):
    for what, path in links(name):
        text = (ROOT / path).read_text()
        owner, _, method = what.rpartition(".")
        assert not owner or re.search(rf"^class {owner}\b", text, re.M), what
        assert re.search(rf"^\s*(async def|def|class) {method}\b", text, re.M), what
