"""python -m evidence.speed [--seconds 10] [--only PRESET] [--write]

Every preset on CartPole and Catch in one run, one after the other: env steps/s, the learner's idle share, policy lag, and bytes
written into wires per env step. `--write` makes docs/results/speed-presets.json and the table in docs/presets/README.md.

Bytes: what stream slots, calls (request and reply), broadcasts, groups and Hogwild's shared memory were written with, whole slots
counted; each is read at least once. Unrolls are written once and never pickled.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from evidence.lines import RESULTS, ROOT, commit, machine
from shoal import runtime
from shoal.bench.text_tables import UNMEASURED
from shoal.experiment.config import Plan
from shoal.experiment.prepare import prepare
from shoal.experiment.presets import load_preset
from shoal.experiment.run import plan_of
from shoal.runtime.fork_server_client import ForkServerClient
from shoal.telemetry.snapshot import Reading, ReadingWindow
from tests.runtime.harness import Watch

__all__ = ["main", "measure"]

PRESETS = ("a2c", "ppo", "impala", "a3c", "a3c master", "ga3c", "seed", "appo", "rapid_ppo", "gala", "dqn", "double_dqn", "apex",
           "r2d2", "seed_r2d2")
ENVS = ("CartPole-v1", "shoal/Catch-v0")
PAGE = ROOT / "docs" / "presets" / "README.md"
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"
SETTLE = 2.0


class SpeedWatch(Watch):
    """Two readings: when the run has settled, and `seconds` later."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds=seconds)
        self.window, self.settled, self.bytes = ReadingWindow(), 0.0, 0.0

    def tick(self, control: Any) -> None:
        now, steps = time.monotonic(), control.total("env_steps")
        if not steps:
            self.start = now
        elif not self.settled and now - self.start >= SETTLE:
            self.settled, self.first_bytes, self.first_steps = now, written(control), steps
            self.window.push(Reading(now, control.snapshot(), control.wires()))
        elif self.settled and now - self.settled >= self.seconds:
            self.window.push(Reading(now, control.snapshot(), control.wires()))
            self.bytes = (written(control) - self.first_bytes) / max(1.0, steps - self.first_steps)
            control.stop("measured")


def written(control: Any) -> float:
    """Bytes written into all wires so far."""
    total = 0.0
    for wire in control.program.wires.values():
        numbers = wire.numbers()
        if "bytes_moved" in numbers:
            total += numbers["bytes_moved"]
        else:  # shared: every update writes all of it
            total += control.total("learner_steps") * numbers["bytes"]
    return total


def plan(case: str, env: str) -> Plan:
    name, _, mode = case.partition(" ")
    overrides: dict[str, Any] = {"eval": {"enabled": False}}
    if load_preset(name).architecture in ("async_gradients", "gossip"):  # their weights are published for the evaluator only
        overrides = {"eval": {"episodes": 1, "every_env_steps": 10**9}}
    return plan_of(name, env, None, {"mode": mode} if mode else None, overrides)


def measure(case: str, env: str, seconds: float, fork_server: ForkServerClient | None = None) -> dict[str, Any]:
    """One preset on one environment, for this many seconds after it has settled."""
    prepared, watch = prepare(plan(case, env)), SpeedWatch(seconds)
    with tempfile.TemporaryDirectory() as folder:
        runtime.run(prepared.program(), watch, "local", Path(folder), fork_server=fork_server)
    shot = watch.window.snapshot(whole_run=True)
    return {"preset": case, "env": env, "actors": prepared.plan.experiment.actor_count,
            "env_steps_per_second": round(shot["env_steps_per_second"]), "learner_steps_per_second": round(
                shot["learner_steps_per_second"], 1), "learner_idle": round(shot["learner_idle"], 3),
            "policy_lag": {key: round(value, 2) for key, value in shot["policy_lag"].items()},
            "bytes_per_env_step": round(watch.bytes, 1)}


def table(found: dict[str, Any]) -> str:
    rows = ["| preset | environment | actors | env steps/s | learner idle | policy lag mean / p95 / max | bytes per env step |",
            "|---|---|---|---|---|---|---|"]
    for case in found["cases"]:
        lag = " / ".join(f"{case['policy_lag'][key]:.3g}" for key in ("mean", "p95", "max"))
        rows.append(f"| {case['preset']} | {case['env']} | {case['actors']} | {case['env_steps_per_second']:,} | "
                    f"{case['learner_idle']:.0%} | {lag} | {case['bytes_per_env_step']:,.0f} |")
    where = found["machine"]
    note = (f"{found['seconds']:g} s each after {SETTLE:g} s, one after the other, {found['date']}, commit {found['commit']}: "
            f"{where['cores']} cores of {where['cpu']}, load {where['load']:g} at the start. {UNMEASURED}")
    return "\n".join([*rows, "", note])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evidence.speed", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each case, after it has settled")
    parser.add_argument("--only", default="", help="presets whose name contains this")
    parser.add_argument("--write", action="store_true", help="write the json and the table")
    options = parser.parse_args()
    found: dict[str, Any] = {"commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine(),
                             "seconds": options.seconds, "cases": []}
    for case in (name for name in PRESETS if options.only in name):
        for env in ENVS:
            found["cases"].append(measure(case, env, options.seconds))
            print(json.dumps(found["cases"][-1]), flush=True)
    if options.write:
        (RESULTS / "speed-presets.json").write_text(json.dumps(found, indent=1) + "\n")
        text = PAGE.read_text(encoding="utf-8")
        head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END):]
        PAGE.write_text(f"{head}\n{table(found)}\n{tail}", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
