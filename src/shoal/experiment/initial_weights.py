"""`--init-from RUN`: a run begins with the weights of another one, all of them or those of the layers that fit. Counts, optimisers
and schedules begin anew."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.experiment.evaluation import learned_arrays
from shoal.experiment.policies import PreparedPolicy
from shoal.experiment.prepare import Prepared, plan_from_json, prepare
from shoal.experiment.references import check_trust, modules_of
from shoal.experiment.rundir import run_or_best_seed
from shoal.experiment.values import json_values
from shoal.learning import Algorithm, LayeredLearn

__all__ = ["initial_weights"]

NORMALISED = "observations.mean"
NAMED = 6  # layers in a sentence

Arrays = Mapping[str, np.ndarray]
Layers = dict[str, dict[str, np.ndarray]]  # by layer, its parameters by name


def initial_weights(prepared: Prepared, path: str, say: Callable[[str], None]) -> dict[str, dict[str, np.ndarray]]:
    """By policy, the weights of the newest checkpoint of another run: those of the policy of the same name, or of the only one."""
    rundir = run_or_best_seed(Path(path), say)
    folder = rundir.checkpoints().sound(tables=False)
    if folder is None:
        raise ConfigError(f"--init-from {path} has no whole checkpoint; give another run")
    earlier = _EarlierRun(str(rundir.path), rundir.config(), folder, prepared.plan.trust)
    return {name: _weights(prepared, policy, earlier, say) for name, policy in prepared.policies.items()}


class _EarlierRun:
    """The run whose weights are taken."""

    def __init__(self, path: str, config: Mapping[str, Any], folder: Path, trust: bool) -> None:
        self.path, self.config, self.folder, self.trust = path, config, folder, trust

    def saved(self, policy: str) -> dict[str, np.ndarray]:
        return learned_arrays(self.folder, f"{policy}.") or learned_arrays(self.folder)

    def algorithm(self, policy: str) -> Algorithm:
        """What its network was built by; its environment has to be there."""
        try:
            check_trust([name for name in modules_of(self.config) if name not in sys.modules], self.trust)
            plan = plan_from_json(self.config, f"{self.path}/config.json", None)
            there = prepare(replace(plan, experiment=replace(plan.experiment, demos=None, offline=False))).policies
        except ConfigError as error:
            raise ConfigError(f"--init-from {self.path} has another network than this run, and what its layers are cannot be found "
                              f"out: {error}") from None
        return (there.get(policy) or next(iter(there.values()))).algorithm


def _weights(prepared: Prepared, policy: PreparedPolicy, earlier: _EarlierRun, say: Callable[[str], None]) -> dict[str, np.ndarray]:
    saved = earlier.saved(policy.name)
    learn = policy.algorithm.learn(prepared.plan.experiment.seed)
    here = {name: tensor.numpy() for name, tensor in learn.weights.items()}
    if "params" not in saved:
        raise ConfigError(f"--init-from {earlier.path} holds no weights of a policy {policy.name}; give a run that has one")
    taken = {name: saved[name] for name, array in here.items() if name in saved and saved[name].shape == array.shape}
    told = _all_of(_layers(policy.algorithm, here["params"]))
    if not _same_net(prepared, earlier.config) or "params" not in taken:
        taken["params"], told = _fitting(policy, earlier, saved["params"], here["params"])
        taken.pop("target", None)
    _check_normalised(saved, here, earlier.path)
    whose = f"{policy.name}: " if len(prepared.policies) > 1 else ""
    say(f"--init-from {earlier.path} (checkpoint {earlier.folder.name}): {whose}{told}")
    params = taken["params"]
    copies = {name: params for name, array in here.items() if name not in taken and array.shape == params.shape}  # target networks
    return {**taken, **copies}


def _same_net(prepared: Prepared, config: Mapping[str, Any]) -> bool:
    there, here = config.get("net", {}), json_values(prepared.plan.experiment.net)
    return all(there.get(name) == value for name, value in here.items())


def _check_normalised(saved: Arrays, here: Arrays, path: str) -> None:
    if NORMALISED in saved and NORMALISED not in here:
        raise ConfigError(f"--init-from {path} normalises observations, and this run does not; add "
                          "--algorithm.normalise-observations")
    if NORMALISED in here and NORMALISED not in saved:
        raise ConfigError(f"--init-from {path} does not normalise observations, and this run does; add "
                          "--algorithm.no-normalise-observations")


def _fitting(policy: PreparedPolicy, earlier: _EarlierRun, saved: np.ndarray, here: np.ndarray) -> tuple[np.ndarray, str]:
    """The parameters that this run would begin with, with the layers of the other one that have the same name and shapes; and which
    those are."""
    params = here.copy()
    new, old = _layers(policy.algorithm, params), _layers(earlier.algorithm(policy.name), saved)
    fit = [name for name, layer in new.items() if _shapes(layer) == _shapes(old.get(name, {}))]
    left = [name for name in new if name not in fit]
    if not fit:
        raise ConfigError(f"--init-from {earlier.path} does not fit: none of its layers has the name and the shapes of one of this "
                          f"network's ({_named(left, new, old)}); use the same algorithm and network")
    for name in fit:
        for key, array in new[name].items():
            array[...] = old[name][key]  # `new` are views of `params`
    if not left:
        return params, _all_of(new)
    return params, f"{len(fit)} of {len(new)} layers fit and are taken; these begin anew: {_named(left, new, old)}"


def _all_of(layers: Layers) -> str:
    return "the whole network is taken" + (f", {len(layers)} layers" if len(layers) > 1 else "")


def _layers(algorithm: Algorithm, params: np.ndarray) -> Layers:
    learn = algorithm.learn(0)
    if not isinstance(learn, LayeredLearn) or learn.weights["params"].shape != params.shape:
        return {"network": {"parameters": params}}
    found: Layers = {}
    for name, array in learn.layers(params).items():
        layer, _, key = name.rpartition(".")
        found.setdefault(layer, {})[key] = array
    return found


def _shapes(layer: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in layer.items()}


def _named(layers: list[str], new: Layers, old: Layers) -> str:
    """Some layers with their sizes here and there."""
    def size(layer: Arrays) -> str:
        return " x ".join(map(str, max(layer.values(), key=lambda array: array.ndim).shape))

    shown = [f"{name} ({size(new[name])} here, {f'{size(old[name])} there' if name in old else 'none there'})"
             for name in layers[:NAMED]]
    return ", ".join(shown) + (f" and {len(layers) - NAMED} more" if len(layers) > NAMED else "")
