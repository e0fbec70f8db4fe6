"""Sample Factory's APPO, timed."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from typing import Any

import same_env
import torch
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

COMMON: dict[str, Any] = {
    "algo": "APPO", "device": "cpu", "use_rnn": False, "recurrence": 1, "num_epochs": 1, "num_batches_per_epoch": 1,
    "with_vtrace": False, "normalize_input": False, "normalize_returns": False, "worker_num_splits": 2,
    "policy_workers_per_policy": 1, "save_every_sec": 3600, "save_best_every_sec": 3600, "save_milestones_sec": -1,
    "decorrelate_experience_max_seconds": 0, "serial_mode": False, "async_rl": True, "stats_avg": 10,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "cartpole": {"num_workers": 2, "num_envs_per_worker": 64, "batch_size": 4096, "rollout": 32, "nonlinearity": "tanh",
                 "encoder_mlp_layers": "64 64", "reward_scale": 0.1},
    "pong": {"num_workers": 2, "num_envs_per_worker": 16, "batch_size": 1024, "rollout": 32, "nonlinearity": "relu",
             "encoder_conv_architecture": "convnet_atari", "encoder_conv_mlp_layers": "512", "obs_scale": 255.0},
}


class ReportMarks(AlgoObserver):  # type: ignore[misc]  # Sample Factory is not installed where types are checked
    """Marks whenever the learner has reported; its env steps are decisions, because our environment hides frame-skip.

    2.1.1 never counts the seconds that --train_for_seconds is compared with, so the limit of steps ends the run instead.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.marks: list[tuple[float, int]] = []
        self.started: float | None = None
        self.began_at: float | None = None

    def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
        now, steps = time.perf_counter(), sum(runner.env_steps.values())
        if self.started is None:
            self.started, self.began_at = now, time.time()
        if not self.marks or steps > self.marks[-1][1]:
            self.marks.append((now - self.started, steps))
        if now - self.started > self.seconds:
            runner.cfg.train_for_env_steps = 0


def create(scene: str, name: str, cfg: object = None, env_config: object = None, render_mode: str | None = None) -> object:
    return same_env.make(scene)


def main(order: dict[str, Any]) -> None:
    scene = order["scene"]
    settings = {**COMMON, **SETTINGS[scene], **order.get("settings", {})}
    register_env("same", partial(create, scene))
    with tempfile.TemporaryDirectory(prefix="sample-factory-") as folder:
        values = {"env": "same", "experiment": "bench", "train_dir": folder,
                  "seed": order.get("seed", 0), **settings}
        words = [word for name, value in values.items() for word in _flag(name, value)]
        parser, _ = parse_sf_args(argv=words)
        cfg = parse_full_cfg(parser, words)
        _, runner = make_runner(cfg)
        recorder = ReportMarks(order["seconds"])
        runner.register_observer(recorder)
        runner.init()
        runner.run()
    print(json.dumps({"version": version("sample-factory"), "torch": torch.__version__, "settings": settings,
                      "marks": recorder.marks, "began_at": recorder.began_at, "samples_per_insert": settings["num_epochs"]}))


def _flag(name: str, value: object) -> list[str]:
    """--encoder_mlp_layers 64 64, --use_rnn False."""
    return [f"--{name}", *str(value).split()] if name.endswith("layers") else [f"--{name}={value}"]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
