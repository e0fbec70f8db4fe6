"""Runs of shoal as trials of Ray Tune: Tune chooses the values, stops, copies and restores trials; shoal trains.

    from ray import tune
    Trainable = shoal.trainable("ppo", "CartPole-v1", every_env_steps=20_000)
    tune.Tuner(Trainable, param_space={"algorithm.lr": tune.loguniform(1e-4, 1e-2)},
               tune_config=tune.TuneConfig(metric="eval_return", mode="max", num_samples=8)).fit()

A trial's config has the names of options. An iteration is an interval of `every_env_steps`, in a process of its own, followed by an
evaluation. A checkpoint is a whole run directory: `shoal eval`, `play` and `resume` work on CHECKPOINT/run. Tune's PBT copies a
checkpoint and gives it another config: parameters and optimiser are taken over, and learning continues with the new values.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, RoleFailed
from shoal.experiment.checkpoints import read_meta
from shoal.experiment.rundir import RunDir
from shoal.tuning.checks import env_word, member_options
from shoal.tuning.member_run import set_values, slice_words, value_words
from shoal.tuning.slices import start_process

__all__ = ["trainable"]

REPORTED = ("env_steps", "learner_steps", "eval_return", "eval_episodes", "train_return", "seconds")
LEFT_OUT = (".lock", "tensorboard", "logs", "mailbox")


def trainable(preset: str, env: str | Callable[..., Any], *, every_env_steps: int, **overrides: Any) -> type:
    """A class for `ray.tune.Tuner`. Everything else overrides a value of all trials."""
    try:
        from ray.tune import Trainable
    except ImportError as error:
        raise ConfigError(f"Ray Tune cannot be imported ({error}); run `pip install 'shoal[tune]'`") from None
    word = env_word(env)
    start = (preset, word, *member_options(preset, word, value_words(overrides), intervals=True))

    class ShoalTrainable(Trainable):  # type: ignore[misc]  # Ray Tune has no types
        """A trial: a run of shoal in the trial's own folder."""

        def setup(self, config: dict[str, Any]) -> None:
            self.values = {name.replace("-", "_"): value for name, value in config.items() if name != "seed"}
            self.seed = int(config.get("seed", 0))
            self.run = RunDir(Path(self.logdir).resolve() / "run")
            self.process: subprocess.Popen[bytes] | None = None

        def step(self) -> dict[str, Any]:
            newest = self.run.checkpoints().newest()
            done = 0 if newest is None else int(read_meta(newest).get("env_steps", 0))
            log = self.run.path.with_name("shoal.log")
            words = slice_words(start, self.values, self.seed, self.run.path, done + every_env_steps, None)
            self.process = start_process(words, log)
            if code := self.process.wait():
                tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                raise RoleFailed(f"shoal ended with exit code {code}: {' '.join(tail)}; see {log}")
            summary = self.run.summary()
            return {name: summary.get(name) for name in REPORTED}

        def save_checkpoint(self, folder: str) -> None:
            shutil.copytree(self.run.path, Path(folder, "run"), ignore=shutil.ignore_patterns(*LEFT_OUT))

        def load_checkpoint(self, folder: str) -> None:
            """Also another trial's: its state, this one's values."""
            shutil.rmtree(self.run.path, ignore_errors=True)
            shutil.copytree(Path(folder, "run"), self.run.path)
            set_values(self.run, self.values)

        def reset_config(self, config: dict[str, Any]) -> bool:
            """For Tune's reuse_actors; the checkpoint that follows is loaded with these values."""
            shutil.rmtree(self.run.path, ignore_errors=True)
            self.setup(config)
            return True

        def cleanup(self) -> None:
            if self.process is not None and self.process.poll() is None:
                self.process.terminate()
                self.process.wait()

    return ShoalTrainable
