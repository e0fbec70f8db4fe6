"""What "Atari" means in a run: one explicit protocol that configures both back-ends, ALE's vector environment and envpool.

    game ── frameskip, maximum of two frames ── grey, 84 x 84 by area ── the last 4, older ones black ── uint8[4, 84, 84]

With the same protocol, seed and actions both give the same observations, rewards and ends, byte for byte, as long as the start is
not random (noop_max=1, and use_fire_reset left on; a test plays both). With more no-ops they still draw from the same distribution
except for one frame: ALE presses FIRE and then waits, envpool waits and then presses FIRE. docs/atari.md has the whole list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from shoal.errors import ConfigError

__all__ = ["AtariProtocol"]

BACKEND_OPTIONS = ("num_threads", "thread_affinity_offset")  # both back-ends have them; they do not change what is played
REFUSED_OPTIONS = {
    "episodic_life": "ALE would begin a new game at every lost life; use life_loss=discount",
    "life_loss_info": "use life_loss=discount",
    "grayscale": "observations are grey in this protocol",
    "maxpool": "the maximum of the last two frames is always taken",
    "batch_size": "all environments step together (ALE's asynchronous mode is not supported)",
}


@dataclass(frozen=True)
class AtariProtocol:
    """Named like the options of ale_py.AtariVectorEnv where it has them; defaults as in the ALE/*-v5 ids (arXiv 1709.06009)."""

    frameskip: int = 4
    """Frames for which each action is held; the observation is the maximum over the last two."""
    repeat_action_probability: float = 0.25
    """Sticky actions: the probability that a frame repeats the previous action instead. 0.0 switches them off."""
    noop_max: int = 30
    """Largest number of frames before the first decision; the number is drawn at random. 1: only FIRE, nothing random."""
    use_fire_reset: bool = True
    """Press FIRE at the start of a game that has the button."""
    life_loss: Literal["ignore", "discount"] = "ignore"
    """discount: a lost life ends the value (discount 0), but the game and its episode continue."""
    reward_clipping: bool = False
    """Clip rewards to [-1, 1] for the learner; episode returns stay the game's score."""
    img_height: int = 84
    img_width: int = 84
    stack_num: int = 4
    """Frames in an observation."""
    max_num_frames_per_episode: int = 108_000
    """Half an hour of play; then the episode is truncated."""
    full_action_space: bool = False
    """All 18 actions instead of those that the game uses."""

    def __post_init__(self) -> None:
        values = asdict(self)
        for name in ("frameskip", "noop_max", "img_height", "img_width", "stack_num", "max_num_frames_per_episode"):
            value = values[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: give a whole number, 1 or more")
        if not 0 <= self.repeat_action_probability <= 1:
            raise ConfigError(f"repeat_action_probability={self.repeat_action_probability}: give 0 to 1")
        if self.life_loss not in ("ignore", "discount"):
            raise ConfigError(f"life_loss={self.life_loss!r}: give ignore or discount")
        if self.max_num_frames_per_episode % self.frameskip:
            raise ConfigError(f"max_num_frames_per_episode={self.max_num_frames_per_episode} is not a multiple of "
                              f"frameskip={self.frameskip}, so the last decision would be cut short; change one of them")

    @classmethod
    def of(cls, name: str, registered: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[AtariProtocol, dict[str, Any]]:
        """The protocol of an id with the user's options, and those options that go to the back-end unchanged."""
        known = {field.name for field in fields(cls)}
        for key in given:
            if key in REFUSED_OPTIONS:
                raise ConfigError(f"{name}: {key}={given[key]!r}: {REFUSED_OPTIONS[key]}")
            if key not in known and key not in BACKEND_OPTIONS:
                options = ", ".join((*sorted(known), *BACKEND_OPTIONS))
                raise ConfigError(f"{name}: there is no option {key!r}; the options are {options}")
        values = {**{key: value for key, value in registered.items() if key in known}, **given}
        others = {key: values.pop(key) for key in BACKEND_OPTIONS if key in values}
        return cls(**values), others

    @property
    def max_episode_steps(self) -> int:
        """In decisions."""
        return self.max_num_frames_per_episode // self.frameskip

    @property
    def reward_clip(self) -> float | None:
        return 1.0 if self.reward_clipping else None

    def ale(self) -> dict[str, Any]:
        """Arguments of ale_py.AtariVectorEnv. shoal clips rewards and counts lives itself, so that the score is known too."""
        fixed = {"reward_clipping": False, "grayscale": True, "maxpool": True, "episodic_life": False, "life_loss_info": False}
        options = {**asdict(self), **fixed}
        del options["life_loss"]
        return options

    def envpool(self) -> dict[str, Any]:
        """Arguments of envpool.make, which counts an episode's length in decisions."""
        same = ("repeat_action_probability", "noop_max", "use_fire_reset", "img_height", "img_width", "stack_num",
                "full_action_space")
        values = asdict(self)
        return {**{name: values[name] for name in same}, "frame_skip": self.frameskip,
                "max_episode_steps": self.max_episode_steps, "reward_clip": False, "episodic_life": False,
                "zero_discount_on_life_loss": False, "gray_scale": True, "use_inter_area_resize": True}
