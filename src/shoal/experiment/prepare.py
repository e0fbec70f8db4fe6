"""From a Plan to a Program: everything that can be wrong is found here, before any process starts."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from traceback import walk_tb
from typing import Any, Protocol, runtime_checkable

import cloudpickle
import gymnasium as gym
import numpy as np

from shoal import __version__
from shoal.acting import ItemRecord
from shoal.algorithms.records.spaces import leaf_tree
from shoal.architectures.offline import draw_offline
from shoal.device.placement import Hardware, choose_device
from shoal.envs import EnvSpec
from shoal.envs.handling import Handling
from shoal.envs.opponent_env import OpponentMaker
from shoal.errors import ConfigError, EnvironmentError_
from shoal.experiment.checkpoints import TensorFiles
from shoal.experiment.compatibility import check_central_value
from shoal.experiment.config import Experiment, Names, Plan, default_plan
from shoal.experiment.live_settings import LiveValues
from shoal.experiment.patience import patience
from shoal.experiment.policies import PreparedPolicy, Seating, fixed_policy, own_values, pairs, seating_of, untrained_policy
from shoal.experiment.preload import PRELOAD
from shoal.experiment.references import EnvRef, find
from shoal.experiment.values import json_values, with_values
from shoal.league.matchmaking import LeaguePlan
from shoal.learning import Algorithm
from shoal.nets.net_config import NetConfig
from shoal.population import ScoreRecord
from shoal.roles.matches import quick_tree
from shoal.roles.parts import EnvSource, EvalPlan, Parts
from shoal.roles.policies import NamedPolicies, NamedPolicy
from shoal.roles.step_report import info_metrics
from shoal.runtime import Program
from shoal.runtime.program import ScaleOptions, SideWork
from shoal.runtime.start_checks import most_memory
from shoal.slots import leaves
from shoal.telemetry import Metric

__all__ = ["OPTIONS", "Prepared", "plan_from_json", "plan_to_json", "prepare", "remade"]

OPTIONS = ScaleOptions(senders=("--actors",), members=("--actors", "--learners"), threads="fewer --learner-threads",
                       no_gpu="--device cpu", fewer_gpus="a lower --ray.gpus-per-learner")
"""What to lower where a cluster is too small."""
EVALUATING = SideWork("eval_env_steps", free=1_000, share=10)
"""Evaluations of an inline run: an episode that never ends must not keep it from training."""
COPIES = 4
"""Of the parameters: themselves, their gradients, two moments of Adam."""


@dataclass(frozen=True)
class Prepared:
    """A checked plan with what was built from it."""

    plan: Plan
    source: EnvSource
    spec: EnvSpec
    """Of the first policy that learns, as is `algorithm`."""
    algorithm: Algorithm
    seating: Seating | None = None
    """Who plays for whom; none: one policy plays for all agents."""
    several: tuple[PreparedPolicy, ...] = ()
    """The policies that learn, where there are several."""
    name: str = "main"
    """What the one policy is called."""
    initial: Mapping[str, Mapping[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    """By policy, the weights that it begins with (initial_weights.py); others begin with random ones."""

    @property
    def league(self) -> LeaguePlan | None:
        """Who takes part, where the policies are those of a league."""
        experiment = self.plan.experiment
        return LeaguePlan.of(experiment.league) if experiment.policies == "league" else None

    @cached_property
    def policies(self) -> dict[str, PreparedPolicy]:
        """Those that learn, by name."""
        if self.several:
            return {policy.name: policy for policy in self.several}
        return {self.name: PreparedPolicy(self.name, "", self.spec, self.algorithm, *self.raw_spaces())}

    @property
    def scopes(self) -> dict[str, str]:
        """What the roles and files of each policy that learns begin with."""
        return {policy.name: policy.scope for policy in self.several} or {self.name: ""}

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """That the algorithms declare."""
        return tuple(dict.fromkeys(one for algorithm in (self.algorithm, *(policy.algorithm for policy in self.several))
                                   for one in algorithm.metrics))

    def raw_spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Observations and actions as the environment itself has them, not as a Step stores them."""
        if not self.plan.env.simulated:
            return self.spec.observation_space, self.spec.action_space
        env = self.source.make(1)
        try:
            return env.raw_observation_space, env.raw_action_space
        finally:
            env.close()

    def named(self, parts: Parts | None = None) -> NamedPolicies:
        """The policies of a program with several; those that learn with the parts of their roles, where these are given."""
        learning = [NamedPolicy(policy.name, policy.group, None if parts is None else dataclasses.replace(
            parts, algorithm=policy.algorithm, initial=self.initial.get(policy.name))) for policy in self.several]
        if self.seating is None:
            return NamedPolicies(tuple(learning))
        others = [name for name in self.seating.shares if name not in self.seating.learning]
        return NamedPolicies((*learning, *(NamedPolicy(name, self.seating.shares[name][0], fixed=self._fixed(name))
                                           for name in others)), self.seating.policy_of)

    def _fixed(self, name: str) -> OpponentMaker:
        """What acts for a policy that does not learn."""
        assert self.seating is not None
        group = self.seating.groups[self.seating.shares[name][0]]
        words = pairs("fixed", self.plan.experiment.fixed)
        if name in words:
            return fixed_policy(words[name], name, group, self.plan.trust)
        return untrained_policy(made_for(self.plan, name, self.seating).algorithm, self.plan.experiment.seed)

    def hardware(self) -> Hardware:
        """Where to compute: small networks over vectors learn faster on a CPU, where their data are."""
        names, experiment = self.plan.names, self.plan.experiment
        can = {f"--algorithm {names.algorithm}": self.algorithm.runs_on_gpu,
               f"--architecture {names.architecture}": self.plan.architecture.runs_on_gpu}
        cannot = [name for name, able in can.items() if not able]
        if experiment.device == "cuda" and cannot:
            raise ConfigError(f"--device cuda does not fit {cannot[0]}, which computes on the CPU only; use --device auto or cpu")
        images = any(len(shape) == 3 for _, (shape, _) in leaves(leaf_tree(self.spec.observation_space)))
        prefers = self.plan.architecture.prefers_gpu
        worth = not cannot and (images if prefers is None else prefers)
        return choose_device(experiment.device, experiment.gpu, worth=worth)

    def program(self, resumed: int = 0) -> Program:
        """Draw the graph."""
        experiment = self.plan.experiment
        _check_threads(experiment)
        program = Program(self.plan.title, experiment.seed, TensorFiles(), work_counters=("env_steps", "learner_steps"),
                          preload=PRELOAD, options=OPTIONS, metrics=(*self.metrics, *info_metrics(experiment.log.info)))
        program.resumed, program.side_work = resumed, EVALUATING
        parts = Parts(self.algorithm, self.source, experiment.architecture.envs_per_actor, seed=experiment.seed,
                      actors=self.plan.actor_count, most_actors=experiment.autoscale.most if experiment.moving else None,
                      learners=experiment.learners,
                      learner_threads=experiment.learner_threads, max_env_steps=experiment.max_env_steps,
                      anneal_env_steps=experiment.anneal_env_steps,
                      max_learner_steps=experiment.max_learner_steps,
                      eval=self._evaluations(),
                      replay=experiment.replay, spread=experiment.runtime == "ray" and experiment.ray.joined is not None,
                      demos=experiment.demos, data=experiment.data, offline=experiment.offline, hardware=self.hardware(),
                      log_episodes=experiment.log.episodes, initial=self.initial.get(self.name))
        if self.several:
            parts = dataclasses.replace(parts, policies=self.named(parts), league=self.league)
        program.on_gpu = parts.hardware.on_gpu
        program.settings = LiveValues(algorithm=self.algorithm.config, eval=parts.eval, replay=parts.replay,
                                      league=experiment.league)
        with making_networks():  # to know the size of the weights
            if parts.offline and not self.plan.architecture.draws_offline:
                draw_offline(program, parts)
            else:
                self.plan.architecture.draw(program, parts, experiment.architecture)
        return program

    def _evaluations(self) -> EvalPlan:
        experiment = self.plan.experiment
        wanted = experiment.eval.plan(experiment.goal, experiment.against, experiment.offline, *self._evaluation_cores())
        return dataclasses.replace(wanted, enabled=wanted.enabled and self.plan.env.simulated)

    def _evaluation_cores(self) -> tuple[int, int]:
        """Cores for an evaluation of slow environments: those beside actors and learners, and all of them at the end of a run."""
        experiment = self.plan.experiment
        if experiment.runtime != "local" or self.several:  # inline is one thread, a node of a cluster has the cores that were asked
            return 1, 1  # for, and the partners of a policy act in the evaluator's own process
        cores = len(os.sched_getaffinity(0))
        return max(1, cores - self.plan.actor_count - experiment.learners), cores


def prepare(plan: Plan) -> Prepared:
    """Check the plan, make one environment to learn its spaces, and build the algorithm for them."""
    plan.validate()
    module = plan.experiment.net.module
    if isinstance(module, str) and module.startswith("?"):
        raise ConfigError(f"the network {module[1:]} of this run was defined in a script or notebook and cannot be imported; "
                          'pass it again in Python: net={"module": ' + module[1:] + "}")
    if isinstance(module, str) and module.startswith("__main__:"):  # roles have another __main__: send the class itself
        found: Any = find(module)
        plan = dataclasses.replace(plan, experiment=dataclasses.replace(
            plan.experiment, net=dataclasses.replace(plan.experiment.net, module=found)))
    experiment = dataclasses.replace(plan.experiment, actors=plan.actor_count)
    plan = dataclasses.replace(plan, experiment=experiment)
    source = EnvSource(plan.env.target, experiment.envs.backend, experiment.envs.arguments(),
                       handling=Handling(experiment.envs.restart_on_error, experiment.log.info, experiment.net.state_value))
    if experiment.runtime != "inline" and not isinstance(plan.env.target, str):
        try:
            cloudpickle.dumps(plan.env.target)
        except Exception as error:  # pickling runs the user's own code, which may raise anything
            raise ConfigError(f"the environment {plan.env.name} cannot be sent to other processes: {error}; "
                              "make it inside the callable, or use runtime=\"inline\"") from None
    try:
        with patience(experiment.faults.start_seconds, plan.env.name):
            if experiment.several:
                groups = source.describe_multi_agent()
            else:
                spec = source.describe()
    except (ConfigError, EnvironmentError_) as error:
        raise error if plan.env.name in str(error) else ConfigError(f"{plan.env.name}: {error}") from None
    name = experiment.names[0] if experiment.names else "main"
    if experiment.several:
        seating = seating_of(experiment, groups)
        if seating.alone is None:
            return _prepare_several(plan, source, seating)
        spec, name = source.describe(), seating.alone
    if experiment.each:
        plan = own_values(plan, name)
    if spec.takes_turns and not plan.architecture.takes_turns:
        raise ConfigError(f"{plan.env.name}: its agents take turns, and --architecture {plan.names.architecture} asks all of them "
                          "at every step; use --architecture synchronous or actor_learner")
    if experiment.demos is not None:
        _check_demos(plan, spec, source.kwargs)
    seats = experiment.architecture.envs_per_actor * spec.seats_per_env
    _check_minibatches(plan, seats)
    _check_net(experiment.net, spec)
    algorithm = make_algorithm(plan, spec)
    _check_contract(algorithm)
    _check_matches(experiment, source, spec, algorithm)
    check_central_value(plan, spec)
    if experiment.policies == "league":
        return _prepare_league(plan, source, spec)
    return Prepared(plan, source, spec, algorithm, name=name)


def _prepare_league(plan: Plan, source: EnvSource, spec: EnvSpec) -> Prepared:
    """Every player of a league has the same algorithm, for its share of an actor's games."""
    experiment, architecture = plan.experiment, plan.architecture
    if architecture.name != "actor_learner":
        raise ConfigError(f"--policies league does not fit --architecture {plan.names.architecture}: players learn at their own "
                          "pace; use --architecture actor_learner")
    players = LeaguePlan.of(experiment.league).players
    algorithm = make_algorithm(plan, spec, max(1, experiment.architecture.envs_per_actor // len(players)))
    prepared = Prepared(plan, source, spec, algorithm)
    spaces = prepared.raw_spaces()
    learning = tuple(PreparedPolicy(name, f"{name}.", spec, algorithm, *spaces) for name in players)
    return dataclasses.replace(prepared, several=learning)


def _prepare_several(plan: Plan, source: EnvSource, seating: Seating) -> Prepared:
    """Build an algorithm for every policy that learns."""
    experiment = plan.experiment
    if not plan.architecture.takes_policies:
        raise ConfigError(f"--policies with several policies does not fit --architecture {plan.names.architecture}, which has one "
                          "learner for all agents; use --architecture synchronous or actor_learner")
    check_central_value(plan, None)
    if experiment.demos is not None:
        raise ConfigError("--demos with several policies does not fit: a recording does not say whose it is; leave one of them out")
    made = tuple(made_for(plan, name, seating) for name in seating.learning)
    return Prepared(plan, source, made[0].spec, made[0].algorithm, seating, made)


def remade(prepared: Prepared, plan: Plan) -> Prepared:
    """The same with other numbers of processes and environments."""
    if prepared.league is not None:
        return _prepare_league(plan, prepared.source, prepared.spec)
    if prepared.seating is None:
        return dataclasses.replace(prepared, plan=plan, algorithm=make_algorithm(plan, prepared.spec))
    return _prepare_several(plan, prepared.source, prepared.seating)


def made_for(plan: Plan, name: str, seating: Seating) -> PreparedPolicy:
    """One of several policies, with its own values."""
    plan = own_values(plan, name)
    group, share = seating.shares[name]
    described = seating.groups[group]
    seats = max(1, round(plan.experiment.architecture.envs_per_actor * share))
    _check_minibatches(plan, seats)
    _check_net(plan.experiment.net, described.spec)
    algorithm = make_algorithm(plan, described.spec, seats)
    _check_contract(algorithm)
    return PreparedPolicy(name, f"{name}.", described.spec, algorithm, described.raw_observation_space, described.raw_action_space,
                          group)


def _check_contract(algorithm: Algorithm) -> None:
    """Raise if an algorithm, perhaps from outside, lacks what roles read of it (see learning.py and acting.py)."""
    record, who = algorithm.record, type(algorithm).__name__
    if algorithm.from_replay != isinstance(record, ItemRecord):
        raise ConfigError(f"{who}.from_replay is {algorithm.from_replay}, but its record is a {type(record).__name__}; an "
                          "algorithm that learns from replay has an ItemRecord, any other an UnrollRecord (shoal/acting.py)")
    if algorithm.evolves != isinstance(record, ScoreRecord):
        raise ConfigError(f"{who}.evolves is {algorithm.evolves}, but its record is a {type(record).__name__}; an algorithm that "
                          "evolves has a ScoreRecord (shoal/population.py)")
    needed = ("weights_version", "time") if algorithm.from_replay else ("valid", "weights_version", "time")
    needed = ("score", "decisions") if algorithm.evolves else needed
    of_record = "population.py" if algorithm.evolves else "acting.py"
    with making_networks():
        published = algorithm.published_layout()
    for what, layout, names, page in (("record.layout", record.layout, needed, of_record),
                                      ("published_layout()", published, ("progress",), "learning.py")):
        missing = [name for name in names if name not in layout.fields]
        if missing:
            raise ConfigError(f"{who}.{what} has no field {' and no field '.join(missing)}; roles read it (shoal/{page})")


def _check_matches(experiment: Experiment[Any, Any], source: EnvSource, spec: EnvSpec, algorithm: Algorithm) -> None:
    """Whether the environment and the policy allow the evaluations that are wanted."""
    if experiment.policies in ("self-play", "league") and spec.seats_per_env == 1:
        raise ConfigError(f"--policies {experiment.policies} needs a game of several agents, but {spec.name} has one; leave it out")
    source.against(experiment.against)
    goal = experiment.goal
    if goal is not None and goal.metric == "exploitability" and quick_tree(algorithm.policy(), source) is None:
        raise ConfigError(f"the exploitability of --algorithm {algorithm.name} on {spec.name} cannot be computed during a run; it "
                          "can for a2c, ppo, appo and vtrace without memory on matrix games of one round and shoal/Kuhn-v0")


def _check_net(net: NetConfig, spec: EnvSpec) -> None:
    """Count the parameters before they are made: a network that does not fit takes minutes to fail."""
    shapes = [shape for _, (shape, _) in leaves(leaf_tree(spec.observation_space)) if len(shape) < 3 or net.torso == "mlp"]
    layers = () if net.module is not None or not shapes else (sum(math.prod(shape) for shape in shapes), *net.hidden)
    parameters = sum(math.prod(pair) for pair in itertools.pairwise(layers))
    if net.recurrent == "lstm":
        parameters += 4 * net.lstm_size * (net.lstm_size + 1)
    nbytes, memory = COPIES * 4 * parameters, most_memory()
    if nbytes > memory:
        raise ConfigError(f"the network is too large for this machine: its {parameters:,} parameters need at least "
                          f"{nbytes / 1e9:,.1f} GB of memory to learn, and there are {memory / 1e9:,.1f} GB; lower --net.hidden or "
                          "--net.lstm-size")


def make_algorithm(plan: Plan, spec: EnvSpec, seats: int | None = None) -> Algorithm:
    """The algorithm for the seats of one actor: all of them, or `seats`."""
    kind: Any = plan.algorithm  # made as (config, spec, net, seats)
    seats = plan.experiment.architecture.envs_per_actor * spec.seats_per_env if seats is None else seats
    with making_networks():
        made: Algorithm = kind(plan.experiment.algorithm, spec, plan.experiment.net, seats)
    return made


def _check_demos(plan: Plan, spec: EnvSpec, kwargs: Mapping[str, Any]) -> None:
    """Whether the demonstrations are whole and of this environment; every episode is looked at once."""
    from shoal.offline import check_recording, open_demos

    path = str(plan.experiment.demos)
    demos = open_demos(path)
    check_recording(demos.info, path, spec, plan.env.name, kwargs, plan.experiment.foreign_demos or not plan.env.simulated)
    for _ in demos.episodes():
        pass


@contextlib.contextmanager
def making_networks() -> Iterator[None]:
    """A network that is too large becomes a ConfigError; torch raises a RuntimeError for it, among others."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError) as error:
        if not any(frame.f_globals.get("__name__", "").startswith("shoal.nets") for frame, _ in walk_tb(error.__traceback__)):
            raise
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the network cannot be made: {why}; make it smaller with --net.*") from None


def _check_threads(experiment: Experiment[Any, Any]) -> None:
    """Threads beyond the number of cores only wait for each other. The nodes of a cluster may have more cores than this machine."""
    cores = len(os.sched_getaffinity(0))
    if experiment.learner_threads > cores and not (experiment.runtime == "ray" and experiment.ray.joined):
        raise ConfigError(f"--learner-threads {experiment.learner_threads} is more than this machine's {cores} cores; give "
                          f"--learner-threads {cores} or fewer")


@runtime_checkable
class _Minibatched(Protocol):
    """The options of an algorithm that cuts its batches of unrolls."""

    minibatches: int
    unroll: int


def _check_minibatches(plan: Plan, seats: int) -> None:
    """A batch cannot be cut into more parts than it has decisions."""
    options = plan.experiment.algorithm
    if not isinstance(options, _Minibatched):
        return
    batch = seats * options.unroll * plan.slots_per_batch
    if options.minibatches > batch:
        raise ConfigError(f"--algorithm.minibatches {options.minibatches} is more than the {batch} decisions of a batch; lower it")


def plan_to_json(plan: Plan, resumed: int = 0) -> dict[str, Any]:
    """config.json: every value, resolved."""
    values: dict[str, Any] = json_values(plan.experiment)
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
        raise ConfigError(f"{where} is not a config.json of shoal: it has no {error}; give a run directory") from None
    plan = default_plan(names, EnvRef.from_record(record, env), None)
    values = {**values, "algorithm": algorithm, "architecture": architecture}
    experiment: Experiment[Any, Any] = with_values(plan.experiment, values, where)
    return dataclasses.replace(plan, experiment=experiment)
