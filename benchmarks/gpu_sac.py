"""SAC on HalfCheetah: a whole run against the bare update loop, on a machine with a GPU.

    python -m benchmarks.gpu_sac [--seconds 380] [--device cuda] [--env HalfCheetah-v5] [--layouts turns,apart] [--set A=JSON]
    python -m benchmarks.gpu_sac --device cpu --seconds 20 --trial-seconds 10 --bare-seconds 3

Networks of 256-256, batches of 256, one update for each environment step. The bare loop makes whole updates (critics, actor,
temperature, targets) on one batch that lies on the device already: four in one CUDA graph, one in a graph, phase by phase, and
kernel by kernel; the fastest of these counts. Then each layout is tried for a while, and the fastest one trains for the rest of the
time:

    turns    preset sac: actor, table and learner take turns in one process
    apart    preset sac_throughput: actor, table and learner in processes of their own, at work at the same time; the table's
             limiter keeps one update per step

Progress goes to stderr, one JSON object at the end to stdout (and to --out): updates/s of the run and of the bare loops, their
ratio, how much of the time the learner waited, env steps, and the return of every evaluation. With the defaults it takes under
9 minutes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.q_learner_limit import WARM_UPDATES
from benchmarks.synthetic import waiting_for
from benchmarks.training_curve import evaluations
from benchmarks.work_rate import work_rate
from shoal import algorithms, envs
from shoal.acting import Progress
from shoal.algorithms import sac
from shoal.bench import machine
from shoal.bench.rates import snapshots, tail
from shoal.core import Tree
from shoal.device.placement import GpuConfig, Hardware
from shoal.learning import phases_due
from shoal.nets import NetConfig
from shoal.roles.replay_config import LAUNCH_UPDATES
from shoal.runtime.fork_server import PR_SET_PDEATHSIG, prctl

__all__ = ["BATCH", "HIDDEN", "LAYOUTS", "main", "option_words"]

BATCH, HIDDEN, START = 256, (256, 256), 10_000
LAYOUTS = {"turns": "sac", "apart": "sac_throughput"}  # presets
START_SECONDS = 90.0    # for a run to begin: processes, CUDA, random steps
EVALUATE_ENV_STEPS = 25_000


# ---------------------------------------------------------------------------------------------- the bare loop
def bare(env: str, hardware: Hardware, seconds: float) -> dict[str, float]:
    """Updates/s on one batch: several whole updates or one as a graph, kernel by kernel, and phases as graphs of their own."""
    algorithm = algorithm_of(env, HIDDEN)
    on_gpu = {"several": (True, LAUNCH_UPDATES), "whole": (True, 1), "phases": (True, 0), "eager": (False, 1)}
    ways = on_gpu if hardware.on_gpu else {"eager": (False, 0)}
    return {name: round(BareUpdates(algorithm, hardware, BATCH, *way).rate(seconds), 1) for name, way in ways.items()}


def algorithm_of(env: str, hidden: tuple[int, ...]) -> Any:
    return algorithms.make(sac.Config(), envs.describe(env), NetConfig(hidden=hidden, activation="relu"), 1)


class BareUpdates:
    """Updates on a batch that never moves."""

    def __init__(self, algorithm: Any, hardware: Hardware, batch: int, graphs: bool, whole: int) -> None:
        """`whole` updates at once; 0 goes phase by phase."""
        self.learn, self.hardware, self.whole, self.done = algorithm.learn(0), hardware, whole, 0
        if hardware.on_gpu:
            self.learn.to(hardware)
        tree = noise(algorithm, batch)
        (self.minibatch,) = self.learn.minibatches(tree, self.learn.sums(tree), Progress(), np.random.default_rng(0))
        if graphs:  # only now: later batches would stay on the host until they are launched
            self.learn.capture()

    def update(self) -> int:
        """Phases that are due less often (td3's actor) are left out in between, as a learner does."""
        count = self.whole or 1
        dues = [phases_due(self.learn, Progress(learner_steps=self.done + k)) for k in range(count)]
        self.done += count
        if self.whole:
            self.learn.update((self.minibatch,) * count, tuple(dues))
            return count
        for phase in dues[0]:
            gradient, _ = self.learn.gradients(self.minibatch, phase)
            self.learn.apply(gradient, phase)
        return 1

    def rate(self, seconds: float) -> float:
        for _ in range(WARM_UPDATES):
            self.update()
        return work_rate(self.update, seconds, waiting_for(self.hardware))


def noise(algorithm: Any, batch: int) -> Tree:
    """A batch in the form of one from a table."""
    rng, items = np.random.default_rng(0), algorithm.record.layout.joined(batch).empty()
    for name in ("observation", "next_observation", "reward"):
        items[name][...] = rng.normal(size=items[name].shape)
    items["action"][...] = rng.uniform(-1, 1, items["action"].shape)
    items["discount"][...] = 0.99
    return {**items, "probability": np.full(batch, 1e-5), "table_size": np.full(1, 100_000)}


# ---------------------------------------------------------------------------------------------- a whole run
def trained(env: str, layout: str, seconds: float, device: str, seed: int, more: dict[str, Any]) -> dict[str, Any]:
    """What became of a run that had this many seconds of training. Its rates are those between its first updates and its end."""
    values = {"replay.batch_size": BATCH, "replay.samples_per_insert": float(BATCH), "replay.min_size": START,
              "algorithm.random_steps": START, "net.hidden": HIDDEN, "eval.every_env_steps": EVALUATE_ENV_STEPS,
              "eval.episodes": 10, **more}
    words = [word for name, value in values.items() for word in option_words(name, value)]
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        command = ["train", LAYOUTS[layout], env, "--device", device, "--seed", str(seed), "--max-seconds",
                   f"{seconds:g}", "--console.mode", "none", "--no-tensorboard", *words]
        done = subprocess.run([sys.executable, "-m", "shoal.cli", *command, "--run-dir", f"{folder}/run"], capture_output=True,
                              text=True, check=False, timeout=seconds + 2 * START_SECONDS,
                              preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM))
        shots = snapshots(Path(folder, "run", "metrics.jsonl"))
        summary = Path(folder, "run", "summary.json")
        found = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    head = {"layout": layout, "command": shlex.join(["shoal", *command])}
    learning = [shot for shot in shots if shot["learner_steps"] > WARM_UPDATES and not shot.get("last")]
    if done.returncode or len(learning) < 2:
        return {**head, "updates_per_second": 0.0, "error": tail(done.stderr or done.stdout or "no updates were made", 5)}
    first, last = learning[0], learning[-1]
    took = last["time"] - first["time"]
    kept = {name: found.get(name) for name in ("env_steps", "learner_steps", "eval_return", "seconds", "startup_seconds")}
    return {**head, "updates_per_second": round((last["learner_steps"] - first["learner_steps"]) / took, 1),
            "env_steps_per_second": round((last["env_steps"] - first["env_steps"]) / took, 1),
            "learner_idle": last.get("learner_idle"), "policy_lag": last.get("policy_lag"), "verdict": last.get("verdict"), **kept,
            "phases": {role: times for role, times in (last.get("roles") or {}).items()}, "evaluations": evaluations(shots)}


def option_words(name: str, value: Any) -> list[str]:
    word = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [word if value else f"--no-{word[2:]}"]
    return [word, *(str(part) for part in (value if isinstance(value, list | tuple) else (value,)))]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layouts", default="turns,apart", help=f"which to try, with commas: {', '.join(LAYOUTS)}")
    parser.add_argument("--seconds", type=float, default=380.0, help="of the long run")
    parser.add_argument("--trial-seconds", type=float, default=20.0, help="of the run of each layout that is tried before")
    parser.add_argument("--bare-seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="further settings of all runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    layouts = options.layouts.split(",")
    unknown = [name for name in layouts if name not in LAYOUTS]
    if unknown:
        parser.error(f"--layouts has {unknown[0]!r}; there are {', '.join(LAYOUTS)}")
    torch.set_num_threads(1)
    began = time.perf_counter()
    more = {name: json.loads(value) for name, _, value in (word.partition("=") for word in options.set)}
    command = shlex.join(["python", "-m", "benchmarks.gpu_sac", *(sys.argv[1:] if words is None else words)])
    results: dict[str, Any] = {**machine.describe(), "command": command}
    results["bare_updates_per_second"] = _told(bare(options.env, Hardware(options.device, GpuConfig()), options.bare_seconds))

    def run(layout: str, seconds: float, **early: Any) -> dict[str, Any]:
        return _told(trained(options.env, layout, seconds, options.device, options.seed, {**early, **more}))

    if len(layouts) > 1:  # random steps cost no updates: few of them, and no evaluation, make a trial short
        early = {"algorithm.random_steps": 1_000, "replay.min_size": 1_000, "eval.enabled": False}
        results["trials"] = [run(layout, options.trial_seconds, **early) for layout in layouts]
        layouts = [max(results["trials"], key=lambda trial: trial["updates_per_second"])["layout"]]
    results["run"] = whole = run(layouts[0], options.seconds)
    results["share_of_bare"] = round(whole["updates_per_second"] / max(results["bare_updates_per_second"].values()), 3)
    results["took_seconds"] = round(time.perf_counter() - began, 1)
    text = json.dumps(results, indent=1) + "\n"
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def _told(found: dict[str, Any]) -> dict[str, Any]:
    """What is found is shown at once."""
    sys.stderr.write(json.dumps(found) + "\n")
    return found


if __name__ == "__main__":
    main()
