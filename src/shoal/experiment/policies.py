"""Several policies in one run: from --policies, --names, --train, --fixed and --each to who plays for which agent.

    shared, self-play        one policy for all agents: the program as it is without names
    independent              one for each agent, called like it
    module:function          (agent, episode) -> name

Who plays is found by asking the mapping for the first 1,000 episodes, so that mistakes are said before anything starts.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from shoal.acting import Progress
from shoal.envs import EnvSpec
from shoal.envs.multi_agent import GroupSpec
from shoal.envs.opponent_env import OpponentMaker, random_opponent
from shoal.errors import ConfigError
from shoal.experiment.references import find, modules_of
from shoal.experiment.values import with_values
from shoal.learning import Algorithm
from shoal.roles.policies import PolicyOf
from shoal.roles.policy_opponent import policy_opponent, script_opponent

if TYPE_CHECKING:
    from shoal.experiment.config import Experiment, Plan

__all__ = ["PreparedPolicy", "Seating", "absolute", "fixed_policy", "own_values", "pairs", "policies_given", "seating_of",
           "untrained_policy"]

EPISODES = 1_000
LONGEST_NAME = 64  # of a policy, in bytes
OWN = ("algorithm.", "net.")  # what may differ from policy to policy


@dataclass(frozen=True)
class PreparedPolicy:
    """A policy that learns, with what was built for it."""

    name: str
    scope: str
    """What the names of its roles and of its files begin with; empty where the program has one policy."""
    spec: EnvSpec
    algorithm: Algorithm
    raw_observation_space: gym.Space[Any]
    raw_action_space: gym.Space[Any]
    group: int = 0


@dataclass(frozen=True)
class Seating:
    """Who plays for whom."""

    policy_of: PolicyOf
    groups: tuple[GroupSpec, ...]
    shares: Mapping[str, tuple[int, float]]
    """Of every policy: its group, and for how many agents of an environment it plays on average."""
    learning: tuple[str, ...]

    @property
    def alone(self) -> str | None:
        """The policy that learns and plays for all agents, if there is one."""
        return self.learning[0] if len(self.shares) == 1 and len(self.groups) == 1 else None


# ---------------------------------------------------------------------------------------------- what the user gives
def policies_given(values: dict[str, Any]) -> dict[str, Any]:
    """Python's policies={name: values, source or None}, policy_of= and train= as values of an Experiment."""
    policies, policy_of = values.pop("policies", None), values.pop("policy_of", None)
    if isinstance(policies, Mapping):
        values["names"] = tuple(policies)
        values["fixed"] = tuple(f"{name}={source}" for name, source in policies.items() if isinstance(source, str))
        values["each"] = tuple(f"{name}.{key}={value!r}" for name, own in policies.items() if isinstance(own, Mapping)
                               for key, value in _flat(own))
        unfit = [name for name, own in policies.items() if own is not None and not isinstance(own, str | Mapping)]
        if not policies:
            raise ConfigError("policies={} names no policy; name one, or leave it out")
        if unfit:
            raise ConfigError(f"policies={{{unfit[0]!r}: {policies[unfit[0]]!r}}} is not possible: give None, a dictionary "
                              'of values such as {"algorithm.lr": 1e-3}, or what acts without learning: "random", "RUN" or '
                              '"module:function"')
        policies = None if policy_of is not None else "shared" if len(policies) == 1 else "independent"
    if policy_of is not None:
        if policies is not None:
            raise ConfigError(f"policies={policies!r} and policy_of={policy_of!r} both say who plays for whom; give one of them")
        policies = policy_of
    return values if policies is None else {**values, "policies": policies}


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    return [pair for key, value in values.items()
            for pair in (_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)])]


def pairs(option: str, words: tuple[str, ...]) -> dict[str, str]:
    """name=value words as a dictionary."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"--{option} {word} is not a name=value pair; write it like "
                              f"{'rival=random' if option == 'fixed' else 'walker.algorithm.lr=1e-3'}")
        found[name] = value
    return found


def absolute(fixed: tuple[str, ...]) -> tuple[str, ...]:
    """--fixed with absolute paths of runs: a resume may come from another folder."""
    return tuple(f"{name}={Path(source).resolve() if Path(source.partition(':')[0]).is_dir() else source}"
                 for name, source in pairs("fixed", fixed).items())


def own_values(plan: Plan, name: str) -> Plan:
    """The plan with one policy's own values (--each)."""
    values = {}
    for key, text in pairs("each", plan.experiment.each).items():
        whose, _, option = key.partition(".")
        if not option.startswith(OWN):
            raise ConfigError(f"--each {key}={text} is not possible: policies may have their own algorithm.* and net.* values, "
                              "such as walker.algorithm.lr=1e-3")
        if whose == name:
            values[option] = _literal(text)
    experiment: Experiment[Any, Any] = with_values(plan.experiment, values, f"policy {name}")
    experiment.validate()
    return replace(plan, experiment=experiment)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# ---------------------------------------------------------------------------------------------- who plays for whom
def seating_of(experiment: Experiment[Any, Any], groups: tuple[GroupSpec, ...]) -> Seating:
    """Ask the mapping who plays, and check it against the names that were given."""
    policy_of, agents = _mapping(experiment.policies), [(agent, k) for k, group in enumerate(groups) for agent in group.agents]
    fixed, names = pairs("fixed", experiment.fixed), experiment.names
    seats: Counter[str] = Counter()
    group_of: dict[str, tuple[int, str]] = {}
    for episode in range(EPISODES if experiment.policies != "independent" else 1):
        for agent, group in agents:
            name = _asked(policy_of, agent, episode)
            if names and name not in names and name not in fixed:
                raise ConfigError(f"the mapping gave agent {agent!r} the policy {name!r} in episode {episode}, and the policies "
                                  f"are {', '.join((*names, *fixed))}; add it, or name another one")
            before = group_of.setdefault(name, (group, agent))
            if before[0] != group:
                raise ConfigError(f"policy {name} would play for {before[1]!r} and {agent!r}, which have different spaces; give "
                                  "each of them a policy of its own (--policies independent)")
            seats[name] += 1
    episodes = EPISODES if experiment.policies != "independent" else 1
    seated = (*(name for name in names if name in seats), *(name for name in seats if name not in names))
    return Seating(policy_of, groups, {name: (group_of[name][0], seats[name] / episodes) for name in seated},
                   _learning(experiment, seated, tuple(fixed)))


def _learning(experiment: Experiment[Any, Any], seated: tuple[str, ...], fixed: tuple[str, ...]) -> tuple[str, ...]:
    for option, words in (("train", experiment.train), ("fixed", fixed),
                          ("each", tuple(key.partition(".")[0] for key in pairs("each", experiment.each)))):
        missing = [name for name in words if name not in (*seated, *experiment.names)]
        if missing:
            raise ConfigError(f"--{option} names {missing[0]}, which is not a policy of this run; there are {', '.join(seated)}")
    clash = [name for name in experiment.train if name in fixed]
    if clash:
        raise ConfigError(f"--train {clash[0]} and --fixed {clash[0]}=... contradict each other; give one of them")
    idle = [name for name in experiment.train or (*experiment.names, *fixed) if name not in seated]
    if idle:
        what = "is to be trained, but" if experiment.train or idle[0] not in fixed else "is given, but"
        raise ConfigError(f"policy {idle[0]} {what} plays for no agent in the first {EPISODES:,} episodes; let the mapping "
                          f"give it a seat, or leave it out{' of --train' if experiment.train else ''}")
    learning = tuple(name for name in seated if (name in experiment.train if experiment.train else name not in fixed))
    if not learning:
        raise ConfigError(f"no policy learns: {', '.join(seated)} are all fixed; leave one out of --fixed")
    return learning


def _mapping(policies: Any) -> PolicyOf:
    if policies == "independent":
        return _own_name
    if callable(policies):
        return _checked(policies)
    if policies.startswith("?"):
        raise ConfigError(f"the mapping {policies[1:]} of this run was defined in a script or notebook and cannot be imported; put "
                          "it into a module (a .py file), and train again from there")
    if ":" not in policies:
        raise ConfigError(f"--policies {policies} is not possible: give shared, self-play, league, independent or module:function, "
                          "a function (agent, episode) -> name of a policy")
    return _checked(find(policies))


def _checked(function: Any) -> PolicyOf:
    if not callable(function):
        raise ConfigError(f"{function!r} is not a mapping; give a function (agent, episode) -> name of a policy")
    made: Callable[[str, int], str] = function
    return made


def _own_name(agent: str, episode: int) -> str:
    return agent


def _asked(policy_of: PolicyOf, agent: str, episode: int) -> str:
    try:
        name = policy_of(agent, episode)
    except Exception as error:  # whatever a user's function raises
        raise ConfigError(f"the mapping raised {type(error).__name__}: {error} for agent {agent!r} in episode {episode}") from error
    if not isinstance(name, str) or not name.replace("_", "a").isalnum():
        own = policy_of is _own_name
        said = f"--policies independent calls it {name!r}, like the agent" if own else f"the mapping gave {name!r}"
        raise ConfigError(f"agent {agent!r} has no policy in episode {episode}: {said}; give the name of a policy, of letters, "
                          f"digits and '_'{', with --policies module:function' if own else ''}")
    if len(name.encode()) > LONGEST_NAME:
        raise ConfigError(f"the policy {name[:20]}... of agent {agent!r} has a name of {len(name.encode())} bytes, and files are "
                          f"called like it; give one of at most {LONGEST_NAME}")
    return name


# ---------------------------------------------------------------------------------------------- policies that do not learn
def fixed_policy(word: str, name: str, group: GroupSpec, trust: bool) -> OpponentMaker:
    """What --fixed NAME=WORD names: random, RUN[:POLICY] or module:function. A run's policy samples its actions as in training.
    Without `trust` the run may import only what is imported already, or lies in the installed environment."""
    if word == "random":
        return random_opponent
    path, _, policy = word.rpartition(":") if not Path(word).exists() and ":" in word else (word, "", "")
    if (Path(path) / "config.json").is_file():
        from shoal.experiment.run import load
        from shoal.experiment.rundir import RunDir

        known = all(module in sys.modules for module in modules_of(RunDir.open(Path(path)).config()))  # imported already
        run = load(path, trust=trust or known)
        chosen = run.prepared.policies.get(policy) if policy else next(iter(run.prepared.policies.values()))
        if chosen is None:
            raise ConfigError(f"--fixed {name}={word}: {path} has no policy {policy}; there are {', '.join(run.prepared.policies)}")
        spaces = (group.spec.observation_space, group.spec.action_space)
        if (chosen.spec.observation_space, chosen.spec.action_space) != spaces:
            raise ConfigError(f"--fixed {name}={word} cannot play for {group.agents[0]!r}, which has other spaces than the policy "
                              "was trained for; give a run of the same environment")
        return policy_opponent(chosen.algorithm, run.published_by(chosen.name), greedy=False)
    if ":" in word:
        return script_opponent(_checked(find(word)), word)
    raise ConfigError(f"--fixed {name}={word} is not possible: give random, the directory of a run (RUN or RUN:POLICY), or "
                      "module:function")


def untrained_policy(algorithm: Algorithm, seed: int) -> OpponentMaker:
    """A policy as it is before anything is learned."""
    return policy_opponent(algorithm, algorithm.learn(seed).published(Progress()), greedy=False)
