"""Learning from recordings alone (issue 21, specs/value.md 13d): what each preset makes of the same data.

    CartPole     20,000 decisions, half random, half of a dqn that was stopped at a return of 150; bc, iql, cql, and dqn unchanged
    PointGrasp   20,000 scripted episodes, a quarter of them successful; bc and iql
    Pendulum     what a sac run did in its first 20,000 decisions; bc, td3_bc, iql and cql

Returns are those of the last version over fresh episodes, and so is the largest q-value over all recorded states. Everything runs
inline, so results depend on the seed and not on the machine. Values of the presets were chosen on seed 11.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from evidence.lines import Line, shoal
from shoal import offline

__all__ = ["LINES", "recorded_pendulum"]

CARTPOLE, GRASP, PENDULUM = "CartPole-v1", "shoal/PointGrasp-v0", "Pendulum-v1"
HALF, UPDATES, GRASPS, SWINGS = 10_000, 10_000, 20_000, 20_000
BOUND = 99.3  # no q-value of CartPole with a discount of 0.99 and 500 steps is larger
INLINE = ("--runtime", "inline", "--console.mode", "none", "--no-tensorboard")
QUIET = (*INLINE, "--policy", "last", "--eval.every-learner-steps", "1000000000")
LOGS = "SHOAL_EVIDENCE_LOGS"


def command(*words: str) -> None:
    done = shoal(*words, timeout=7200)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


def learned(preset: str, logs: str, env: str, seed: int, updates: int, *more: str) -> dict[str, Any]:
    """Train on the logs; what the last version gets, and what its values promise."""
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        words = (logs, "--env", env) if preset != "dqn" else (env, "--demos", logs, "--offline")
        command("train", preset, *words, "--max-learner-steps", str(updates), "--seed", str(seed), "--run-dir", run, *QUIET,
                "--eval.last-env-steps", "20000", *more)
        summary = json.loads(Path(run, "summary.json").read_text())
        found = {"return": summary["eval_return"], "seconds": summary["seconds"]}
        return {**found, "max_q": largest_q(run, logs)} if preset in ("dqn", "cql") and env == CARTPOLE else found


def largest_q(run: str, logs: str) -> float:
    """Over all recorded states and all actions."""
    import shoal as library

    loaded = library.load(run)
    policy: Any = loaded.prepared.algorithm.policy()
    policy.load(loaded.published)
    seen = np.concatenate([one.observation[:-1] for one in offline.open_demos(logs).episodes()])
    with torch.inference_mode():
        return float(policy.model.values(torch.from_numpy(seen)).max())


# ---------------------------------------------------------------------------------------------- CartPole
def mixed(folder: str, seed: int) -> str:
    """Half random, half medium."""
    logs, run = f"{folder}/logs", f"{folder}/medium"
    command("data", "record", "random", CARTPOLE, "--episodes", "100000", "--steps", str(HALF), "--seed", str(seed), "--out", logs)
    command("train", "dqn", CARTPOLE, "--until-return", "150", "--max-env-steps", "100000", "--seed", str(seed), "--run-dir", run,
            *INLINE, "--eval.every-env-steps", "1000")
    command("data", "record", run, CARTPOLE, "--episodes", "100000", "--steps", str(HALF), "--seed", str(seed), "--out", logs,
            "--append")
    return logs


def cartpole(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        logs = mixed(folder, seed)
        info = offline.open_demos(logs).info
        assert info.returns is not None
        found = {name: learned(name, logs, CARTPOLE, seed, UPDATES) for name in ("bc", "iql", "cql", "dqn")}
    wanted = max(300.0, 1.5 * info.returns.mean)
    met = all(found[name]["return"] >= wanted for name in ("iql", "cql")) and found["dqn"]["max_q"] > BOUND > found["cql"]["max_q"]
    return {"met": met, "data_mean": info.returns.mean, "wanted": wanted, "each": found}


# ---------------------------------------------------------------------------------------------- PointGrasp
def grasps(seed: int) -> dict[str, Any]:
    """A grasp succeeded if its episode returned more than 0.5: success gives 1 less 0.05 for each step before."""
    with tempfile.TemporaryDirectory() as folder:
        logs = f"{folder}/logs"
        command("data", "record", "scripted", GRASP, "--episodes", str(GRASPS), "--num-envs", "64", "--seed", str(seed),
                "--out", logs)
        successes = {}
        for name in ("bc", "iql"):
            run = f"{folder}/{name}"
            command("train", name, logs, "--env", GRASP, "--max-learner-steps", str(UPDATES), "--seed", str(seed), "--run-dir", run,
                    *QUIET, "--eval.last-env-steps", "100")
            successes[name] = success(run, seed)
    return {"met": 0.25 <= successes["bc"] <= 0.45 and successes["iql"] >= 0.7, "success": successes}


def success(run: str, seed: int) -> float:
    import shoal as library
    from shoal.experiment.evaluation import evaluate

    loaded = library.load(run)
    env = loaded.prepared.source.make(100)
    result = evaluate(loaded.prepared.algorithm, loaded.published, env, 1_000, seed, 100)
    return float((np.asarray(result.returns) > 0.5).mean())


# ---------------------------------------------------------------------------------------------- Pendulum
class Recorded(gym.Wrapper):  # type: ignore[type-arg]
    """Writes down every episode that is played in it."""

    def __init__(self, env: gym.Env[Any, Any], path: str) -> None:
        super().__init__(env)
        info = offline.RecordingInfo(PENDULUM, env.observation_space, env.action_space, kwargs={})
        self.writer = offline.DemoWriter.create(Path(path), info, {"source": "a sac run"})
        self.rows: list[tuple[Any, ...]] = []

    def reset(self, **kwargs: Any) -> Any:
        seen, info = self.env.reset(**kwargs)
        self.rows, self.first = [], seen
        return seen, info

    def step(self, action: Any) -> Any:
        seen, reward, terminated, truncated, info = self.env.step(action)
        self.rows.append((action, reward, terminated, truncated, seen))
        if terminated or truncated:
            actions, rewards, ends, cuts, rest = (np.array(column) for column in zip(*self.rows, strict=True))
            self.writer.add(offline.Episode(np.concatenate([self.first[None], rest]).astype(np.float32), actions.astype(np.float32),
                                            rewards.astype(np.float32), ends.astype(bool), cuts.astype(bool)))
            self.writer.flush_if_due()
        return seen, reward, terminated, truncated, info

    def close(self) -> None:
        self.writer.flush()
        super().close()


def recorded_pendulum() -> gym.Env[Any, Any]:
    """Pendulum whose episodes are written down where the first one that is made says; others only play."""
    env, path = gym.make(PENDULUM), os.environ.get(LOGS)
    return Recorded(env, path) if path and not Path(path).exists() else env


def pendulum(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        logs = f"{folder}/logs"
        os.environ[LOGS] = logs
        try:
            command("train", "sac", "evidence.offline:recorded_pendulum", "--max-env-steps", str(SWINGS), "--seed", str(seed),
                    "--run-dir", f"{folder}/sac", *INLINE, "--no-eval.enabled", "--net.hidden", "64", "64")
        finally:
            del os.environ[LOGS]
        info = offline.open_demos(logs).info
        assert info.returns is not None
        found = {name: learned(name, logs, PENDULUM, seed, UPDATES, "--net.hidden", "64", "64")
                 for name in ("bc", "td3_bc", "iql", "cql")}
    met = all(found[name]["return"] >= -350 for name in ("iql", "cql"))
    return {"met": met, "data_mean": info.returns.mean, "each": found}


def line(name: str, words: str, run: Any, seeds: Sequence[int] = (1, 2, 3, 4, 5)) -> Line:
    return Line(f"offline-{name}", 21, words, run, seeds=tuple(seeds))


LINES = [
    line("cartpole-mix", "CartPole-v1, half random and half medium data: iql and cql >= 300 and >= 1.5 times the data's mean "
         f"after {UPDATES:,} updates; the largest q-value of dqn is above {BOUND}, that of cql below", cartpole),
    line("pointgrasp", "PointGrasp, scripted logs: bc succeeds in 25 to 45 %, iql in >= 70 %", grasps),
    line("pendulum", f"Pendulum-v1, the first {SWINGS:,} decisions of sac: iql and cql >= -350", pendulum),
]
