"""The repository's root, and the environment for a subprocess that imports `shoal` and `tests` from it."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tree_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
