"""Peers deserve their best settings: a few of each, tried in turn: `python -m shoal.bench.peers.search --only rllib`.

What wins is written by hand into its driver's SETTINGS. Each line differs from those settings in what it names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.bench.__main__ import say
from shoal.bench.cases import CARTPOLE, PONG, Scene
from shoal.bench.measure import Outcome, Spread, alternate, reported
from shoal.bench.peers.lineup import drive
from shoal.bench.tables import UNMEASURED

__all__ = ["TRIALS", "main"]

Trial = tuple[str, Scene, Mapping[str, Any], tuple[Mapping[str, Any], ...]]  # peer, scene, order, settings to try

RUNNERS = ({}, {"threads": 2}, {"envs": 16}, {"envs": 32}, {"runners": 1}, {"runners": 3})
LAYOUTS = ({}, {"learners": 1}, {"vector": False}, {"vector": False, "learners": 1}, {"envs": 256, "batch": 8192},
           {"fragment": 64, "batch": 4096, "in_flight": 2})
TRIALS: dict[str, Trial] = {
    "rllib PPO CartPole": ("rllib", CARTPOLE, {"algorithm": "ppo"}, (*RUNNERS, {"batch": 4096}, {"batch": 16384})),
    "rllib IMPALA CartPole": ("rllib", CARTPOLE, {"algorithm": "impala"}, (
        *RUNNERS, {"batch": 500}, {"batch": 4096}, {"broadcast": 4}, {"in_flight": 2}, {"broadcast": 4, "in_flight": 2})),
    "rllib IMPALA CartPole, other layouts": ("rllib", CARTPOLE, {"algorithm": "impala"}, LAYOUTS),
    "rllib APPO CartPole": ("rllib", CARTPOLE, {"algorithm": "appo"}, LAYOUTS),
    "rllib PPO Pong": ("rllib", PONG, {"algorithm": "ppo"}, ({}, {"threads": 1}, {"envs": 8}, {"batch": 1024})),
    "rllib IMPALA Pong": ("rllib", PONG, {"algorithm": "impala"}, (
        {}, {"threads": 2}, {"envs": 8}, {"broadcast": 4, "in_flight": 2}, {"batch": 256}, {"learners": 1}, {"runners": 1},
        {"envs": 32, "batch": 1024})),
    "rllib APPO Pong": ("rllib", PONG, {"algorithm": "appo"}, (
        {}, {"threads": 2}, {"learners": 1}, {"in_flight": 2}, {"envs": 32, "batch": 1024})),
    "sample_factory CartPole": ("sample_factory", CARTPOLE, {}, (
        {}, {"num_envs_per_worker": 32}, {"num_workers": 1}, {"serial_mode": True, "async_rl": False}, {"batch_size": 8192})),
    "sample_factory Pong": ("sample_factory", PONG, {}, (
        {}, {"num_envs_per_worker": 8}, {"worker_num_splits": 1}, {"batch_size": 512}, {"serial_mode": True, "async_rl": False})),
    "sb3 CartPole": ("sb3", CARTPOLE, {"epochs": 1}, ({}, {"n_envs": 128}, {"n_envs": 256, "n_steps": 16}, {"n_steps": 32})),
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.bench.peers.search", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="trials whose name holds these words")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args(words)
    for name, (peer, scene, order, settings) in TRIALS.items():
        if given.only.lower() in name.lower():
            say(name)
            runners = {str(dict(setting)): _runner(peer, scene, order, setting) for setting in settings}
            found = alternate(runners, given.rounds, say)
            speeds = {who: Spread.of([run.env_steps_per_second for run in runs]).median for who, runs in found.items()}
            say(f"  best: {max(speeds, key=lambda who: speeds[who] if speeds[who] == speeds[who] else 0.0)}")
    say(UNMEASURED)
    return 0


def _runner(peer: str, scene: Scene, order: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    def run() -> Outcome:
        seconds = scene.warm_seconds + scene.seconds
        whole = {"scene": scene.reference, "seconds": seconds, **order, "settings": dict(settings)}
        return reported(drive(peer, whole, seconds), scene.warm_seconds)

    return run


if __name__ == "__main__":
    sys.exit(main())
