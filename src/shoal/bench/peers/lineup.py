"""Who runs with which settings. Later issues add lines here; settings of the peers themselves stand in their drivers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.bench.cases import CASES, Case, Scene
from shoal.bench.measure import Outcome, last_json, reported, run_reference, run_shoal, start, tail
from shoal.bench.peers.install import PEERS

__all__ = ["LINEUP", "RACE", "SAME_ENV", "Race", "Runner", "race", "same_env"]

DRIVERS = Path(__file__).parent / "drivers"
PYTHONS = {peer.name: peer.python for peer in PEERS}


@dataclass(frozen=True)
class Runner:
    """One row of a table: shoal with a case, the reference loop, or a peer with an order for its driver."""

    name: str
    scene: Scene
    peer: str | None = None
    order: Mapping[str, Any] = field(default_factory=dict)
    case: Case | None = None

    def run(self, scale: float = 1.0) -> Outcome:
        if self.case is not None:
            return run_shoal(self.case, scale)
        if self.peer is None:
            return run_reference(self.scene, scale)
        warm, seconds = self.scene.warm_seconds * scale, (self.scene.warm_seconds + self.scene.seconds) * scale
        done = drive(self.peer, {"scene": self.scene.reference, "seconds": seconds, **self.order}, seconds)
        return reported(done, warm)


def drive(peer: str, order: Mapping[str, Any], seconds: float) -> Any:
    """A driver in its peer's virtual environment."""
    env = {**os.environ, "PYTHONPATH": str(DRIVERS)}
    return start([str(PYTHONS[peer]), str(DRIVERS / f"drive_{peer}.py"), json.dumps(order)], seconds, cwd=DRIVERS, env=env)


def same_env(case: Case, env: str, overrides: Mapping[str, Any]) -> Case:
    """A case with the per-step Python environment that the peers have."""
    module = "shoal.bench.peers.drivers.same_env"
    return replace(case, scene=replace(case.scene, env=f"{module}:{env}"), overrides={**case.overrides, **overrides})


def lineup(cases: Mapping[str, Case], peers: tuple[Runner, ...], scene: str, env: str) -> tuple[Runner, ...]:
    """shoal first, then shoal in the peers' environment, the reference loop, the peers."""
    chosen = {name: case for name, case in cases.items() if name.startswith(scene)}
    first = peers[0].scene
    own = [Runner(f"shoal {name.removeprefix(scene).strip()}", first, case=replace(case, scene=first))
           for name, case in chosen.items()]
    same = [Runner(f"{runner.name}, per-step Python environment", first, case=same_env(runner.case, env, SAME_ENV[scene]))
            for runner in own if runner.case is not None]
    return (*own, *same, Runner("reference loop", first), *peers)


SAME_ENV: dict[str, dict[str, Any]] = {
    "CartPole": {"architecture.envs_per_actor": 64, "architecture.one_place": False, "actors": 2},
    "Pong": {},
}
"""What shoal changes when an environment is stepped in Python: several processes, as the peers have."""

_cases = {case.name: case for case in CASES}
_cartpole = _cases["CartPole impala"].scene
_pong = _cases["Pong impala"].scene

LINEUP: dict[str, tuple[Runner, ...]] = {
    "CartPole-v1": lineup(_cases, (
        Runner("Sample Factory APPO", _cartpole, "sample_factory"),
        Runner("SB3 PPO, 1 epoch", _cartpole, "sb3", {"epochs": 1}),
        Runner("SB3 PPO, 4 epochs", _cartpole, "sb3", {"epochs": 4, "settings": {"batch_size": 1024}}),
        Runner("RLlib PPO, 1 epoch", _cartpole, "rllib", {"algorithm": "ppo"}),
        Runner("RLlib IMPALA", _cartpole, "rllib", {"algorithm": "impala"}),
        Runner("RLlib APPO", _cartpole, "rllib", {"algorithm": "appo"}),
    ), "CartPole", "cartpole"),
    "ALE/Pong-v5": lineup(_cases, (
        Runner("Sample Factory APPO", _pong, "sample_factory"),
        Runner("SB3 PPO, 1 epoch", _pong, "sb3", {"epochs": 1, "threads": 2}),
        Runner("SB3 PPO, 4 epochs", _pong, "sb3", {"epochs": 4, "threads": 2}),
        Runner("RLlib PPO, 1 epoch", _pong, "rllib", {"algorithm": "ppo"}),
        Runner("RLlib IMPALA", _pong, "rllib", {"algorithm": "impala"}),
        Runner("RLlib APPO", _pong, "rllib", {"algorithm": "appo"}),
    ), "Pong", "pong"),
}


# ---------------------------------------------------------------------------------------------- seconds to a return
@dataclass(frozen=True)
class Race:
    """Seconds of training until a mean over 100 episodes is `goal`; the rule stands in shoal.bench.race."""

    env: str = "CartPole-v1"
    goal: float = 475.0
    seeds: tuple[int, ...] = (1, 2, 3)
    most_seconds: float = 60.0
    runners: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {
        "shoal ppo_quick": {"preset": "ppo_quick"},
        "SB3 PPO, 4 epochs": {"peer": "sb3", "race": "4 epochs"},
        "SB3 PPO, rl-zoo's settings (20 epochs)": {"peer": "sb3", "race": "rl-zoo, 20 epochs"},
        "SB3 PPO, tuned for this race": {"peer": "sb3", "race": "tuned"},
    })


RACE = Race()


def race(plan: Race, who: str, seed: int) -> dict[str, Any]:
    """One seed of one runner."""
    order = {"seconds": plan.most_seconds, "goal": plan.goal, "seed": seed, **plan.runners[who]}
    if "preset" in order:
        done = start([sys.executable, "-m", "shoal.bench.race", json.dumps({**order, "env": plan.env})], plan.most_seconds)
    else:
        done = drive(order.pop("peer"), {"scene": "cartpole", **order}, 3 * plan.most_seconds)
    report = last_json(done.stdout)
    if done.returncode or report is None:
        return {"seed": seed, "seconds": None, "eval_return": None, "error": f"exit code {done.returncode}: {tail(done.stderr)}"}
    return {"seed": seed, "seconds": report["seconds"], "eval_return": report["eval_return"], "error": None}
