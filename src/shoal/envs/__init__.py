"""Environments of every kind behind one interface: a batch that steps together. Importable on its own.

env = shoal.envs.make("CartPole-v1", num_envs=8)     # a BatchedEnv; see shoal.envs.interface for the rules
spec = shoal.envs.describe("ALE/Pong-v5")            # spaces, limits, and which back-end was chosen
shoal.envs.diagnose("MyEnv-v0")                      # findings in words about an environment's health

interface.py        Step, BatchedEnv, EnvSpec: what the rest of shoal sees
factory.py          make() and describe(): which back-end runs an environment
adapter.py          what the adapters share: single_envs.py, vector_env.py, parallel_env.py, envpool_env.py, atari.py
space_codecs.py     canonical observations and actions
builtin/            shoal's own small environments, compiled with Numba
device/             environments that are tensor code
split_env.py        slow environments in several processes
rollout.py          playing whole episodes; random_policy.py and experts.py are policies to play them with
doctor.py           `shoal doctor --env ID`
"""

from __future__ import annotations

from shoal.envs.builtin import catalog as _catalog
from shoal.envs.doctor import Finding, diagnose
from shoal.envs.factory import BACKENDS, describe, make
from shoal.envs.interface import BatchedEnv, EnvSpec, Step, Tree

__all__ = ["BACKENDS", "BatchedEnv", "EnvSpec", "Finding", "Step", "Tree", "describe", "diagnose", "make"]

_catalog.register()
