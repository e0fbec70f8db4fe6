"""From a Plan to a Program: everything that can be wrong is found here, before any process starts."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import cloudpickle
import gymnasium as gym

from shoal import __version__, algorithms
from shoal.algorithms.hardware import Hardware, choose
from shoal.algorithms.records import leaf_tree
from shoal.architectures.parts import EnvSource, Parts
from shoal.core import Algorithm
from shoal.envs import EnvSpec
from shoal.errors import ConfigError, EnvironmentError_
from shoal.experiment.checkpoints import TensorFiles
from shoal.experiment.config import Experiment, Names, Plan, architecture_of, default_plan
from shoal.experiment.references import EnvRef
from shoal.experiment.values import apply, plain
from shoal.runtime import Program
from shoal.slots import leaves

__all__ = ["Prepared", "plan_from_json", "plan_to_json", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """A checked plan with what was built from it."""

    plan: Plan
    source: EnvSource
    spec: EnvSpec
    algorithm: Algorithm

    def raw_spaces(self) -> tuple[gym.Space, gym.Space]:
        """Observations and actions as the environment itself has them, not as the stream stores them."""
        env = self.source.make(1)
        try:
            layout = getattr(env, "layout", None)
            observation = layout.raw_space if layout is not None else env.observation_space
            return observation, env.codec.raw_space
        finally:
            env.close()

    def hardware(self) -> Hardware:
        """Where to compute: small networks over vectors learn faster on a CPU, where their data are."""
        names, experiment = self.plan.names, self.plan.experiment
        can = {f"--algorithm {names.algorithm}": getattr(self.algorithm, "runs_on_gpu", False),
               f"--architecture {names.architecture}": getattr(architecture_of(names.architecture), "runs_on_gpu", False)}
        cannot = [name for name, able in can.items() if not able]
        if experiment.device == "cuda" and cannot:
            raise ConfigError(f"--device cuda with {cannot[0]} does not fit: it computes on the CPU only; use --device auto or cpu")
        images = any(len(shape) == 3 for _, (shape, _) in leaves(leaf_tree(self.spec.observation_space)))
        always = getattr(architecture_of(names.architecture), "worth_a_gpu", False)
        return choose(experiment.device, experiment.gpu, worth=not cannot and (images or always))

    def program(self, resumed: int = 0) -> Program:
        """Draw the graph."""
        names, experiment = self.plan.names, self.plan.experiment
        _check_threads(experiment)
        program = Program(names.title, experiment.seed, TensorFiles())
        program.resumed = resumed
        parts = Parts(self.algorithm, self.source, experiment.architecture.envs_per_actor, seed=experiment.seed,
                      actors=experiment.actor_count, most_actors=experiment.autoscale.most if experiment.moving else None,
                      learners=experiment.learners,
                      learner_threads=experiment.learner_threads, max_env_steps=experiment.max_env_steps,
                      max_learner_steps=experiment.max_learner_steps,
                      eval=experiment.eval.plan(experiment.until_return, experiment.offline),
                      replay=experiment.replay, spread=experiment.runtime == "ray" and experiment.ray.joined,
                      demos=experiment.demos, offline=experiment.offline, hardware=self.hardware())
        program.on_gpu = parts.hardware.on_gpu
        with making_networks():  # to know the size of the weights
            architecture_of(names.architecture).draw(program, parts, experiment.architecture)
        return program


def prepare(plan: Plan) -> Prepared:
    """Check the plan, make one environment to learn its spaces, and build the algorithm for them."""
    plan.validate()
    module = plan.experiment.net.module
    if isinstance(module, str) and module.startswith("?"):
        raise ConfigError(f"the network {module[1:]} of this run was made in a script or notebook and cannot be imported; "
                          'pass it again in Python: net={"module": ' + module[1:] + "}")
    experiment = dataclasses.replace(plan.experiment, actors=plan.experiment.actor_count)
    plan = dataclasses.replace(plan, experiment=experiment)
    source = EnvSource(plan.env.target, experiment.envs.backend, experiment.envs.arguments())
    if experiment.runtime != "inline" and not isinstance(plan.env.target, str):
        try:
            cloudpickle.dumps(plan.env.target)
        except Exception as error:  # pickling runs the user's own code, which may raise anything
            raise ConfigError(f"the environment {plan.env.name} cannot be sent to other processes: {error}; "
                              "make it inside the callable, or use runtime=\"inline\"") from None
    try:
        with patience(experiment.faults.start_seconds, plan.env.name):
            spec = source.describe()
    except (ConfigError, EnvironmentError_) as error:
        raise error if plan.env.name in str(error) else ConfigError(f"{plan.env.name}: {error}") from None
    if experiment.demos is not None:
        _check_demos(plan, spec, source.kwargs)
    seats = experiment.architecture.envs_per_actor * spec.seats_per_env
    _check_minibatches(experiment, seats)
    with making_networks():
        made = algorithms.make(experiment.algorithm, spec, experiment.net, seats)
    return Prepared(plan, source, spec, made)


def _check_demos(plan: Plan, spec: EnvSpec, kwargs: Mapping[str, Any]) -> None:
    """Whether the demonstrations are whole and of this environment; every episode is looked at once."""
    from shoal.offline import check_fit, open_demos

    demos = open_demos(plan.experiment.demos)  # type: ignore[arg-type]
    check_fit(demos.about, str(plan.experiment.demos), spec, plan.env.name, kwargs, plan.experiment.foreign_demos)
    for _ in demos.episodes():
        pass


@contextlib.contextmanager
def making_networks() -> Iterator[None]:
    """torch says that there is no memory for a network with a RuntimeError, as others may say other things."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError) as error:
        if not any(frame.f_globals.get("__name__", "").startswith("shoal.nets") for frame, _ in walk_tb(error.__traceback__)):
            raise
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the network cannot be made: {why}; make it smaller with --net.*") from None


@contextlib.contextmanager
def patience(seconds: float, name: str) -> Iterator[None]:
    """An environment is made and reset in the user's own process, where nobody watches over it: it may not hang there."""
    if threading.current_thread() is not threading.main_thread() or seconds == math.inf:
        yield
        return

    class TooLong(BaseException):
        """Whoever catches the environment's own exceptions must not catch this."""

    def too_long(number: int, frame: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except TooLong:
        raise ConfigError(f"{name} has not come back from its making and first reset() within {seconds:g} s; give it more with "
                          "--faults.start-seconds, or find out where it hangs") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _check_threads(experiment: Experiment[Any, Any]) -> None:
    """More threads than cores only wait for each other. Nodes of a cluster that is joined may have more than this machine, and to
    act with a run that was trained on a larger one no program is drawn."""
    cores = len(os.sched_getaffinity(0))
    if experiment.learner_threads > cores and not (experiment.runtime == "ray" and experiment.ray.joined):
        raise ConfigError(f"--learner-threads {experiment.learner_threads} is more than the {cores} cores that there are; give "
                          f"--learner-threads {cores} or fewer")


def _check_minibatches(experiment: Experiment[Any, Any], seats: int) -> None:
    """A batch cannot be cut into more parts than it has decisions."""
    parts = getattr(experiment.algorithm, "minibatches", 1)
    if parts == 1:
        return
    batch = seats * experiment.algorithm.unroll * getattr(experiment.architecture, "batch_slots", experiment.actor_count)
    if parts > batch:
        raise ConfigError(f"minibatches={parts} is more than the {batch} decisions of a batch; lower --algorithm.minibatches")


def plan_to_json(plan: Plan, resumed: int = 0) -> dict[str, Any]:
    """config.json: every value, resolved."""
    values: dict[str, Any] = plain(plan.experiment)
    values["algorithm"] = {"name": plan.names.algorithm, **values["algorithm"]}
    values["architecture"] = {"name": plan.names.architecture, **values["architecture"]}
    return {"shoal": __version__, "preset": plan.names.preset, "env": plan.env.record(), "resumed": resumed, **values}


def plan_from_json(config: Mapping[str, Any], where: str, env: Any = None) -> Plan:
    """The plan of a run; `env` replaces its environment."""
    values = dict(config)
    for key in ("shoal", "resumed"):
        values.pop(key, None)
    try:
        preset, record = values.pop("preset"), values.pop("env")
        algorithm, architecture = dict(values.pop("algorithm")), dict(values.pop("architecture"))
        names = Names(algorithm.pop("name"), architecture.pop("name"), preset)
    except KeyError as error:
        raise ConfigError(f"{where} is no config.json of shoal: it has no {error}; give a run directory") from None
    plan = default_plan(names, EnvRef.from_record(record, env), None)
    experiment: Experiment[Any, Any] = apply(plan.experiment, {**values, "algorithm": algorithm,
                                                               "architecture": architecture}, where)
    return Plan(names, plan.env, experiment)
