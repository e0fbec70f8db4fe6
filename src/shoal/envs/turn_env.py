"""PettingZoo's AEC environments: one agent acts at a time.

A step makes one decision in every environment, that of the agent that was asked, and continues to the next agent that is alive. On
the way agents that have died are closed with their last reward. `AECEnv.last()` gives an agent all that it earned since it last
acted, which is what a row of a seat needs.
"""

from __future__ import annotations

from typing import Any

from shoal.envs.seat_rows import AgentEnvs
from shoal.envs.space_codecs import BadValue

__all__ = ["TurnEnvs", "is_turn_based"]


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
