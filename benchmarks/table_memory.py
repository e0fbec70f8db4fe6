"""What a replay table of Atari frames takes, in memory and in time, by its compression: `python -m benchmarks.table_memory`.

An actor of the preset plays with the first weights. Its items go into one table for each compression, as the Replay role puts them
there, twice around, so that in the second round every insert displaces one: that is timed, and batches of the preset's size after
it. All tables draw alike, and their batches must be the same, bit for bit. Written to docs/results/table_memory.json.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.results import load, parser_for, save, say, with_earlier_rows
from shoal import replay
from shoal.bench import machine
from shoal.core import Tree
from shoal.errors import ShoalError
from shoal.experiment.prepare import Prepared, prepare
from shoal.experiment.run import plan_of
from shoal.learning import Progress
from shoal.replay.table.replay_core import Core
from shoal.roles.player import Player
from shoal.roles.replay_memory import SLOT_BYTES, codecs
from shoal.roles.replay_wires import Block, items_layout, store, stored_columns
from shoal.runtime.instance import RoleContext
from shoal.slots import InlineAllocator, Layout

__all__ = ["main", "measure"]

CASES = {"apex ALE/Pong-v5": 4_000, "apex ALE/Breakout-v5": 4_000, "apex ALE/MsPacman-v5": 4_000,
         "r2d2 ALE/Pong-v5": 120, "r2d2 ALE/MsPacman-v5": 120}
"""Preset and game, and how many items are played. Of nine games that were tried, Ms. Pac-Man's screens take the most."""
KINDS = ("none", "lz4", "zstd")
BATCHES = 20


def played(prepared: Prepared, count: int, some: int) -> list[tuple[Tree, np.ndarray]]:
    """Inserts of an actor with the first weights."""
    program = prepared.program()
    program.build(InlineAllocator())
    player = Player(RoleContext(program, "actor", 0, 0, lambda message: None), program.nodes["actor"].arguments["parts"])
    player.load(prepared.algorithm.learn(prepared.plan.experiment.seed).published(Progress()), 0, 0, 1)
    layout: Layout = prepared.algorithm.record.layout  # type: ignore[attr-defined]
    inserts = []
    for _ in range(count // some):
        data: Tree = {"items": layout.joined(some).empty(), "priority": np.zeros(some), "decisions": np.zeros(1, np.int64)}
        player.play(data)
        inserts.append((data["items"], data["priority"]))
    player.close()
    program.release()
    return inserts


def measure(preset: str, env: str, count: int, **overrides: Any) -> dict[str, Any]:
    """Bytes of an item, milliseconds of an insert and of a batch, by compression."""
    prepared = prepare(plan_of(preset, env, None, None, {"actors": 1, "eval.enabled": False, **overrides}))
    config, layout = prepared.plan.experiment.replay, prepared.algorithm.record.layout  # type: ignore[attr-defined]
    columns, inserts = stored_columns(layout), played(prepared, count, config.insert_batch)
    held = len(inserts) * config.insert_batch
    cores = {kind: Core([replay.Table("t", replay.Prioritized(config.exponent), replay.Fifo(), max_size=held,
                                      limiter=replay.MinSize(1))], compression=codecs(columns, kind)) for kind in KINDS}
    taken: dict[str, dict[str, list[float]]] = {kind: {"insert_ms": [], "batch_ms": []} for kind in KINDS}
    for again in (False, True):
        for items, priority in inserts:
            for kind, core in cores.items():
                began = time.perf_counter()
                store(core, core.table("t"), columns, items, priority)
                taken[kind]["insert_ms"] += [1e3 * (time.perf_counter() - began)] * again
    nbytes = items_layout(layout, config.batch_size).nbytes
    blocks = {kind: Block(np.zeros(nbytes, np.uint8)) for kind in KINDS}
    for number in range(BATCHES + 2):
        for kind, core in cores.items():
            began = time.perf_counter()
            core.try_sample("t", config.batch_size, blocks[kind])  # type: ignore[arg-type]
            taken[kind]["batch_ms"] += [1e3 * (time.perf_counter() - began)] * (number > 1)  # the first touch the memory
        if any((blocks[kind].memory != blocks["none"].memory).any() for kind in KINDS):
            raise ShoalError(f"{preset} on {env}: a batch of a compressed table is not what was put in")
    rows = {kind: {"bytes_per_item": core.table("t").nbytes / held + SLOT_BYTES, **taken[kind]} for kind, core in cores.items()}
    return {"name": f"{preset} {env}", "capacity": config.capacity, "insert_batch": config.insert_batch,
            "batch_size": config.batch_size, "items": held, "load": round(os.getloadavg()[0], 2), "compression": rows}


def table(case: dict[str, Any]) -> str:
    """One case in Markdown."""
    lines = [f"| {case['name']} | bytes an item | GB when full ({case['capacity']:,}) | ms an insert ({case['insert_batch']}) | "
             f"ms a batch ({case['batch_size']}) |", "|---|---|---|---|---|"]
    for kind, row in case["compression"].items():
        times = (f"{np.median(row[name]):.1f} ({min(row[name]):.1f} - {max(row[name]):.1f})" for name in ("insert_ms", "batch_ms"))
        each = row["bytes_per_item"]
        lines.append(" | ".join((f"| {kind}", f"{each:,.0f}", f"{each * case['capacity'] / 1e9:.1f}", *times)) + " |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    given = parser_for("table_memory", __doc__, "table_memory.json", only="cases").parse_args(words)
    results: dict[str, Any] = {**machine.describe(), "command": "python -m benchmarks.table_memory", "cases": []}
    for name, count in CASES.items():
        if given.only.lower() in name.lower():
            results["cases"].append(measure(*name.split(), count))
            say(table(results["cases"][-1]) + "\n")
    if not given.no_save:
        results = with_earlier_rows(results, load("table_memory.json"), "cases")
        say(f"wrote {save('table_memory.json', results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
