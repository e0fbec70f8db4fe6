"""The rooms of docs/architecture.md: what runs imports only from rooms of its own row and below."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shoal"


def rows() -> dict[str, int]:
    """Room -> its row in the table, counted from the top."""
    text = (ROOT / "docs/architecture.md").read_text()
    table = re.search(r"\| folder \|.*\n\|---\|---\|\n((?:\|.*\n)+)", text)
    assert table, "docs/architecture.md has no table of rooms"
    cells = [line.split("|")[1] for line in table.group(1).splitlines()]
    return {name.rstrip("/").removesuffix(".py"): row for row, cell in enumerate(cells) for name in re.findall(r"`([^`]+)`", cell)}


def for_types_only(tree: ast.Module) -> set[ast.AST]:
    """What stands below `if TYPE_CHECKING`."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, room of shoal) of all that is imported when the code runs, at once or later."""
    unseen = for_types_only(tree)
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "shoal" and parts[1:] != ["__version__"]:
                yield node.lineno, parts[1] if len(parts) > 1 else "__init__"


def upwards(room: str, text: str, order: dict[str, int]) -> list[tuple[int, str]]:
    """The imports of a file in a room that point to a room above it."""
    return [(line, other) for line, other in imports(ast.parse(text)) if order[other] < order[room]]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_room_has_a_row():
    there = {room_of(path) for path in PACKAGE.rglob("*.py")}
    assert rows().keys() - {"presets"} == there


def test_imports_point_downwards():
    order = rows()
    found = {path.relative_to(PACKAGE): upwards(room_of(path), path.read_text(), order) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize("text", ["from shoal.experiment import run", "import shoal.experiment.run", "from shoal import cli",
                                  "def later():\n    from shoal.experiment.preload import PRELOAD", "import shoal"])
def test_an_import_upwards_is_found(text):
    assert upwards("coordination", text, rows())


def test_types_and_version_from_above():
    text = "from shoal import __version__\nif TYPE_CHECKING:\n    from shoal.experiment import Plan"
    assert not upwards("coordination", text, rows())
