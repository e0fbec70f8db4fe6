"""What the drivers of peers can be told: checks the `order` of a case before anything is run.

Drivers can only be imported in the virtual environments of their peers, so the keys that they read and the settings that they have
are taken from their source code. A key that a driver does not read would change nothing, and the suite would measure something else
than it says.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.composed_limit.scenes import SCENES
from benchmarks.peers.install import DRIVERS
from shoal.errors import ConfigError
from shoal.experiment.suggestions import closest

__all__ = ["check_order", "driver_of", "takes"]

OF_THE_CASE = {"scene": "env", "seconds": "max_seconds", "seed": "seeds", "goal": "until_return"}
"""Keys that a case gives in a field of its own, with the name of that field."""
TABLES = ("COMMON", "SETTINGS", "RACE", "RACES")
PASSED_ON = {
    "sb3": frozenset({"learning_rate", "gamma", "gae_lambda", "clip_range", "clip_range_vf", "normalize_advantage", "ent_coef",
                      "vf_coef", "max_grad_norm", "target_kl", "policy_kwargs"}),
    "sb3_dqn": frozenset({"gamma", "tau", "max_grad_norm", "exploration_fraction", "exploration_initial_eps",
                          "exploration_final_eps"}),
    "sample_factory": frozenset({"learning_rate", "lr_schedule", "optimizer", "adam_eps", "gamma", "gae_lambda", "ppo_clip_ratio",
                                 "ppo_clip_value", "exploration_loss_coeff", "value_loss_coeff", "kl_loss_coeff", "max_grad_norm",
                                 "max_policy_lag", "shuffle_minibatches", "value_bootstrap", "num_batches_to_accumulate"}),
}
"""Settings that the peer itself takes, beside those in its driver: SB3 by these names, Sample Factory as options."""
JUDGED = "CartPole-v1"


@dataclass(frozen=True)
class Driver:
    """What a driver's source tells."""

    keys: frozenset[str]
    """What it reads of an order."""
    optional: frozenset[str]
    """Settings that it looks for, and does without."""
    tables: Mapping[str, Any]
    """Its settings, by scene, by algorithm and scene, or by race."""

    def settings(self, scene: str, order: Mapping[str, Any], race: bool) -> dict[str, Any]:
        """Those that such an order begins with."""
        tables = self.tables
        if race:
            return dict(tables["RACES"][order["race"]] if "RACES" in tables else tables["RACE"])
        own = tables["SETTINGS"]
        return {**tables.get("COMMON", {}), **own[scene if scene in own else (order["algorithm"], scene)]}


@cache
def driver_of(peer: str) -> Driver:
    tree = ast.parse((DRIVERS / f"drive_{peer}.py").read_text(encoding="utf-8"))
    assigned = {node.target.id: node.value for node in tree.body if isinstance(node, ast.AnnAssign)
                if isinstance(node.target, ast.Name) and node.value is not None}
    read = list(_read(tree))
    return Driver(frozenset(key for name, key, _ in read if name == "order"),
                  frozenset(key for name, key, optional in read if name == "settings" and optional),
                  {name: ast.literal_eval(assigned[name]) for name in TABLES if name in assigned})


def _read(tree: ast.AST) -> Iterator[tuple[str, str, bool]]:
    """(variable, key, whether it may be missing) for every variable["key"] and variable.get("key")."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))):
                yield name, key, False
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get" | "pop" as way),
                          args=[ast.Constant(value=str(key)), *more]):
                yield name, key, bool(more) or way == "get"


def takes(peer: str, race: bool, algorithm: Any = None) -> frozenset[str]:
    """The keys that change something in such a case."""
    keys = driver_of(peer).keys - set(OF_THE_CASE)
    if "RACES" in driver_of(peer).tables:
        keys -= {"epochs" if race else "race"}
    return keys - {"epochs"} if peer == "rllib" and algorithm != "ppo" else keys


def check_order(peer: str, env: str, until_return: float | None, order: Mapping[str, Any]) -> None:
    driver, race = driver_of(peer), until_return is not None
    if race and "goal" not in driver.keys:
        raise ConfigError(f"until_return={until_return:g} does not apply to {peer}: its driver cannot train to a threshold; leave "
                          "it out")
    if race and env != JUDGED:
        raise ConfigError(f"until_return={until_return:g} with env={env!r} is not possible: peers are judged on {JUDGED} only; "
                          "leave it out")
    able = takes(peer, race, order.get("algorithm"))
    for key in order:
        if key in OF_THE_CASE:
            raise ConfigError(f"order has {key!r}, which the case gives itself; write {OF_THE_CASE[key]} = ... beside order")
        if key not in able:
            raise ConfigError(f"order has {key!r}, which changes nothing here{closest(key, able, f'the driver of {peer} takes')}")
    _check_choices(peer, race, driver, order)
    for key in ("epochs", "threads"):
        _check_count(f"order.{key}", order.get(key, 1))
    _check_settings(peer, SCENES[env].name, race, driver, order)


def _check_choices(peer: str, race: bool, driver: Driver, order: Mapping[str, Any]) -> None:
    """What a driver cannot do without."""
    known: dict[str, list[str]] = {}
    if peer == "rllib":
        known["algorithm"] = sorted({name for name, _ in driver.tables["SETTINGS"]})
    if race and "RACES" in driver.tables:
        known["race"] = sorted(driver.tables["RACES"])
    for key, names in known.items():
        if order.get(key) not in names:
            what = f"order.{key}={order[key]!r} is not possible" if key in order else f"{peer} needs to know the {key}"
            raise ConfigError(f"{what}; write order = {{ {key} = \"...\" }} with one of {', '.join(names)}")
    if peer == "sb3" and not race and "epochs" not in order:
        raise ConfigError("sb3 needs to know the epochs; write order = { epochs = 1 }")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} is not possible: give a whole number from 1 on")


def _check_settings(peer: str, scene: str, race: bool, driver: Driver, order: Mapping[str, Any]) -> None:
    given = order.get("settings", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"order.settings={given!r} is not possible: write order = {{ settings = {{ ... }} }}")
    own = driver.settings(scene, order, race)
    known = {*own, *driver.optional, *PASSED_ON.get(peer, ())}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"order.settings has {name!r}{closest(name, known, f'the driver of {peer} knows')}")
        if name in own and _kind(value) != _kind(own[name]) and "auto" not in (value, own[name]):
            raise ConfigError(f"order.settings.{name}={value!r} is not possible: the driver's own is {own[name]!r}")
    if peer == "rllib" and scene != "cartpole" and given.get("vector"):
        raise ConfigError("order.settings.vector=true is not possible: that is gymnasium's vectorised CartPole-v1; leave it out")


def _kind(value: Any) -> str:
    for kind, words in ((bool, "yes or no"), (int | float, "a number"), (str, "text")):
        if isinstance(value, kind):
            return words
    return "a table"
