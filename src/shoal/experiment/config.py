"""What an experiment is: an environment, an algorithm, an architecture, a runtime, and every value they need.

    Plan        an algorithm, an architecture, an environment, and the Experiment with all values
    Experiment  frozen nested dataclasses; --section.field VALUE on the command line, section={"field": value} in Python

A Plan comes from the command line (parse.py), from Python (`plan_of`) or from a run's config.json (`plan_from_json`);
all three end in `validate`, which names the values that clash and the fix before any process starts.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar

from shoal.coordination.autoscale import AutoscaleConfig
from shoal.device.placement import DeviceName, GpuConfig
from shoal.errors import ConfigError
from shoal.experiment.compatibility import check_fit
from shoal.experiment.components import Components, Names
from shoal.experiment.policy_choice import PolicyName
from shoal.experiment.presets import Preset
from shoal.experiment.references import EnvRef
from shoal.experiment.sizing import Sizing, check_cores, sized
from shoal.experiment.values import with_values
from shoal.league.matchmaking import LeagueOptions
from shoal.learning import Algorithm, Architecture
from shoal.nets.net_config import NetConfig
from shoal.offline.data_config import DataConfig
from shoal.options import Options, flag, number
from shoal.roles.goals import Goal
from shoal.roles.parts import EvalPlan
from shoal.roles.replay_config import ReplayConfig
from shoal.runtime import Faults, RayConfig

__all__ = [
    "AutoChoice",
    "CheckpointConfig",
    "ConsoleConfig",
    "EnvsConfig",
    "EvalConfig",
    "Experiment",
    "LogConfig",
    "Names",
    "Plan",
    "RayOptions",
    "check_ray",
    "default_plan",
    "experiment_type",
    "offline_data",
]

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True)
class EnvsConfig(Options):
    """How environments are made."""

    section = "envs"

    backend: Literal["auto", "compiled", "vector", "loop", "ale", "envpool"] = "auto"
    """Which back-end steps them; auto chooses and says why."""
    kwargs: tuple[str, ...] = ()
    """Arguments of the environment, as name=value pairs: --envs.kwargs observation=pixels size=7"""

    restart_on_error: int = number(0, at_least=0)
    """Make an environment that raises anew, alone, and truncate its episode: so often in a row without an episode that ended. 0:
    what an environment raises ends the run."""

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
        super().validate()
        self.arguments()


@dataclass(frozen=True)
class EvalConfig(Options):
    """When and how the policy is evaluated, with environments and seeds of its own."""

    section = "eval"

    enabled: bool = True
    """Evaluate at all."""
    episodes: int = number(100, at_least=1)
    """Fresh episodes of one published version in an evaluation; 20 for Atari."""
    every_env_steps: int = number(20_000, at_least=1, live=True)
    """Decisions between two evaluations."""
    every_learner_steps: int = number(1_000, at_least=1)
    """Updates between two evaluations where no actors run (--offline)."""
    greedy: bool = True
    """Take the likeliest action; otherwise explore as in training."""
    last_env_steps: int | None = number(None, at_least=1)
    """About how many decisions the final evaluation takes, at least one episode; a tenth of the run's by default."""
    max_episode_steps: int = number(10_000, at_least=1)
    """Cut episodes off after this many decisions and count them as they are, unless the environment's own limit is higher."""

    def plan(self, goal: Goal | None, against: str | None = None, offline: bool = False, free_cores: int = 1,
             last_cores: int = 1) -> EvalPlan:
        updates = self.every_learner_steps if offline else None
        by_value = goal is not None and goal.metric == "fqe"
        return EvalPlan(self.enabled, self.episodes, self.every_env_steps, updates, self.greedy, None if by_value else goal,
                        goal if by_value else None, against, self.max_episode_steps, free_cores, last_cores)


@dataclass(frozen=True)
class CheckpointConfig(Options):
    """When the state of a run is saved."""

    section = "checkpoint"

    every_seconds: float = number(60.0, at_least=0.1, live=True)
    """Time between two checkpoints; there is always one from step 0 and one at the end."""
    keep: int = number(3, at_least=1)
    """How many of the newest are kept."""


@dataclass(frozen=True)
class LogConfig(Options):
    """What is logged of environments, beyond returns and lengths."""

    section = "log"

    info: tuple[str, ...] = ()
    """Keys of the environments' info whose numbers are logged: their mean is a metric, their last value is in the episode log."""
    episodes: bool = False
    """Write every training episode (return, length, seconds, environment) to RUN/episodes/*.monitor.csv."""


@dataclass(frozen=True)
class ConsoleConfig(Options):
    """What is shown while it runs."""

    section = "console"

    mode: Literal["auto", "live", "plain", "none"] = "auto"
    """A live table, plain lines or nothing; auto is live on a terminal and plain elsewhere."""
    every_seconds: float = number(5.0, at_least=0.1)
    """Time between two plain lines."""


@dataclass(frozen=True)
class RayOptions(RayConfig):
    """The cluster of --runtime ray."""

    gpus_per_learner: float = number(1.0, at_least=0)
    """GPUs that each learner and each inference server asks for, where the run computes on GPUs."""

    @property
    def gpus_per_place(self) -> float:
        return self.gpus_per_learner


@dataclass(frozen=True)
class Experiment(Options, Generic[A, R]):
    """Every value of a run."""

    algorithm: A
    """What is learned."""
    architecture: R
    """Who does what, with whom."""
    net: NetConfig = field(default_factory=NetConfig)
    """The network."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """The replay table, for algorithms that learn from one."""
    data: DataConfig = field(default_factory=DataConfig)
    """How a recording is read that is learned from alone."""
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
    log: LogConfig = field(default_factory=LogConfig)
    """What is logged of environments."""
    league: LeagueOptions = field(default_factory=LeagueOptions)
    """Players, matches and snapshots of --policies league."""
    ray: RayOptions = field(default_factory=RayOptions)
    """The cluster of --runtime ray."""
    runtime: Literal["local", "inline", "ray"] = "local"
    """Where roles live: local has a process each, inline runs them in one thread, bit-exact for a seed, ray has a cluster."""
    actors: int | Literal["auto"] = number("auto", at_least=1, live=True)
    """How many actors; auto measures a starting number, then follows the learner."""
    learners: int = number(1, at_least=1)
    """How many learners share the gradients."""
    learner_threads: int = number(1, at_least=1)
    """Threads that each learner computes with."""
    device: DeviceName = "auto"
    """Where learners and inference servers compute; auto takes a GPU for images and for the device architecture."""
    cores: int | None = number(None, at_least=1)
    """How many of this machine's cores the run may use; all of them by default."""
    values: Literal["tuned", "paper"] = "tuned"
    """Which values a preset prefers: those we tuned, or the publication's."""
    seed: int = number(0, at_least=0, below=2**53)
    """Everything random derives from it."""
    until_return: float | None = number(None)
    """Stop when an evaluation's mean return reaches this, confirmed by a second one."""
    until: str | None = None
    """Stop when an evaluation's METRIC[(OPPONENT)] >= (or <=) NUMBER, confirmed by a second one: return, win_rate, loss_rate,
    exploitability; fqe, fitted Q of a recording that is learned from alone."""
    policies: str = "shared"
    """Environments with several agents: shared is one policy for all of them, self-play one for all sides of a game, evaluated
    against random play, independent one for each agent, league a league of players; or
    module:function, which says (agent, episode) -> name of a policy."""
    names: tuple[str, ...] = ()
    """Names of the policies; without it one is called main, and several as --policies says."""
    train: tuple[str, ...] = ()
    """Which of several policies learn; without it all that are not --fixed."""
    fixed: tuple[str, ...] = ()
    """Policies that do not learn, as name=SOURCE pairs: random, RUN[:POLICY] or module:function (observation -> action).
    Add --trust for a run that imports modules from outside the installed environment."""
    each: tuple[str, ...] = ()
    """Values of single policies, as name.option=value pairs: --each walker.algorithm.lr=1e-3"""
    max_env_steps: int | None = number(None, above=0)
    """Stop after this many agent decisions."""
    anneal_env_steps: int | None = number(None, above=0)
    """Decisions after which what is annealed has its final value, where there is no --max-env-steps."""
    max_learner_steps: int | None = number(None, above=0)
    """Stop after this many updates."""
    max_seconds: float | None = number(None, above=0)
    """Stop after this much time, counted from the first environment step (offline: from the first update)."""
    policy: PolicyName = "best"
    """Which policy is handed back (run.policy, eval, play): the best of all evaluated versions, or the last one."""
    init_from: str | None = None
    """Begin with the weights of another run (its directory): of all layers that have the same shapes there; counts, optimiser and
    schedules begin anew."""
    demos: str | None = None
    """Folder of demonstrations to learn from as well: of `shoal data record`, or a Minari dataset."""
    offline: bool = False
    """Learn from --demos alone, without actors."""
    foreign_demos: bool = False
    """Take demonstrations of another environment that has the same spaces."""
    run_dir: str | None = None
    """Where the run is written; runs/<time>-<preset>-<env>-<seed> by default."""
    tensorboard: bool = True
    """Write TensorBoard files into the run directory."""

    @property
    def goal(self) -> Goal | None:
        """Of --until or --until-return."""
        if self.until is None:
            return None if self.until_return is None else Goal("return", self.until_return)
        if self.until_return is not None:
            raise ConfigError(f'--until-return {self.until_return:g} and --until "{self.until}" are two goals; give one of them')
        return Goal.parse(self.until)

    @property
    def against(self) -> str | None:
        """The opponent in evaluations; none: the policies of the run play all seats themselves."""
        if self.policies not in ("self-play", "league"):
            return None
        return (self.goal.opponent if self.goal is not None else None) or "random"

    @property
    def several(self) -> bool:
        """Whether agents may have different policies."""
        return self.policies not in ("shared", "self-play", "league")

    @property
    def moving(self) -> bool:
        """Whether the number of actors follows the learner; `layout.laid_out` decides it."""
        return self.autoscale.most is not None and self.actors == self.autoscale.start

    def validate(self) -> None:
        super().validate()
        sections: tuple[Any, ...] = (self.algorithm, self.architecture, self.net, self.replay, self.data, self.envs, self.eval,
                                     self.checkpoint, self.gpu, self.console, self.log, self.faults, self.autoscale, self.league,
                                     self.ray)
        for section in sections:
            section.validate()
        if self.actors != "auto" and (
                self.autoscale.start not in (None, self.actors) or (self.autoscale.most and not self.moving)):
            raise ConfigError(f"--actors {self.actors} is a fixed number, but --autoscale.start is {self.autoscale.start} and "
                              f"--autoscale.most is {self.autoscale.most}; give --actors auto, or leave these two out")
        if self.offline:
            self._validate_offline()
        goal = self.goal
        if goal is not None and goal.metric == "fqe":
            if not self.offline:
                raise ConfigError(f'--until "{self.until}" is estimated from a recording that is learned from alone; give a '
                                  "recording to an offline preset, or --demos PATH --offline")
            goal = None
        if goal is not None and not self.eval.enabled:
            words = f"--until-return {self.until_return:g}" if self.until is None else f'--until "{self.until}"'
            raise ConfigError(f"{words} needs evaluations, but --eval.enabled is false; turn it on with --eval.enabled")
        if goal is not None and self.against is None and (goal.opponent is not None or goal.metric != "return"):
            why = "the policies of the run sit" if self.several else "--policies is shared: one policy sits"
            raise ConfigError(f'--until "{self.until}" needs matches against an opponent, but {why} on all seats; give --policies '
                              "self-play")
        if not self.several:
            self._validate_alone()
        if self.league != LeagueOptions() and self.policies != "league":
            raise ConfigError(f"--league.* speaks of a league, but --policies is {self.policies}; give --policies league, or leave "
                              "it out")

    def _validate_alone(self) -> None:
        """What is said of several policies needs several."""
        for option in ("train", "fixed", "each"):
            words = getattr(self, option)
            if words and not (len(self.names) == 1 and option != "fixed" and words[0].partition(".")[0] == self.names[0]):
                raise ConfigError(f"--{option} {words[0]} speaks of one policy among several, but --policies is {self.policies}; "
                                  "give --policies independent or module:function")
        if len(self.names) > 1:
            raise ConfigError(f"--names {' '.join(self.names)} are {len(self.names)} policies, but --policies {self.policies} has "
                              "one; give --policies independent or module:function")

    def _validate_offline(self) -> None:
        if self.demos is None:
            raise ConfigError("--offline learns from demonstrations alone, and there are none; give --demos PATH "
                              "(make some with `shoal data record`)")
        if self.max_env_steps is not None:
            raise ConfigError(f"--max-env-steps {self.max_env_steps} is never reached with --offline, which takes no environment "
                              "steps; give --max-learner-steps or --max-seconds")


@dataclass(frozen=True)
class AutoChoice:
    """The layout that `--actors auto` chose."""

    chosen: str
    """The layout in words."""
    how: str
    tried: Mapping[str, float] = field(default_factory=dict)
    """Env steps/s of every layout that was measured, fastest first."""


@dataclass(frozen=True)
class Plan:
    """A whole experiment, ready to be checked and run."""

    names: Names
    env: EnvRef
    experiment: Experiment[Any, Any]
    algorithm: type[Algorithm] = field(compare=False)  # the names say which
    architecture: Architecture = field(compare=False)
    found: AutoChoice | None = None
    sizing: Sizing | None = field(default=None, compare=False)
    """How a preset's values were chosen for this machine; None for a pair, and for a run that continues."""
    trust: bool = False
    """Whether runs that it names (--fixed, --init-from) may import modules from outside the installed environment; not kept in
    config.json."""

    @property
    def title(self) -> str:
        """For people: the preset, or "ppo x synchronous"."""
        return self.names.title(self.algorithm, self.architecture)

    @property
    def folder_name(self) -> str:
        """The same in the name of a run directory: "ppoxsynchronous"."""
        return self.names.title(self.algorithm, self.architecture, between="x")

    @property
    def actor_count(self) -> int:
        """The number behind `auto`: a core is left for the learner, but two actors overlap better than one."""
        experiment = self.experiment
        if experiment.actors != "auto":
            return experiment.actors
        if not self.architecture.has_actors:
            return 1
        return experiment.autoscale.start or max(2, len(os.sched_getaffinity(0)) - 1)

    @property
    def slots_per_batch(self) -> int:
        """Unrolls in a batch of one learner: a number that was given, or one of every actor."""
        options = self.experiment.architecture
        return int(options.batch_slots) if self.architecture.batch_slots else self.actor_count

    @property
    def one_place(self) -> bool:
        """Whether actors share their learner's process."""
        return self.architecture.one_place and bool(self.experiment.architecture.one_place)

    def validate(self) -> None:
        """Check every value, then whether the algorithm can learn from what the architecture delivers."""
        experiment = self.experiment
        experiment.validate()
        if experiment.values == "paper" and self.names.preset is None:
            raise ConfigError("--values paper chooses among a preset's values, and there is no preset; give one, or leave it out")
        if experiment.actors != "auto" and experiment.actors > 1 and not self.architecture.has_actors:
            raise ConfigError(f"--actors {experiment.actors} does not fit --architecture {self.names.architecture}, whose learner "
                              "acts itself; leave it out, and raise --architecture.envs-per-actor")
        if experiment.log != LogConfig() and not self.architecture.reports_steps:
            option = "--log.episodes" if experiment.log.episodes else f"--log.info {experiment.log.info[0]}"
            raise ConfigError(f"{option} does not fit --architecture {self.names.architecture}, which keeps no account of single "
                              "episodes; leave it out")
        self._validate_evaluations()
        check_fit(self.names, self.algorithm, self.architecture, experiment.architecture, demos=experiment.demos is not None,
                  replay_options=experiment.replay != ReplayConfig())


    def _validate_evaluations(self) -> None:
        experiment = self.experiment
        if experiment.offline and self.env.simulated and not experiment.eval.enabled:
            raise ConfigError("--offline needs evaluations to show what is learned, but --eval.enabled is false; leave it on "
                              "(a large --eval.every-learner-steps costs little)")
        by_value = experiment.goal is not None and experiment.goal.metric == "fqe"
        if by_value and self.architecture.draws_offline:
            raise ConfigError(f'--until "{experiment.until}" does not fit --architecture {self.names.architecture}, which has no '
                              "value estimator; give --max-learner-steps")
        if experiment.goal is not None and not by_value and not self.env.simulated:
            raise ConfigError(f"the goal {experiment.goal} needs evaluations, and {self.env.name} is known from recordings alone; "
                              "give the simulator with --env ENV, or --max-learner-steps")


def experiment_type(plan: Plan) -> Any:
    """Experiment[its algorithm's Config, its architecture's Config]: what tyro needs to know."""
    generic: Any = Experiment
    return generic[plan.algorithm.config_class, plan.architecture.config_class]


def check_ray(experiment: Experiment[Any, Any], before: RayOptions | None = None) -> None:
    """Refuse --ray.* (other than `before`) without --runtime ray; a run that was on a cluster may continue elsewhere."""
    before = before or RayOptions()
    if experiment.runtime == "ray" or experiment.ray == before:
        return
    name, value = next((entry.name, value) for entry in fields(before)
                       if (value := getattr(experiment.ray, entry.name)) != getattr(before, entry.name))
    raise ConfigError(f"{flag(name, 'ray')} {value} needs --runtime ray, but this run has --runtime {experiment.runtime}; give "
                      "--runtime ray too, or leave it out")


def offline_data(place: str, simulator: EnvRef | None) -> tuple[EnvRef, dict[str, Any]]:
    """The environment of an offline preset, which is that of the recording where there is no simulator, and the values that name
    the recording."""
    from shoal.offline import found_at, open_demos

    path = str(found_at(place))
    return simulator or EnvRef.recorded(open_demos(path).info, path), {"demos": path, "offline": True}


def default_plan(names: Names | Components, env: EnvRef, preset: Preset | None, overrides: Mapping[str, Any] | None = None,
                 wished: Experiment[Any, Any] | None = None, measure: bool = True) -> Plan:
    """The defaults, then the preset's values for the environment and this machine, then `overrides` (dotted or nested keys).
    `wished` says what is asked of the machine, where that is not in `overrides`. With `measure`, what a step of the environment
    costs is found out where it matters."""
    chosen = names if isinstance(names, Components) else Components.named(names)
    plain: Experiment[Any, Any] = Experiment(chosen.algorithm.config_class(), chosen.architecture.config_class())
    if env.name.startswith("ALE/"):
        plain = with_values(plain, {"eval.episodes": 20}, "the default for Atari")

    def made(values: Mapping[str, Any]) -> Experiment[Any, Any]:
        experiment = with_values(plain, values, f"preset {preset.name}" if preset else "")
        return with_values(with_values(experiment, chosen.values, ""), overrides or {}, "")

    if preset is None:
        sizing, values = None, {}
    else:
        asked = wished or made(preset.values(env.name))
        sizing = sized(preset, chosen, env, asked, measure)
        values = {key: value for key, value in sizing.values.items() if asked.policies == "league" or not key.startswith("league.")}
    experiment = made(values)
    check_ray(experiment)
    check_cores(experiment)
    return Plan(chosen.names, env, experiment, chosen.algorithm, chosen.architecture, sizing=sizing)
