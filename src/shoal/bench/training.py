"""One training run for a benchmark: `python -m shoal.bench.training '{"preset": ..., "env": ..., ...}'`.

The arguments are those of shoal.train. An env with a colon, "package.module:function", is imported, as on the command line. The run
ends when the process that started it does.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from shoal.bench.parent_death import end_with_parent

__all__ = ["main"]


def main(words: str) -> None:
    end_with_parent(os.getppid())
    from shoal.experiment.references import EnvRef
    from shoal.experiment.run import train

    arguments: dict[str, Any] = json.loads(words)
    arguments["env"] = EnvRef.named(arguments["env"]).target
    train(**arguments)


if __name__ == "__main__":
    main(sys.argv[1])
