"""Whether an algorithm fits an architecture, and a network its environment: computed from what they declare, not listed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal import algorithms, architectures
from shoal.errors import ConfigError
from shoal.experiment.components import Names
from shoal.learning import Algorithm, Architecture, Tolerance

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.experiment.config import Plan

__all__ = ["check_central_value", "check_fit", "fits"]


def fits(algorithm: type[Algorithm], architecture: Architecture, options: Any) -> bool:
    """Whether the algorithm can learn from what the architecture delivers with these options."""
    if algorithm.evolves:
        return architecture.takes_scores
    if algorithm.from_replay:
        able = (algorithm.relabels or not architecture.needs_relabel) and (algorithm.represents or not architecture.needs_encoder)
        return architecture.takes_replay and able
    return architecture.takes_unrolls and algorithm.tolerates >= architecture.delivers(options).needs


def check_fit(names: Names, algorithm: type[Algorithm], architecture: Architecture, options: Any, *, demos: bool,
              replay_options: bool) -> None:
    """Raise a ConfigError that says why the two do not fit, and what does."""
    if demos:
        _check_demos(names, algorithm, architecture)
    if not algorithm.from_replay and replay_options:
        what = "the returns of whole episodes" if algorithm.evolves else "unrolls as they come"
        raise ConfigError(f"--replay.* does not fit --algorithm {names.algorithm}, which learns from {what} and has "
                          "no replay table; leave it out")
    if fits(algorithm, architecture, options):
        return
    pair = f"--algorithm {names.algorithm} does not fit --architecture {names.architecture}"
    if algorithm.evolves or (architecture.takes_scores and not architecture.takes_unrolls):
        raise ConfigError(f"{pair}: {_scores(names, algorithm)}")
    if algorithm.from_replay and architecture.needs_relabel:
        able = [name for name in algorithms.ALGORITHMS if algorithms.named(name).relabels]
        raise ConfigError(f"{pair}: its updaters recompute items between two tables, and {names.algorithm} has nothing to "
                          f"compute there; use --algorithm {' or '.join(able)}, or --architecture actor_learner")
    if algorithm.from_replay and architecture.needs_encoder:
        able = [name for name in algorithms.ALGORITHMS if algorithms.named(name).represents]
        raise ConfigError(f"{pair}: its representation learner makes an encoder, and {names.algorithm} has none apart from its "
                          f"nets; use --algorithm {' or '.join(able)}, or --architecture actor_learner")
    if algorithm.from_replay:
        known = {name: architectures.named(name) for name in architectures.ARCHITECTURES}
        able = [name for name, one in known.items() if one.takes_replay and not (one.needs_relabel or one.needs_encoder)]
        raise ConfigError(f"{pair}: {names.algorithm} learns from a replay table, and {names.architecture} has none; use "
                          f"--architecture {' or '.join(able)}")
    if not architecture.takes_unrolls:
        able = [name for name in architectures.ARCHITECTURES if architectures.named(name).takes_unrolls]
        raise ConfigError(f"{pair}: {names.algorithm} learns from unrolls as they come, and {names.architecture} has replay "
                          f"tables; use --architecture {' or '.join(able)}")
    delivery, words = architecture.delivers(options), Tolerance.NAMES
    classes = {name: algorithms.named(name) for name in algorithms.ALGORITHMS}
    able = [name for name, one in classes.items() if one.tolerates >= delivery.needs and not (one.from_replay or one.evolves)]
    raise ConfigError(f"{pair}: {names.algorithm} tolerates {words[algorithm.tolerates]}, but {delivery.why} (needs: "
                      f"{words[delivery.needs]}); use --algorithm {' or '.join(able) or 'another'}, or --architecture synchronous")


def _scores(names: Names, algorithm: type[Algorithm]) -> str:
    if algorithm.evolves:
        able = [name for name in architectures.ARCHITECTURES if architectures.named(name).takes_scores]
        return (f"{names.algorithm} learns from the returns of perturbed policies and has no gradient of a loss to hand over; use "
                f"--architecture {' or '.join(able)}")
    able = [name for name in algorithms.ALGORITHMS if algorithms.named(name).evolves]
    return (f"its workers play perturbed policies and tell each other only their returns, and {names.algorithm} learns from single "
            f"steps; use --algorithm {' or '.join(able)}, or --architecture synchronous")


def _check_demos(names: Names, algorithm: type[Algorithm], architecture: Architecture) -> None:
    if not algorithm.from_replay:
        able = [name for name in algorithms.ALGORITHMS if algorithms.named(name).from_replay]
        raise ConfigError(f"--demos does not fit --algorithm {names.algorithm}, which learns only from what its own policy has "
                          f"just done; use --algorithm {' or '.join(able)}")
    if architecture.takes_replay and not architecture.takes_demos:
        able = [name for name in architectures.ARCHITECTURES if architectures.named(name).takes_demos]
        raise ConfigError(f"--demos does not fit --architecture {names.architecture}, whose replay tables hold only what its own "
                          f"actors do; use --architecture {' or '.join(able)}")


def check_central_value(plan: Plan, spec: EnvSpec | None) -> None:
    """Whether the values can see what all agents see; no `spec`: the run has several policies."""
    if not plan.experiment.net.central_value:
        return
    if spec is None or plan.experiment.policies == "league":
        why = "policies with learners of their own see their own agents only; use --policies shared or self-play"
    elif spec.seats_per_env == 1:
        why = f"{spec.name} has one agent; use --net.separate-value"
    elif spec.takes_turns:
        why = f"the agents of {spec.name} take turns, so there is no moment at which all of them see; leave it out"
    else:
        return
    raise ConfigError(f"--net.central-value does not fit: {why}")
