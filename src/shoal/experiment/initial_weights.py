"""`--init-from RUN`: a run begins with the weights of another one. Counts, optimisers and schedules begin anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.experiment.evaluation import learned_arrays
from shoal.experiment.policies import PreparedPolicy
from shoal.experiment.prepare import Prepared
from shoal.experiment.rundir import RunDir
from shoal.experiment.values import json_values

__all__ = ["initial_weights"]

NORMALISED = "observations.mean"


def initial_weights(prepared: Prepared, path: str) -> dict[str, dict[str, np.ndarray]]:
    """By policy, the weights of the newest checkpoint of another run: those of the policy of the same name, or of the only one."""
    rundir = RunDir.open(Path(path))
    folder = rundir.checkpoints().sound(tables=False)
    if folder is None:
        raise ConfigError(f"--init-from {path} has no whole checkpoint; give another run")
    config = rundir.config()
    return {name: _weights(prepared, policy, folder, config, path) for name, policy in prepared.policies.items()}


def _weights(prepared: Prepared, policy: PreparedPolicy, folder: Path, config: Mapping[str, Any],
             path: str) -> dict[str, np.ndarray]:
    saved = learned_arrays(folder, f"{policy.name}.") or learned_arrays(folder)
    here = {name: tensor.numpy() for name, tensor in policy.algorithm.learn(0).weights.items()}
    if "params" not in saved:
        raise ConfigError(f"--init-from {path} holds no weights of a policy {policy.name}; give a run that has one")
    _check_fit(saved, here, prepared, config, path)
    taken = {name: saved[name] for name, array in here.items() if name in saved and saved[name].shape == array.shape}
    params = taken["params"]
    copies = {name: params for name, array in here.items() if name not in taken and array.shape == params.shape}  # target networks
    return {**taken, **copies}


def _check_fit(saved: Mapping[str, np.ndarray], here: Mapping[str, np.ndarray], prepared: Prepared, config: Mapping[str, Any],
               path: str) -> None:
    there, now = saved["params"].size, here["params"].size
    nets = config.get("net", {}), json_values(prepared.plan.experiment.net)
    changed = next((name for name in nets[1] if nets[0].get(name) != nets[1][name]), None)
    if changed is not None:
        raise ConfigError(f"--init-from {path} does not fit: its net.{changed} is {nets[0].get(changed)}, and here it is "
                          f"{nets[1][changed]}; give --net.{changed.replace('_', '-')} as it was there")
    if there != now:
        raise ConfigError(f"--init-from {path} does not fit: its network has {there:,} parameters, and this one has {now:,}; use "
                          "the same algorithm, and an environment whose observations and actions have the same shapes")
    if NORMALISED in saved and NORMALISED not in here:
        raise ConfigError(f"--init-from {path} normalises observations, and this run does not; add "
                          "--algorithm.normalise-observations")
    if NORMALISED in here and NORMALISED not in saved:
        raise ConfigError(f"--init-from {path} does not normalise observations, and this run does; add "
                          "--algorithm.no-normalise-observations")
