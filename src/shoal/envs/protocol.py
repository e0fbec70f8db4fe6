"""What "Atari" means in a run: one explicit protocol that both back-ends, ALE's vector environment and envpool, are fed from.

    game ── frameskip, maximum of two frames ── grey, 84 x 84 by area ── the last 4, older ones black ── uint8[4, 84, 84]

With the same protocol, seed and actions both give the same observations, rewards and ends, byte for byte, as long as nothing is
drawn at the start (noop_max=1, and use_fire_reset left on; a test plays both). With more no-ops they still draw from the same
distribution but for one frame: ALE presses FIRE and then waits, envpool waits and then presses FIRE. docs/atari.md has the
whole list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from shoal.errors import ConfigError

__all__ = ["AtariProtocol"]

OTHERS = ("num_threads", "thread_affinity_offset")  # of both back-ends; no part of the protocol
REFUSED = {
    "episodic_life": "ALE would begin a new game at every lost life; use life_loss=discount",
    "life_loss_info": "use life_loss=discount",
    "grayscale": "observations are grey in this protocol",
    "maxpool": "the maximum of the last two frames is always taken",
    "batch_size": "all environments step together (ALE's asynchronous mode is not supported)",
}


@dataclass(frozen=True)
class AtariProtocol:
    """Names are those of ale_py.AtariVectorEnv where it has one. Defaults are those of the ALE/*-v5 ids (arXiv 1709.06009)."""

    frameskip: int = 4
    """Frames that each action is held for; the observation is the maximum over the last two."""
    repeat_action_probability: float = 0.25
    """Sticky actions: how likely a frame repeats the previous action instead. 0.0 switches them off."""
    noop_max: int = 30
    """At most so many frames pass before the first decision. 1: FIRE alone, nothing is drawn."""
    use_fire_reset: bool = True
    """Press FIRE at the start of a game that has the button."""
    life_loss: Literal["ignore", "discount"] = "ignore"
    """discount: a lost life ends the value (discount 0), while the game and its episode go on."""
    reward_clipping: bool = False
    """Rewards to [-1, 1] for the learner; episode returns stay the game's score."""
    img_height: int = 84
    img_width: int = 84
    stack_num: int = 4
    """Frames in an observation."""
    max_num_frames_per_episode: int = 108_000
    """Half an hour of play; then the episode is truncated."""
    full_action_space: bool = False
    """All 18 actions instead of those that the game knows."""

    def __post_init__(self) -> None:
        for name in ("frameskip", "noop_max", "img_height", "img_width", "stack_num", "max_num_frames_per_episode"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} is not possible: give a whole number, 1 or more")
        if not 0 <= self.repeat_action_probability <= 1:
            raise ConfigError(f"repeat_action_probability={self.repeat_action_probability} is not possible: give 0 to 1")
        if self.life_loss not in ("ignore", "discount"):
            raise ConfigError(f"life_loss={self.life_loss!r} is not possible: give ignore or discount")
        if self.max_num_frames_per_episode % self.frameskip:
            raise ConfigError(f"max_num_frames_per_episode={self.max_num_frames_per_episode} is no multiple of frameskip="
                              f"{self.frameskip}: the last decision would be cut short")

    @classmethod
    def of(cls, name: str, registered: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[AtariProtocol, dict[str, Any]]:
        """The protocol of an id with a user's options over it, and the options that are none of its business."""
        known = {field.name for field in fields(cls)}
        for key in given:
            if key in REFUSED:
                raise ConfigError(f"{name}: {key}={given[key]!r}: {REFUSED[key]}")
            if key not in known and key not in OTHERS:
                raise ConfigError(f"{name}: there is no option {key!r}; there are {', '.join((*sorted(known), *OTHERS))}")
        values = {**{key: value for key, value in registered.items() if key in known}, **given}
        others = {key: values.pop(key) for key in OTHERS if key in values}
        return cls(**values), others

    @property
    def max_episode_steps(self) -> int:
        """In decisions."""
        return self.max_num_frames_per_episode // self.frameskip

    @property
    def reward_clip(self) -> float | None:
        return 1.0 if self.reward_clipping else None

    def ale(self) -> dict[str, Any]:
        """For ale_py.AtariVectorEnv. Rewards are clipped by shoal, so that the score is known too; so are lives."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "life_loss"}
        fixed = {"reward_clipping": False, "grayscale": True, "maxpool": True, "episodic_life": False, "life_loss_info": False}
        return {**own, **fixed}

    def envpool(self) -> dict[str, Any]:
        """For envpool.make. It counts an episode's length in decisions."""
        same = ("repeat_action_probability", "noop_max", "use_fire_reset", "img_height", "img_width", "stack_num",
                "full_action_space")
        return {**{name: getattr(self, name) for name in same}, "frame_skip": self.frameskip,
                "max_episode_steps": self.max_episode_steps, "reward_clip": False, "episodic_life": False,
                "zero_discount_on_life_loss": False, "gray_scale": True, "use_inter_area_resize": True}
