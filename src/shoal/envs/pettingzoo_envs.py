"""PettingZoo's environments, recognised by their attributes: ParallelEnvs, where all living agents act at every step, and AECEnvs,
where one agent acts at a time.

ParallelEnv: an agent that is not alive gives rows that are not valid until the environment ends (all its agents done), when every
seat gets its first observation of the next episode. An agent that enters in the middle of an episode begins with first=True on a
row that is not valid.

AECEnv: a step makes one decision in every environment, that of the agent that was asked, and continues to the next agent that is
alive. On the way agents that have died are closed with their last reward. `AECEnv.last()` gives an agent all that it earned since
it last acted, which is what a row of a seat needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.envs.seat_rows import AgentEnvs
from shoal.envs.space_codecs import BadValue

__all__ = ["ParallelEnvs", "TurnEnvs", "is_parallel", "is_turn_based"]


def is_parallel(env: Any) -> bool:
    """Whether this looks like a ParallelEnv. By attributes, so that pettingzoo need not be installed."""
    return hasattr(env, "possible_agents") and hasattr(env, "reset") and hasattr(env, "step")


class ParallelEnvs(AgentEnvs):
    """A list of ParallelEnv as a MultiAgentEnv."""

    def _step_env(self, e: int, actions: dict[Any, Any]) -> None:
        env = self._envs[e]
        with self._calling("step"):
            answer = env.step(actions)
        self._note_state(e)
        if not (isinstance(answer, tuple) and len(answer) == 5):
            raise BadValue("step() must return (observations, rewards, terminations, truncations, infos)")
        observations, rewards, terminations, truncations, infos = answer
        infos = infos or {}
        for agent in actions:
            self._settle(e, agent, rewards.get(agent, 0.0), infos.get(agent))
            died = self._end(e, agent, terminations.get(agent, False), truncations.get(agent, False), observations.get(agent),
                             infos.get(agent))
            if not died and agent not in observations:
                raise BadValue(f"agent {agent!r} is alive but got no observation")
        living = getattr(env, "agents", None)
        self._observe(e, observations, infos, living or ())
        if living is not None:
            over = len(living) == 0
        else:
            over = not any(rows.alive[row] for rows, row in (self._seat(e, agent) for agent in self._keys))
        if over:
            self._begin_next(e)

    def _observe(self, e: int, observations: dict[Any, Any], infos: dict[Any, Any], living: Sequence[Any]) -> None:
        """Ask the living agents; one of `living` that was not there before begins its episode here."""
        for agent, observation in observations.items():
            rows, row = self._seat(e, agent)
            if rows.alive[row] or (agent in living and not rows.ended(row)):
                rows.ask(row, observation, infos.get(agent))

    def _reset_env(self, e: int, seed: int | None) -> None:
        with self._calling("reset"):
            answer = self._envs[e].reset(seed=seed)
        self._note_state(e)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], dict)):
            raise BadValue("reset() must return (observations, infos), both dictionaries by agent")
        observations, infos = answer
        for agent, observation in observations.items():
            rows, row = self._seat(e, agent)
            rows.ask(row, observation, (infos or {}).get(agent))
        for rows in self.groups:
            rows.begin_absent(slice(e * rows.seats_per_env, (e + 1) * rows.seats_per_env))


def is_turn_based(env: Any) -> bool:
    """Whether this looks like an AECEnv. By attributes, so that pettingzoo need not be installed."""
    return hasattr(env, "possible_agents") and hasattr(env, "agent_iter") and hasattr(env, "last")


class TurnEnvs(AgentEnvs):
    """A list of AECEnv as a MultiAgentEnv."""

    takes_turns = True

    def _step_env(self, e: int, actions: dict[Any, Any]) -> None:
        env = self._envs[e]
        with self._calling("step"):
            env.step(actions[env.agent_selection])
        self._note_state(e)
        self._go_on(e)

    def _go_on(self, e: int) -> None:
        """Up to the next agent that is to act."""
        env = self._envs[e]
        while env.agents:
            agent = env.agent_selection
            with self._calling("last"):
                answer = env.last()
            if not (isinstance(answer, tuple) and len(answer) == 5):
                raise BadValue("last() must return (observation, reward, terminated, truncated, info)")
            observation, reward, terminated, truncated, info = answer
            self._settle(e, agent, reward, info)
            if not self._end(e, agent, terminated, truncated, observation, info):
                rows, row = self._seat(e, agent)
                rows.ask(row, observation, info)
                return
            with self._calling("step"):
                env.step(None)
        self._begin_next(e)

    def _reset_env(self, e: int, seed: int | None) -> None:
        env = self._envs[e]
        with self._calling("reset"):
            env.reset(seed=seed)
        if not env.agents:
            raise BadValue("reset() left no agents")
        self._note_state(e)
        self._go_on(e)
