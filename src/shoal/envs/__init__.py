"""Environments of every kind behind one interface: a batch that steps together. Importable on its own.

env = shoal.envs.make("CartPole-v1", num_envs=8)     # a BatchedEnv; see shoal.envs.interface for the rules
spec = shoal.envs.describe("ALE/Pong-v5")            # spaces, limits, and which back-end was chosen
shoal.envs.diagnose("MyEnv-v0")                      # findings in words about an environment's health

interface.py        Step, BatchedEnv, EnvSpec: what the rest of shoal sees
factory.py          make() and describe(): which back-end runs an environment
multi_agent.py      the same for several agents that take turns or have different spaces: MultiAgentEnv
adapter.py          what the adapters share: single_envs.py, vector_env.py, envpool_env.py, atari.py
seat_rows.py        what those of several agents share; pettingzoo_envs.py
opponent_env.py     one seat against opponents that do not learn; exploitability.py: exact best responses in small games
space_codecs.py     canonical observations and actions
builtin/            shoal's own small environments, compiled with Numba
device/             environments that are tensor code
split_env.py        slow environments in several processes
recorded_env.py     environments of which there are only recordings
rollout.py          playing whole episodes; random_policy.py and experts.py are policies to play them with
doctor.py           `shoal doctor --env ID`
"""

from __future__ import annotations

from shoal.envs.builtin import catalog as _catalog
from shoal.envs.doctor import Finding, diagnose
from shoal.envs.factory import BACKENDS, describe, describe_multi_agent, make, make_multi_agent
from shoal.envs.interface import BatchedEnv, EnvSpec, Step, Tree
from shoal.envs.multi_agent import MultiAgentEnv, MultiAgentStep

__all__ = ["BACKENDS", "BatchedEnv", "EnvSpec", "Finding", "MultiAgentEnv", "MultiAgentStep", "Step", "Tree", "describe",
           "describe_multi_agent", "diagnose", "make", "make_multi_agent"]

_catalog.register()
