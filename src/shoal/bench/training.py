"""One training run for a benchmark: `python -m shoal.bench.training '{"preset": ..., "env": ..., ...}'`.

The arguments are those of shoal.train. An env with a colon, "package.module:function", is imported.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

__all__ = ["main"]


def main(words: str) -> None:
    import shoal

    arguments: dict[str, Any] = json.loads(words)
    module, colon, name = arguments["env"].partition(":")
    if colon:
        arguments["env"] = getattr(import_module(module), name)
    shoal.train(**arguments)


if __name__ == "__main__":
    main(sys.argv[1])
