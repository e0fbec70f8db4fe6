"""`make bench-replay`: shoal's replay against dm-reverb, cpprb, TorchRL and SB3, the same work in the same run, in turn.

    python -m shoal.bench.replay [--only WORD] [--rounds N] [--seconds S] [--no-save] [--report]

Peers live in environments of their own under .peers/. All rounds go to docs/results/bench_replay.json, and the tables made of them
into docs/replay.md. Scenes that were not measured this time keep their earlier results, each with the date and load of its own run.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench import machine
from shoal.bench.__main__ import say
from shoal.bench.children import Children
from shoal.bench.measure import last_json, tail
from shoal.bench.peers.install import Peer, install
from shoal.bench.peers.more import peer_named
from shoal.bench.report import insert
from shoal.bench.tables import markdown, short, spread

__all__ = ["main"]


PEERS = (
    Peer("cpprb", "cpprb", ("cpprb", "numpy"), ("numpy",)),
    peer_named("sb3"),
    Peer("reverb", "dm-reverb", ("dm-reverb==0.14.0", "tensorflow-cpu==2.15.*"), ("tensorflow-cpu",)),
    peer_named("torchrl"),
)
CASES = (("small", 10_000), ("small", 100_000), ("small", 1_000_000), ("frames", 10_000), ("sequences", 1_000))
WAYS = ("inline", "ipc", "tcp")
HERE = Path(__file__).parent
RESULTS, PAGE = "bench_replay.json", machine.ROOT / "docs" / "replay.md"

TARGETS = (
    ("small 100k", "sample+update", ("shoal inline", "sample+update"), ("cpprb", "sample+update"), 1.0),
    ("small 1M", "sample+update", ("shoal inline", "sample+update"), ("cpprb", "sample+update"), 1.0),
    ("frames 10k", "sample", ("shoal inline", "sample"), ("cpprb", "sample"), 1.0),
    ("frames 10k", "sample against SB3", ("shoal inline", "sample"), ("sb3", "sample"), 1.0),
    ("frames 10k", "sample+update", ("shoal inline", "sample+update"), ("cpprb", "sample+update"), 1.0),
    ("small 100k", "insert 64 at a time", ("shoal inline", "insert"), ("cpprb", "insert"), 1.0),
    ("small 100k", "append_batch", ("shoal inline", "append_batch"), ("cpprb", "insert"), 1.0),
    ("small 100k", "ipc writer", ("shoal ipc", "ipc writer x1"), ("reverb", "tcp writer x1"), 5.0),
    ("small 100k", "TCP writer", ("shoal tcp", "tcp writer x1"), ("reverb", "tcp writer x1"), 5.0),
    ("small 100k", "ipc dataset", ("shoal ipc", "ipc dataset"), ("reverb", "tcp dataset"), 3.0),
    ("small 100k", "TCP dataset", ("shoal tcp", "tcp dataset"), ("reverb", "tcp dataset"), 3.0),
    ("frames 10k", "ipc writer", ("shoal ipc", "ipc writer x1"), ("reverb", "tcp writer x1"), 2.0),
    ("frames 10k", "TCP writer", ("shoal tcp", "tcp writer x1"), ("reverb", "tcp writer x1"), 1.0),
    ("frames 10k", "ipc dataset", ("shoal ipc", "ipc dataset"), ("reverb", "tcp dataset"), 2.0),
    ("frames 10k", "TCP dataset", ("shoal tcp", "tcp dataset"), ("reverb", "tcp dataset"), 1.0),
)
"""(scene, what, ours, theirs, how many times theirs it must be); the issue's lines."""
PATHS = re.compile(r"/(?:[^/\s'\")]+/)+([^/\s'\")]+)")  # of this machine, in the words of an error: the file's name is enough


def names() -> list[str]:
    """Everybody who has a replay buffer."""
    return [*(f"shoal {way}" for way in WAYS), *(peer.name for peer in PEERS)]


def record_pong(path: Path, steps: int = 1024) -> bool:
    """Frames of Pong under random actions as 84x84 grey; False without ale-py."""
    try:
        import ale_py
        import gymnasium as gym
    except ImportError:
        return False
    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", obs_type="grayscale")
    env.action_space.seed(0)
    env.reset(seed=0)
    rows, columns = np.linspace(34, 193, 84).astype(int), np.linspace(0, 159, 84).astype(int)
    frames = []
    while len(frames) < steps:
        frame, _, terminated, truncated, _ = env.step(env.action_space.sample())
        frames.append(frame[rows][:, columns])
        if terminated or truncated:
            env.reset()
    np.save(path, np.array(frames, np.uint8))
    return True


def measure(command: Sequence[str], seconds: float, children: Children) -> dict[str, Any]:
    """What a driver printed last, or its error."""
    done = children.run(command, 240 + 30 * seconds)
    if done.returncode == 124:
        return {"error": "took too long"}
    found = last_json(done.stdout)
    if done.returncode or found is None:
        return {"error": PATHS.sub(r"\1", tail(done.stderr, 1))[:300] or f"exit code {done.returncode}"}
    return found


def runners(kind: str, size: int, able: Sequence[Peer], seconds: float, recording: Path | None) -> dict[str, list[str]]:
    """Who takes part in a scene, and how each is started."""
    words = [kind, str(size), str(seconds), *([str(recording)] if recording and kind != "small" else [])]
    ways = ("inline",) if size in (10_000, 1_000_000) and kind == "small" else WAYS
    found = {f"shoal {way}": [sys.executable, "-m", "shoal.bench.replay_shoal", way, *words] for way in ways}
    for peer in able:
        if (peer.name == "reverb" and ways == ("inline",)) or (kind == "sequences" and peer.name != "reverb"):
            continue
        if kind == "small" and size == 10_000 and peer.name != "cpprb":
            continue
        found[peer.name] = [str(peer.python), str(HERE / "replay_peers.py"), peer.name, *words]
    return found


def tables(results: dict[str, Any]) -> str:
    """Everything that was measured, as docs/replay.md shows it."""
    cpu = results["machine"]
    parts = [f"Median of the rounds (lowest - highest), items/s, on {cpu['cores']} cores of {cpu['cpu']}.",
             "\n".join(f"- {name}: {words}" for name, words in results["peers"].items())]
    for name, scene in results["scenes"].items():
        measured = f"{scene['date']}, commit {scene['commit'][:10]}, load {scene['load']:g} at the start, {scene['rounds']} rounds."
        parts += [f"### {name}", measured, scene_table(scene["runs"])]
    return "\n\n".join([*parts, "### Targets", target_table(results["scenes"])])


def scene_table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Operations down, who across; medians with their range."""
    rows = list(dict.fromkeys(name for results in runs.values() for result in results for name in result if name != "error"))
    body = [[name, *(_cell([r[name] for r in results if name in r]) for results in runs.values())] for name in rows]
    errors = [f"- {who}: {result['error']}" for who, results in runs.items() for result in results[-1:] if "error" in result]
    return "\n\n".join(part for part in (markdown(("items/s", *runs), body) if rows else "", "\n".join(errors)) if part)


def _cell(values: list[float]) -> str:
    return spread(values) if values else "-"


def _middle(scenes: dict[str, Any], scene: str, who: str, what: str) -> float | None:
    values = [result[what] for result in scenes.get(scene, {}).get("runs", {}).get(who, []) if what in result]
    return float(np.median(values)) if values else None


def target_table(scenes: dict[str, Any]) -> str:
    """The issue's lines: ours, theirs, the ratio, and whether it is enough."""
    rows = []
    for scene, what, ours, theirs, times in TARGETS:
        mine, other = _middle(scenes, scene, *ours), _middle(scenes, scene, *theirs)
        ratio = mine / other if mine is not None and other is not None else None
        rows.append([scene, what, _short(mine), f"{theirs[0]} {_short(other)}", _ratio(ratio), f">= {times:g}",
                     _word(None if ratio is None else ratio >= times)])
    for what in ("insert", "sample", "sample+update"):
        few, many = (_middle(scenes, scene, "shoal inline", what) for scene in ("small 10k", "small 1M"))
        ratio = few / many if few is not None and many is not None else None
        rows.append(["small", f"cost of {what}, 1M / 10k", _short(many), f"10k: {_short(few)}", _ratio(ratio), "<= 1.5",
                     _word(None if ratio is None else ratio <= 1.5)])
    return markdown(("scene", "what", "shoal", "against", "ratio", "needed", ""), rows)


def _short(value: float | None) -> str:
    return "-" if value is None else short(value)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _word(met: bool | None) -> str:
    return "not measured" if met is None else "met" if met else "NOT MET"


def name_of(kind: str, size: int) -> str:
    return f"{kind} {short(size).replace(' ', '')}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.bench.replay", description="shoal's replay against its peers")
    parser.add_argument("--only", default="", help="only scenes whose name holds this word")
    parser.add_argument("--who", default="", help="only those whose name holds this word")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of every measurement")
    parser.add_argument("--no-save", action="store_true", help="write neither docs/results/bench_replay.json nor docs/replay.md")
    parser.add_argument("--report", action="store_true", help="measure nothing, only write docs/replay.md from what is saved")
    given = parser.parse_args(words)
    if given.report:
        return report(machine.load(RESULTS))
    started, earlier, results = time.monotonic(), machine.load(RESULTS), machine.describe()
    children, able = Children(), []
    results["peers"] = dict(earlier.get("peers", {}))
    for peer in (peer for peer in PEERS if given.who in peer.name):
        usable, results["peers"][peer.name] = install(peer, say)
        say(f"{peer.name}: {results['peers'][peer.name]}")
        able += [peer] * usable
    results["scenes"] = dict(earlier.get("scenes", {}))
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "pong.npy"
        results["recorded_pong"] = record_pong(recording)
        for kind, size in CASES:
            if given.only in name_of(kind, size):
                taking = runners(kind, size, able, given.seconds, recording if results["recorded_pong"] else None)
                chosen = {who: command for who, command in taking.items() if given.who in who}
                runs: dict[str, list[dict[str, Any]]] = {who: [] for who in chosen}
                load = round(os.getloadavg()[0], 2)
                for _ in range(given.rounds):
                    for who, command in chosen.items():
                        runs[who].append(measure(command, given.seconds, children))
                scene = {**machine.stamp(results), "load": load, "rounds": given.rounds, "seconds": given.seconds, "runs": runs}
                if given.who and (before := earlier.get("scenes", {}).get(name_of(kind, size))):
                    again = {**before.get("again", {}), **{who: {key: scene[key] for key in ("date", "commit")} for who in runs}}
                    scene = {**before, "runs": {**before["runs"], **runs}, "again": again}
                results["scenes"][name_of(kind, size)] = scene
                say(f"\n### {name_of(kind, size)}\n\n{scene_table(runs)}")
    results["seconds"] = round(time.monotonic() - started, 1)
    say(f"\n### Targets\n\n{target_table(results['scenes'])}\n\nmeasured in {results['seconds']:.0f} s")
    if not given.no_save:
        say(f"wrote {machine.save(RESULTS, results)}")
        return report(results)
    return 0


def report(results: dict[str, Any]) -> int:
    """Put the tables into docs/replay.md; what was not measured is said, not guessed."""
    shown = tables(results) if results else "Not measured yet: run `make bench-replay` on a quiet machine."
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), "bench", shown), encoding="utf-8")
    say(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
