"""`shoal play`: in a window where there is a display, as text if the environment draws text, else as a log of steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import numpy as np

from shoal.errors import ConfigError
from shoal.experiment.evaluation import Frame, frames, plain_env
from shoal.experiment.run import Run

__all__ = ["show", "write_video"]


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


def write_video(run: Run, episodes: int, seed: int, path: Path, out: IO[str]) -> None:
    """Play and write every frame into a GIF or an MP4."""
    write = _write_mp4 if path.suffix == ".mp4" else _write_gif
    if path.suffix == ".mp4":
        _ffmpeg()  # before anything is played
    if not _display():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame complains that there is none
    env = _env(run, "rgb_array")
    modes = env.metadata.get("render_modes", [])
    if "rgb_array" not in modes:
        raise ConfigError(f"--video {path} is not possible: {run.prepared.plan.env.name} draws no pictures "
                          f"(render modes: {', '.join(modes) or 'none'}); leave --video out")
    pictures = []
    try:
        for frame in frames(run.policy, env, episodes, seed):
            pictures.append(np.asarray(frame.picture))
            if frame.ended:
                _say(frame, out)
    finally:
        env.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    write(pictures, path, int(env.metadata.get("render_fps", 30)))
    out.write(f"wrote {path} ({len(pictures)} frames)\n")


def _write_gif(pictures: list[np.ndarray], path: Path, rate: int) -> None:
    from PIL import Image  # comes with tensorboard

    first, *rest = (Image.fromarray(picture) for picture in pictures)
    first.save(path, save_all=True, append_images=rest, duration=max(20, round(1000 / rate)), loop=0)


def _write_mp4(pictures: list[np.ndarray], path: Path, rate: int) -> None:
    """H.264 wants even sizes: an odd row or column is cut off."""
    height, width = (2 * (size // 2) for size in pictures[0].shape[:2])
    writer = _ffmpeg().write_frames(str(path), (width, height), fps=rate, quality=7, macro_block_size=1, ffmpeg_log_level="error")
    writer.send(None)
    for picture in pictures:
        writer.send(np.ascontiguousarray(picture[:height, :width, :3]))
    writer.close()


def _ffmpeg() -> Any:
    try:
        import imageio_ffmpeg
    except ImportError:
        raise ConfigError('an MP4 needs imageio-ffmpeg, which is not installed here; pip install "shoal[render]", or write a '
                          ".gif") from None
    return imageio_ffmpeg


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
