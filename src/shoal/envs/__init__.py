"""Environments as one canonical batched stream of steps. Importable on its own.

env = shoal.envs.make("CartPole-v1", num_envs=8)     # a BatchedEnv; see shoal.envs.stream for the rules
spec = shoal.envs.describe("ALE/Pong-v5")            # spaces, limits, and which back-end was chosen
shoal.envs.diagnose("MyEnv-v0")                      # findings in words about an environment's health
"""

from __future__ import annotations

from shoal.envs.builtin import catalog as _catalog
from shoal.envs.doctor import Finding, diagnose
from shoal.envs.making import BACKENDS, describe, make
from shoal.envs.stream import BatchedEnv, EnvSpec, Step, Tree

__all__ = ["BACKENDS", "BatchedEnv", "EnvSpec", "Finding", "Step", "Tree", "describe", "diagnose", "make"]

_catalog.register()
