"""One training run for a benchmark: `python -m shoal.bench.training '{"preset": ..., "env": ..., ...}'`.

The arguments are those of shoal.train. An env with a colon, "package.module:function", is imported, as on the command line. It
ends with whoever started it, also where that is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

__all__ = ["main"]


def main(words: str) -> None:
    parent = os.getppid()
    import shoal
    from shoal.experiment.references import EnvRef
    from shoal.runtime.forkserver import PR_SET_PDEATHSIG, prctl

    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return
    arguments: dict[str, Any] = json.loads(words)
    arguments["env"] = EnvRef.named(arguments["env"]).target
    shoal.train(**arguments)


if __name__ == "__main__":
    main(sys.argv[1])
