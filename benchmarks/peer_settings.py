"""Peers deserve their best settings: tries a few of each, as a suite: `python -m benchmarks.peer_settings [--only rllib]`.

The best ones are written by hand into the SETTINGS of its driver. Each line differs from those settings in what it names. Results
go to runs/bench/peer-settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.bench.command import run_suite
from shoal.bench.results_folder import ResultsFolder
from shoal.bench.suite import Suite, parse_suite

__all__ = ["TRIALS", "main", "suite"]

CARTPOLE = {"env": "CartPole-v1", "max_seconds": 6.0, "warm_seconds": 2.0}
PONG = {"env": "ALE/Pong-v5", "max_seconds": 15.0, "warm_seconds": 3.0}
Trial = tuple[str, Mapping[str, Any], Mapping[str, Any], tuple[Mapping[str, Any], ...]]  # peer, case, order, settings to try

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


def suite(rounds: int = 1) -> Suite:
    """Every trial as a case."""
    cases = [{"name": f"{name}: {dict(settings) or 'as it is'}", "peer": peer, **case,
              "order": {**order, "settings": dict(settings)}}
             for name, (peer, case, order, trials) in TRIALS.items() for settings in trials]
    return parse_suite("peer-settings", {"title": "Settings of the peers", "defaults": {"seeds": list(range(1, rounds + 1))},
                                         "case": cases})


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_settings", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="trials whose name contains these words")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args(words)
    return run_suite(suite(given.rounds), ResultsFolder(Path("runs") / "bench" / "peer-settings"), given.only)


if __name__ == "__main__":
    sys.exit(main())
