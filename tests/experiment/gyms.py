"""Registers the toys with gymnasium: `tests.experiment.gyms:Poison-v0` on a command line imports this module."""

import gymnasium as gym

for name in ("Endless", "Gift", "Poison", "Sleepy", "Unlearnable"):
    gym.register(f"{name}-v0", f"tests.experiment.toys:{name}")
