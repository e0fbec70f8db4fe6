"""Environments that are tensor code: all rows step at once where the network is, so that nothing is copied anywhere.

    env = CartPole(num_envs=65536, device="cuda")      # shoal's own, or your simulator
    observation = env.reset(generator)
    step = env.step(action, generator)                 # a TensorStep; rows whose episode ended have begun the next one

The device architecture takes any class or function that is called with (num_envs=, device=, **kwargs) and gives a TensorEnv.
A CUDA graph repeats the very same kernels on the very same memory, so a TensorEnv

  * keeps all that it remembers in tensors which `step` changes in place, and reads no number back (no `if tensor:`, `.item()`);
  * draws its random numbers from the generator that it is given;
  * has shapes that never change.

Who only has rules (start, move, look) writes them as `rules.Rules` and gets the rest from `rules.Ruled`: see cartpole.py.
"""

from shoal.envs.device.base import TensorEnv, TensorStep, has_tensor_env, make_tensors
from shoal.envs.device.cartpole import CartPole
from shoal.envs.device.catch import Catch, PixelCatch

__all__ = ["CartPole", "Catch", "PixelCatch", "TensorEnv", "TensorStep", "has_tensor_env", "make_tensors"]
