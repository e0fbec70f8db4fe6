"""What an experiment is: an environment, an algorithm, an architecture, a runtime, and every value they need.

    Plan        names (preset, algorithm, architecture), the environment, and the Experiment with all values
    Experiment  frozen nested dataclasses; --section.field VALUE on the command line, section={"field": value} in Python

A Plan comes from the command line (parse.py), from Python (`plan_of`) or from a run's config.json (`plan_from_json`);
all three end in `validate`, which names the values that clash and the fix before any process starts.
"""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar

from shoal import algorithms, architectures
from shoal.algorithms.hardware import DeviceName, GpuConfig
from shoal.architectures.parts import EvalPlan
from shoal.architectures.replay_config import ReplayConfig
from shoal.coordination.autoscale import AutoscaleConfig
from shoal.core import Tolerance
from shoal.errors import ConfigError
from shoal.experiment.presets import Preset, closest
from shoal.experiment.values import apply
from shoal.nets.config import NetConfig
from shoal.runtime import Faults, RayConfig

__all__ = ["CheckpointConfig", "ConsoleConfig", "EnvsConfig", "EvalConfig", "Experiment", "Found", "Names", "Plan",
           "check_ray", "default_plan"]

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True)
class EnvsConfig:
    """How environments are made."""

    backend: Literal["auto", "compiled", "vector", "loop", "ale", "envpool"] = "auto"
    """Which back-end steps them; auto chooses and says why."""
    kwargs: tuple[str, ...] = ()
    """Arguments of the environment, as name=value pairs: --envs.kwargs observation=pixels size=7"""

    def arguments(self) -> dict[str, Any]:
        """The pairs as a dictionary; values are Python literals where they look like one."""
        pairs = {}
        for pair in self.kwargs:
            name, equals, text = pair.partition("=")
            if not equals or not name.isidentifier():
                raise ConfigError(f"--envs.kwargs {pair} is not a name=value pair; write it like observation=pixels")
            try:
                pairs[name] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                pairs[name] = text
        return pairs

    def validate(self) -> None:
        self.arguments()


@dataclass(frozen=True)
class EvalConfig:
    """When and how the policy is evaluated, with environments and seeds of its own."""

    enabled: bool = True
    """Evaluate at all."""
    episodes: int = 100
    """Fresh episodes of one published version in an evaluation; 20 for Atari."""
    every_env_steps: int = 20_000
    """Decisions between two evaluations."""
    every_learner_steps: int = 1_000
    """Updates between two evaluations where nobody acts (--offline)."""
    greedy: bool = True
    """Take the likeliest action; otherwise explore as in training."""

    def validate(self) -> None:
        _at_least("eval.episodes", self.episodes, 1)
        _at_least("eval.every_env_steps", self.every_env_steps, 1)
        _at_least("eval.every_learner_steps", self.every_learner_steps, 1)

    def plan(self, until_return: float | None, offline: bool = False) -> EvalPlan:
        updates = self.every_learner_steps if offline else None
        return EvalPlan(self.enabled, self.episodes, self.every_env_steps, updates, self.greedy, until_return)


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of a run is saved."""

    every_seconds: float = 60.0
    """Time between two checkpoints; there is always one from step 0 and one at the end."""
    keep: int = 3
    """How many of the newest are kept."""

    def validate(self) -> None:
        _at_least("checkpoint.every_seconds", self.every_seconds, 0.1)
        _at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True)
class ConsoleConfig:
    """What is shown while it runs."""

    mode: Literal["auto", "live", "plain", "none"] = "auto"
    """A live table, plain lines or nothing; auto is live on a terminal and plain elsewhere."""
    every_seconds: float = 5.0
    """Time between two plain lines."""

    def validate(self) -> None:
        _at_least("console.every_seconds", self.every_seconds, 0.1)


@dataclass(frozen=True)
class Experiment(Generic[A, R]):
    """Every value of a run."""

    algorithm: A
    """What is learned."""
    architecture: R
    """Who does what, with whom."""
    net: NetConfig = field(default_factory=NetConfig)
    """The network."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """The replay table, for algorithms that learn from one."""
    envs: EnvsConfig = field(default_factory=EnvsConfig)
    """How environments are made."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """When and how the policy is evaluated."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state is saved."""
    gpu: GpuConfig = field(default_factory=GpuConfig)
    """What is done on a GPU."""
    faults: Faults = field(default_factory=Faults)
    """When to give up on a role."""
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    """With --actors auto: how the number of actors moves during the run."""
    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    """What is shown while it runs."""
    ray: RayConfig = field(default_factory=RayConfig)
    """The cluster of --runtime ray."""
    runtime: Literal["local", "inline", "ray"] = "local"
    """Where roles live: local has a process each, inline runs them in one thread, bit-exact for a seed, ray has a cluster."""
    actors: int | Literal["auto"] = "auto"
    """How many actors; auto finds a beginning by trying, and lets their number follow the learner."""
    learners: int = 1
    """How many learners share the gradients."""
    learner_threads: int = 1
    """Threads that each learner computes with."""
    device: DeviceName = "auto"
    """Where learners and inference servers compute; auto takes a GPU for images and for the device architecture."""
    seed: int = 0
    """Everything random derives from it."""
    until_return: float | None = None
    """Stop when an evaluation's mean return reaches this, confirmed by a second one."""
    max_env_steps: int | None = None
    """Stop after this many agent decisions."""
    max_learner_steps: int | None = None
    """Stop after this many updates."""
    max_seconds: float | None = None
    """Stop after this much time, counted from the first environment step (offline: from the first update)."""
    demos: str | None = None
    """Folder of demonstrations to learn from as well: of `shoal data record`, or a Minari dataset."""
    offline: bool = False
    """Learn from --demos alone: nobody acts."""
    foreign_demos: bool = False
    """Take demonstrations of another environment that has the same spaces."""
    run_dir: str | None = None
    """Where the run is written; runs/<time>-<preset>-<env>-<seed> by default."""
    tensorboard: bool = True
    """Write TensorBoard files into the run directory."""

    @property
    def has_actors(self) -> bool:
        """Whether somebody else than the learner acts."""
        return bool(getattr(self.architecture, "has_actors", True))

    @property
    def actor_count(self) -> int:
        """The number behind `auto`: a core is left for the learner, but two actors overlap better than one."""
        if self.actors != "auto":
            return self.actors
        if not self.has_actors:
            return 1
        return self.autoscale.start or max(2, len(os.sched_getaffinity(0)) - 1)

    @property
    def moving(self) -> bool:
        """Whether the number of actors follows the learner; `layout.laid_out` decides it."""
        return self.autoscale.most is not None and self.actors == self.autoscale.start

    def validate(self) -> None:
        sections: tuple[Any, ...] = (self.algorithm, self.architecture, self.net, self.replay, self.envs, self.eval,
                                     self.checkpoint, self.console, self.faults, self.autoscale, self.ray)
        for section in sections:
            section.validate()
        if self.actors != "auto":
            _at_least("actors", self.actors, 1, " (or auto)")
            if self.actors > 1 and not self.has_actors:
                raise ConfigError(f"--actors {self.actors}: this architecture has no actors, its learner acts; leave it out, and "
                                  "raise --architecture.envs-per-actor")
            if self.autoscale.start not in (None, self.actors) or (self.autoscale.most and not self.moving):
                raise ConfigError(f"actors={self.actors} is a number, so nothing moves it, but autoscale.start is "
                                  f"{self.autoscale.start} and autoscale.most is {self.autoscale.most}; give --actors auto, or "
                                  "leave them out")
        _at_least("learners", self.learners, 1)
        _at_least("learner_threads", self.learner_threads, 1)
        _at_least("seed", self.seed, 0)
        for name in ("max_env_steps", "max_learner_steps", "max_seconds", "until_return"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{name}={value} is not possible: give a number, or leave {flag(name)} out")
        for name in ("max_env_steps", "max_learner_steps", "max_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value} is not possible: give more than 0, or leave {flag(name)} out")
        if self.offline and self.demos is None:
            raise ConfigError("--offline learns from demonstrations alone, and there are none; give --demos PATH (`shoal data "
                              "record` makes some)")
        if self.offline and not self.eval.enabled:
            raise ConfigError("eval.enabled is false with --offline: nobody would see what is learned; leave it on (a large "
                              "--eval.every-learner-steps costs little)")
        if self.offline and self.max_env_steps is not None:
            raise ConfigError(f"--max-env-steps {self.max_env_steps} would never be reached with --offline, since nobody acts; "
                              "give --max-learner-steps or --max-seconds")
        if self.until_return is not None and not self.eval.enabled:
            raise ConfigError(f"until_return={self.until_return:g} needs evaluations, but eval.enabled is false; "
                              "turn it on with --eval.enabled")


def flag(name: str) -> str:
    """The command line's spelling of a key."""
    return "--" + name.replace("_", "-")


def _at_least(name: str, value: float, least: float, hint: str = "") -> None:
    if not least <= value < math.inf:
        raise ConfigError(f"{name}={value} is not possible: give {flag(name)} {least:g} or more{hint}")


@dataclass(frozen=True)
class Names:
    """Which preset, algorithm and architecture."""

    algorithm: str
    architecture: str
    preset: str | None = None

    @property
    def title(self) -> str:
        return self.preset or f"{self.algorithm}x{self.architecture}"


@dataclass(frozen=True)
class Found:
    """What `--actors auto` has come to."""

    chosen: str
    """The layout in words."""
    how: str
    tried: Mapping[str, float] = field(default_factory=dict)
    """Env steps/s of every layout that was measured, fastest first."""


@dataclass(frozen=True)
class Plan:
    """A whole experiment, ready to be checked and run."""

    names: Names
    env: Any  # EnvRef
    experiment: Experiment[Any, Any]
    found: Found | None = None

    def validate(self) -> None:
        """All values on their own, and algorithm against data path."""
        self.experiment.validate()
        fit(self.names, self.experiment)


def fit(names: Names, experiment: Experiment[Any, Any]) -> None:
    """Whether the algorithm can learn from what the architecture delivers: computed, not listed."""
    _, cls = algorithms.named(names.algorithm)
    module = architecture_of(names.architecture)
    if experiment.demos is not None:
        fit_demos(names, cls, module)
    if replayed(cls):
        if not getattr(module, "has_replay", False):
            able = [name for name in architectures.ARCHITECTURES if getattr(architectures.named(name), "has_replay", False)]
            raise ConfigError(f"--algorithm {names.algorithm} with --architecture {names.architecture} does not fit: "
                              f"{names.algorithm} learns from a replay table, and {names.architecture} has none; use "
                              f"--architecture {' or '.join(able)}")
        return
    if experiment.replay != ReplayConfig():
        raise ConfigError(f"--replay.* with --algorithm {names.algorithm} does not fit: {names.algorithm} learns from unrolls as "
                          "they come, so there is no table; leave it out")
    if not getattr(module, "has_unrolls", True):
        raise ConfigError(f"--algorithm {names.algorithm} with --architecture {names.architecture} does not fit: {names.algorithm} "
                          f"learns from unrolls as they come, and {names.architecture} has replay tables; use --architecture "
                          "async_gradients --architecture.mode master")
    delivery = module.delivers(experiment.architecture)
    if cls.tolerates < delivery.needs:
        words = Tolerance.NAMES
        classes = {name: algorithms.named(name)[1] for name in algorithms.ALGORITHMS}
        able = [name for name, one in classes.items() if one.tolerates >= delivery.needs and not replayed(one)]
        raise ConfigError(f"--algorithm {names.algorithm} with --architecture {names.architecture} does not fit: "
                          f"{names.algorithm} tolerates {words[cls.tolerates]}, but {delivery.why} (needs: "
                          f"{words[delivery.needs]}); use --algorithm {' or '.join(able) or 'another'}, "
                          "or --architecture synchronous")


def fit_demos(names: Names, cls: Any, module: Any) -> None:
    """Whether an algorithm can learn from demonstrations where this architecture would have it draw them."""
    if not replayed(cls):
        able = [name for name in algorithms.ALGORITHMS if replayed(algorithms.named(name)[1])]
        raise ConfigError(f"--demos with --algorithm {names.algorithm} does not fit: {names.algorithm} learns from what its own "
                          f"policy has just done, not from what others did; use --algorithm {' or '.join(able)}")
    if getattr(module, "has_replay", False) and not getattr(module, "takes_demos", False):
        able = [name for name in architectures.ARCHITECTURES if getattr(architectures.named(name), "takes_demos", False)]
        raise ConfigError(f"--demos with --architecture {names.architecture} does not fit: its bundles have tables for their own "
                          f"actors only; use --architecture {' or '.join(able)}")


def replayed(algorithm: Any) -> bool:
    """Whether an algorithm learns from a replay table rather than from unrolls as they come."""
    return bool(getattr(algorithm, "from_replay", False))


def architecture_of(name: str) -> Any:
    """The module of an architecture."""
    if name not in architectures.ARCHITECTURES:
        raise ConfigError(f"there is no architecture {name!r}{closest(name, architectures.ARCHITECTURES, 'there are')}")
    return architectures.named(name)


def algorithm_config(name: str) -> type:
    if name not in algorithms.ALGORITHMS:
        raise ConfigError(f"there is no algorithm {name!r}{closest(name, algorithms.ALGORITHMS, 'there are')}")
    return algorithms.named(name)[0]


def experiment_type(names: Names) -> Any:
    """Experiment[its algorithm's Config, its architecture's Config]: what tyro needs to know."""
    return Experiment[algorithm_config(names.algorithm), architecture_of(names.architecture).Config]  # type: ignore[misc]


def check_ray(experiment: Experiment[Any, Any], before: RayConfig | None = None) -> None:
    """What is said of a cluster (other than `before`) is meant for a run on one; a run that was on one may go on elsewhere."""
    before = before or RayConfig()
    if experiment.runtime == "ray" or experiment.ray == before:
        return
    name, value = next((entry.name, value) for entry in fields(before)
                       if (value := getattr(experiment.ray, entry.name)) != getattr(before, entry.name))
    raise ConfigError(f"{flag(f'ray.{name}')} {value} is for --runtime ray, and this run is --runtime {experiment.runtime}; give "
                      "--runtime ray too, or leave it out")


def default_plan(names: Names, env: Any, preset: Preset | None, overrides: Mapping[str, Any] | None = None) -> Plan:
    """The defaults, then the preset's values for the environment, then `overrides` (dotted or nested keys)."""
    experiment: Experiment[Any, Any] = Experiment(algorithm_config(names.algorithm)(),
                                                  architecture_of(names.architecture).Config())
    if env.name.startswith("ALE/"):
        experiment = apply(experiment, {"eval.episodes": 20}, "the default for Atari")
    if preset is not None:
        experiment = apply(experiment, preset.values(env.name), f"preset {preset.name}")
    experiment = apply(experiment, overrides or {}, "")
    check_ray(experiment)
    return Plan(names, env, experiment)
