"""Callbacks that log a run elsewhere: `shoal.train(..., callbacks=[shoal.log.wandb(project="walkers")])`.

They log the numbers that metrics.jsonl has, nested ones by their path (losses/entropy), at the run's env steps. Each has a process
of its own, so a crash in a tracking library does not reach the run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.telemetry.callbacks import Callback, scalars

__all__ = ["MLflow", "WeightsAndBiases", "mlflow", "wandb"]


def wandb(**init: Any) -> WeightsAndBiases:
    """Weights & Biases; the arguments are those of wandb.init (project, name, mode, ...)."""
    check_installed("wandb")
    return WeightsAndBiases(init)


def mlflow(experiment: str | None = None, tracking_uri: str | None = None) -> MLflow:
    """MLflow, into a server or a file store (tracking_uri="file:./mlruns")."""
    check_installed("mlflow")
    return MLflow(experiment, tracking_uri)


def check_installed(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"{name} is not installed here; pip install {name}")


class WeightsAndBiases(Callback):
    """One W&B run for one run."""

    own_process = True

    def __init__(self, init: Mapping[str, Any]) -> None:
        self._init, self._run = dict(init), None  # type: dict[str, Any], Any

    def on_start(self, directory: Path, config: Mapping[str, Any]) -> None:
        given = {"name": directory.name, "dir": str(directory), "config": dict(config), **self._init}
        self._run = importlib.import_module("wandb").init(**given)

    def on_metrics(self, metrics: Mapping[str, Any]) -> None:
        self._run.log(scalars(metrics), step=int(metrics["env_steps"]))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(scalars(summary))
        self._run.finish()


class MLflow(Callback):
    """One MLflow run for one run."""

    own_process = True

    def __init__(self, experiment: str | None, tracking_uri: str | None) -> None:
        self._experiment, self._uri = experiment, tracking_uri
        self._module: Any = None
        self._client: Any = None
        self._run = ""

    def on_start(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._module = importlib.import_module("mlflow")
        self._client = self._module.MlflowClient(tracking_uri=self._uri)
        name = self._experiment or "shoal"
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=directory.name).info.run_id
        for key in ("preset", "env", "seed"):
            if config.get(key) is not None:
                self._client.log_param(self._run, key, config[key])

    def on_metrics(self, metrics: Mapping[str, Any]) -> None:
        entity, step = self._module.entities.Metric, int(metrics["env_steps"])
        rows = [entity(name, value, int(1000 * metrics["time"]), step) for name, value in scalars(metrics).items()]
        for first in range(0, len(rows), 500):  # its server takes at most 1,000 at once
            self._client.log_batch(self._run, metrics=rows[first : first + 500])

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._client.set_terminated(self._run)
