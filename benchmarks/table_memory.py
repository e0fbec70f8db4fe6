"""What a replay table of Atari frames takes, in memory and in processor time: `python -m benchmarks.table_memory`.

An actor of the preset plays with the first weights. Its items go into one table of each kind, as the Replay role puts them there,
twice around, so that in the second round every insert displaces one: that is timed, and batches of the preset's size after it. All
tables draw alike, and their batches must be the same, bit for bit. Written to docs/results/table_memory.json.
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
from shoal.acting import FrameStacks, ItemRecord, Progress
from shoal.bench import machine
from shoal.core import Tree
from shoal.errors import ShoalError
from shoal.experiment.prepare import Prepared, prepare
from shoal.experiment.run import plan_of
from shoal.replay.table.replay_core import Core
from shoal.roles.player import Player
from shoal.roles.replay_frames import FrameTable, frame_stacks, insert_fields, kept_columns
from shoal.roles.replay_memory import SLOT_BYTES, codecs
from shoal.roles.replay_wires import Block, items_layout, store, stored_columns
from shoal.runtime.instance import RoleContext
from shoal.slots import InlineAllocator, Layout, leaves

__all__ = ["main", "measure"]

CASES = {"apex ALE/Pong-v5": 4_000, "apex ALE/Breakout-v5": 4_000, "apex ALE/MsPacman-v5": 4_000,
         "r2d2 ALE/Pong-v5": 120, "r2d2 ALE/MsPacman-v5": 120}
"""Preset and game, and how many items are played. Of nine games that were tried, Ms. Pac-Man's screens take the most."""
Kind = tuple[str, str]
KINDS: tuple[Kind, ...] = (("whole", "none"), ("whole", "lz4"), ("shared", "none"), ("shared", "lz4"), ("shared", "zstd"))
"""Whether items share frames, and how frames are compressed. Until 2026-11-17 a program had whole items with lz4."""
BATCHES = 20


def played(prepared: Prepared, record: ItemRecord, count: int, some: int) -> list[tuple[Tree, Tree, np.ndarray]]:
    """Inserts of an actor with the first weights: as they are sent, and with whole observations."""
    program = prepared.program()
    program.build(InlineAllocator())
    player = Player(RoleContext(program, "actor", 0, 0, lambda message: None), program.nodes["actor"].arguments["parts"])
    player.load(prepared.algorithm.learn(prepared.plan.experiment.seed).published(Progress()), 0, 0, 1)
    layout, inserts = Layout(insert_fields(record, some)), []
    for _ in range(count // some):
        data: Tree = {"items": layout.empty(), "priority": np.zeros(some), "decisions": np.zeros(1, np.int64)}
        player.play(data)
        items = data["items"]
        items["frames"] = items["frames"][: int(items["frame_count"][0])].copy()
        inserts.append((items, whole(items, frame_stacks(record)), data["priority"]))
    player.close()
    program.release()
    return inserts


def whole(items: Tree, stacks: FrameStacks | None) -> Tree:
    """The same items with observations instead of frames and places."""
    assert stacks is not None
    seen = {name: items["frames"][items[name][..., None] + np.arange(stacks.size)] for name in stacks.fields}
    return {name: seen.get(name, rows) for name, rows in items.items() if name not in ("frames", "frame_count")}


def measure(preset: str, env: str, count: int, **overrides: Any) -> dict[str, Any]:
    """Bytes of an item, milliseconds of an insert and of a batch, by what is kept and how it is compressed."""
    prepared = prepare(plan_of(preset, env, None, None, {"actors": 1, "eval.enabled": False, **overrides}))
    config, record = prepared.plan.experiment.replay, prepared.algorithm.record
    assert isinstance(record, ItemRecord)
    some, columns, stacks = config.insert_batch, stored_columns(record.layout), frame_stacks(record)
    assert stacks is not None
    inserts, shared = played(prepared, record, count, some), FrameTable(stacks, columns, some)
    held = len(inserts) * some
    kept = {"whole": columns, "shared": kept_columns(record, columns, some)}
    cores = {kind: Core([replay.Table("t", replay.Prioritized(config.exponent), replay.Fifo(), max_size=held,
                                      limiter=replay.MinSize(1))], compression=codecs(kept[kind[0]], kind[1])) for kind in KINDS}
    taken: dict[Kind, dict[str, list[float]]] = {kind: {"insert_ms": [], "batch_ms": []} for kind in KINDS}
    for again in (False, True):
        for frames, items, priority in inserts:
            for kind, core in cores.items():
                began = time.thread_time()
                if kind[0] == "shared":
                    shared.put(core, core.table("t"), frames, priority)
                else:
                    store(core, core.table("t"), columns, items, priority)
                taken[kind]["insert_ms"] += [1e3 * (time.thread_time() - began)] * again
    nbytes = items_layout(record.layout, config.batch_size).nbytes
    blocks = {kind: Block(np.zeros(nbytes, np.uint8)) for kind in KINDS}
    for number in range(BATCHES + 2):
        for kind, core in cores.items():
            began = time.thread_time()
            core.try_sample("t", config.batch_size, blocks[kind])
            taken[kind]["batch_ms"] += [1e3 * (time.thread_time() - began)] * (number > 1)  # the first touch the memory
        if any((blocks[kind].memory != blocks[KINDS[0]].memory).any() for kind in KINDS):
            raise ShoalError(f"{preset} on {env}: a batch of one table is not what was put in")
    sent = {"whole": len(inserts) * record.layout.joined(some).nbytes,
            "shared": sum(insert_bytes(frames) for frames, *_ in inserts)}
    rows = {", ".join(kind): {"bytes_sent_per_item": sent[kind[0]] / held, **taken[kind],
                              "bytes_per_item": core.table("t").nbytes / held + SLOT_BYTES} for kind, core in cores.items()}
    return {"name": f"{preset} {env}", "capacity": config.capacity, "insert_batch": some, "envs_per_actor": stacks.seats,
            "batch_size": config.batch_size, "items": held, "load": round(os.getloadavg()[0], 2), "tables": rows}


def insert_bytes(items: Tree) -> int:
    """Of what an insert has in use."""
    return sum(leaf.nbytes for _, leaf in leaves(items))


def table(case: dict[str, Any]) -> str:
    """One case in Markdown."""
    lines = [f"| {case['name']} | bytes sent an item | bytes kept an item | "
             f"GB when full ({case['capacity']:,}) | ms an insert ({case['insert_batch']}) | "
             f"ms a batch ({case['batch_size']}) |", "|---|---|---|---|---|---|"]
    for kind, row in case["tables"].items():
        times = (f"{np.median(row[name]):.1f} ({min(row[name]):.1f} - {max(row[name]):.1f})" for name in ("insert_ms", "batch_ms"))
        each = row["bytes_per_item"]
        lines.append(" | ".join((f"| {kind}", f"{row['bytes_sent_per_item']:,.0f}", f"{each:,.0f}",
                                 f"{each * case['capacity'] / 1e9:.1f}", *times)) + " |")
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
