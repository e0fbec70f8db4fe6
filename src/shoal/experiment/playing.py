"""`shoal play`: in a window where there is a display, as text if the environment draws text, else as a log of steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

from shoal.errors import ConfigError
from shoal.experiment.evaluation import Frame, frames, plain_env
from shoal.experiment.run import Run

__all__ = ["show", "write_gif"]


def show(run: Run, episodes: int, seed: int, out: IO[str]) -> None:
    """Play in the best way that this machine and the environment have."""
    env = _env(run, None)
    modes = env.metadata.get("render_modes", [])
    mode = "human" if "human" in modes and _display() else "ansi" if "ansi" in modes else None
    if mode is not None:
        env.close()
        env = _env(run, mode)
    try:
        for frame in frames(run.policy, env, episodes, seed):
            if mode == "ansi":
                out.write(f"{frame.picture}\n")
            elif mode is None and frame.step:
                out.write(f"step {frame.step:>4}  action {_short(frame.action)}  reward {frame.reward:g}\n")
            if frame.ended:
                _say(frame, out)
    finally:
        env.close()


def write_gif(run: Run, episodes: int, seed: int, path: Path, out: IO[str]) -> None:
    """Play and write every frame into a GIF."""
    from PIL import Image  # comes with tensorboard

    env = _env(run, "rgb_array")
    modes = env.metadata.get("render_modes", [])
    if "rgb_array" not in modes:
        raise ConfigError(f"--video {path} is not possible: {run.prepared.plan.env.name} draws no pictures "
                          f"(render modes: {', '.join(modes) or 'none'}); leave --video out")
    pictures = []
    try:
        for frame in frames(run.policy, env, episodes, seed):
            pictures.append(Image.fromarray(frame.picture))
            if frame.ended:
                _say(frame, out)
    finally:
        env.close()
    rate = env.metadata.get("render_fps", 30)
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=max(20, round(1000 / rate)), loop=0)
    out.write(f"wrote {path} ({len(pictures)} frames)\n")


def _env(run: Run, mode: str | None) -> Any:
    plan = run.prepared.plan
    return plain_env(plan.env.target, plan.experiment.envs.arguments(), mode)


def _display() -> bool:
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _say(frame: Frame, out: IO[str]) -> None:
    out.write(f"episode {frame.episode + 1}: return {frame.total:g} in {frame.step} steps\n")


def _short(action: Any) -> str:
    text = str(action).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."
