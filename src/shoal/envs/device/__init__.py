"""Environments that are tensor code: all rows step at once on the network's device, so that nothing is copied.

    env = CartPole(num_envs=65536, device="cuda")      # shoal's own, or your simulator
    observation = env.reset(generator)
    step = env.step(action, generator)                 # a TensorStep; rows whose episode ended have begun the next one

The device architecture takes any class or function that accepts (num_envs=, device=, **kwargs) and returns a TensorEnv.
A CUDA graph repeats the very same kernels on the very same memory, so a TensorEnv

  * keeps all of its state in tensors that `step` changes in place, and reads no number back (no `if tensor:`, no `.item()`);
  * draws its random numbers from the generator that it is given;
  * has shapes that never change.

If you only have the dynamics (initial states, transition, observation), write them as `dynamics.Dynamics`; `dynamics.DynamicsEnv`
adds the rest. See cartpole.py.
"""

from shoal.envs.device.cartpole import CartPole
from shoal.envs.device.catch import Catch, PixelCatch
from shoal.envs.device.tensor_env import CompilableTensorEnv, TensorEnv, TensorStep, make_tensor_env

__all__ = [
    "CartPole",
    "Catch",
    "CompilableTensorEnv",
    "PixelCatch",
    "TensorEnv",
    "TensorStep",
    "make_tensor_env",
]
