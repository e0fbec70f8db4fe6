"""Two hundred random kills of a replay server, its writers or both; and twenty thousand bad messages for each kind of address."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from evidence.lines import ROOT, Line
from tests.replay.kills import kill_at_random

__all__ = ["LINES"]

KILLS, ROUND = 200, 10


def kills(kind: str, seed: int) -> dict[str, Any]:
    """Rounds of ten kills, each with a server, checkpoints and writers of its own."""
    rng = random.Random(seed)
    rounds = []
    for number in range(KILLS // ROUND):
        victims = rng.choices(["server", "client", "both"], [2, 1, 1], k=ROUND)
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(kill_at_random(kind, Path(folder), victims, rng.randrange(1 << 30) + number))
    return {
        "met": all(one["met"] for one in rounds), "kills": sum(len(one["kills"]) for one in rounds),
        "items": sum(one["items"] for one in rounds), "missing": sum(one["missing"] for one in rounds),
        "twice": sum(one["twice"] for one in rounds), "lost": sum(one["lost"] for one in rounds),
        "wrong": [one for one in rounds if not one["met"]],
    }  # fmt: skip


def fuzz(seed: int) -> dict[str, Any]:
    """The fuzz tests of messages and checkpoints, longer than in `make test`."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/replay/test_fuzz.py", "tests/replay/test_damage.py",
             "-k", "bad_messages or mutated", "--hypothesis-seed", str(seed)]  # fmt: skip
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "SHOAL_FUZZ_MESSAGES": "20000", "SHOAL_FUZZ_CHECKPOINTS": "5000"})
    return {"met": done.returncode == 0, "said": done.stdout[-2000:] if done.returncode else done.stdout.splitlines()[-1]}


STATEMENT = "200 random kills of server, clients or both over {}: all that a whole checkpoint held is there, `lost` equals the gap"
LINES = [
    Line("replay-kills-tcp", 15, STATEMENT.format("TCP"), lambda seed: kills("tcp", seed), seeds=(0,)),
    Line("replay-kills-ipc", 15, STATEMENT.format("ipc"), lambda seed: kills("ipc", seed), seeds=(1,)),
    Line("replay-fuzz", 15, "20,000 bad messages over ipc, 20,000 over TCP and 5,000 mutated checkpoints: no traceback, no growth",
         fuzz, seeds=(0,)),
]
