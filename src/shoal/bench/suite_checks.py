"""Whether a case of a suite makes sense: asked when the suite is read, so that no run is wasted and none measures something else.

What only the machine can tell (a package that is missing, a GPU, a cluster) is no fault of the suite: that becomes a row.
"""

from __future__ import annotations

import difflib
import math
from functools import cache

from shoal.bench.suite import SuiteCase
from shoal.errors import ConfigError, ShoalError

__all__ = ["check"]

OF_THE_CASE = {"preset": "preset", "env": "env", "runtime": "runtime", "seed": "seeds", "until_return": "until_return",
               "max_env_steps": "max_env_steps", "max_seconds": "max_seconds"}
"""Settings of the experiment that a case gives in a field of its own."""


def check(case: SuiteCase, where: str) -> None:
    try:
        _check_numbers(case)
        (_check_preset if case.preset else _check_peer if case.peer else _check_workload)(case)
    except ShoalError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_numbers(case: SuiteCase) -> None:
    for name in ("max_seconds", "max_env_steps", "limit_seconds", "kill_every"):
        value = getattr(case, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value} is not possible: give more than 0")
    if not 0 <= case.warm_seconds < math.inf:
        raise ConfigError(f"warm_seconds={case.warm_seconds} is not possible: give 0 or more")
    if case.max_seconds is not None and case.warm_seconds >= case.max_seconds:
        raise ConfigError(f"warm_seconds={case.warm_seconds:g} leaves nothing of max_seconds={case.max_seconds:g} to be measured; "
                          "give less warm_seconds, or more max_seconds")
    if case.until_return is not None and not math.isfinite(case.until_return):
        raise ConfigError(f"until_return={case.until_return} is not possible: give a number, or leave it out")
    if not case.seeds:
        raise ConfigError("it has no seeds; add seeds = [1]")
    if min(case.seeds) < 0:
        raise ConfigError(f"seeds={list(case.seeds)} is not possible: give 0 or more")
    for name in ("seeds", "actors", "who"):
        values = getattr(case, name)
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise ConfigError(f"{name}={list(values)} has {twice[0]!r} twice; it would be one run, so give it once")


# ---------------------------------------------------------------------------------------------- what is run
def _check_preset(case: SuiteCase) -> None:
    """As `shoal train` would find it wrong, before any process is started."""
    from shoal.bench.preset_checks import check_expert, check_limit, check_roles, plan_for

    _need_env(case)
    if not (case.max_env_steps or case.max_seconds):
        raise ConfigError("it would never end; add max_env_steps or max_seconds")
    names = {**OF_THE_CASE, **({"actors": "actors"} if case.actors else {})}
    for key in (key for key in case.overrides if key in names):
        raise ConfigError(f"overrides has {key!r}, which the case gives itself; write {names[key]} = ... beside overrides")
    plans = [plan_for(case, actors) for actors in case.actors or (None,)]
    for plan in plans:
        plan.validate()
    if plan.experiment.envs.backend != "envpool":  # which has names of its own
        _check_env(case.env)
    if case.limit:
        check_limit(case, plan)
    for actors in case.actors or (None,):
        check_roles(case, actors)
    if case.expert:
        check_expert(case)


def _check_peer(case: SuiteCase) -> None:
    from shoal.bench.peers.more import peer_named
    from shoal.bench.peers.orders import SCENES, check_order

    _need_env(case)
    peer = peer_named(str(case.peer))
    if case.env not in SCENES:
        raise ConfigError(f"env={case.env!r} is not possible: the drivers of peers know {' and '.join(sorted(SCENES))}")
    if not case.max_seconds:
        raise ConfigError("it would never end; add max_seconds")
    check_order(peer.name, case.env, case.until_return, case.order)


def _check_workload(case: SuiteCase) -> None:
    from shoal.bench.replay import names
    from shoal.bench.replay_workloads import check_kind

    try:
        check_kind(str(case.workload))
    except ValueError as error:
        raise ConfigError(f"workload={error}") from None
    if not (case.size and case.who):
        raise ConfigError("a workload needs a buffer; add size = 100_000 and who = [\"shoal inline\"]")
    if case.size < 1:
        raise ConfigError(f"size={case.size} is not possible: give 1 or more")
    for who in case.who:
        if who not in names():
            raise ConfigError(f"who={who!r} is not possible: give {', '.join(names())}")


def _need_env(case: SuiteCase) -> None:
    if not case.env:
        raise ConfigError("it names no environment; add env = \"CartPole-v1\"")


@cache
def _check_env(name: str) -> None:
    """Whether there is such an environment; none is made."""
    import gymnasium as gym

    import shoal.envs  # noqa: F401  registers its ids
    from shoal.envs.atari import has_ale
    from shoal.experiment.references import EnvRef, find

    if not isinstance(EnvRef.named(name).target, str):
        return
    plain = name.rpartition(":")[2]  # of gymnasium's module:Env-v0; the module is imported by now, if it can be
    if plain not in gym.registry:
        atari = has_ale()  # which registers ids of its own
        if plain not in gym.registry and (atari or not name.startswith("ALE/")):
            if ":" in name:
                find(name)  # says why it cannot be imported
            near = difflib.get_close_matches(name, gym.registry, 3, 0.7)
            hint = f"did you mean {', '.join(near)}?" if near else "give an id of gymnasium's, or package.module:function"
            raise ConfigError(f"there is no environment {name!r}; {hint}")
