"""The state of a random generator as an array, for checkpoints."""

from __future__ import annotations

import json

import numpy as np

__all__ = ["pack", "unpack"]


def pack(rng: np.random.Generator) -> np.ndarray:
    return np.frombuffer(json.dumps(rng.bit_generator.state).encode(), np.uint8)


def unpack(rng: np.random.Generator, words: np.ndarray) -> None:
    """Continue with the state that `pack` saved."""
    rng.bit_generator.state = json.loads(bytes(words))
