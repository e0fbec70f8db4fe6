"""A physician for environments: `diagnose` tries everything shoal relies on and reports in words. It never raises.

    for finding in diagnose("MyEnv-v0"):
        ...finding.level, finding.text, finding.advice

Printed by `shoal doctor --env ID`.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from shoal.envs.making import make
from shoal.envs.spaces import QUIET, ActionCodec, Layout
from shoal.errors import ShoalError

__all__ = ["Finding", "diagnose"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: str  # "ok", "warning" or "error"
    check: str  # what was looked at, in one or two words
    text: str  # what was found, as a sentence
    advice: str = ""  # what to do about it


def diagnose(env: Any, steps: int = 1000, num_envs: int = 8, **kwargs: Any) -> list[Finding]:
    """Findings about an id, class or callable, the worst first. `steps` bounds the steps of each trial."""
    found: list[Finding] = []
    try:
        single = _single(env, kwargs)
    except Exception as error:
        found.append(Finding("error", "construction", f"It cannot be made: {_words(error)}.", "Fix this first."))
        return found + _guarded("pickling", _pickles(env))
    if isinstance(single, gym.Env):
        found += _guarded("spaces", _spaces(single))
        found += _guarded("reset", _reset(single))
        found += _guarded("step", _play(single, steps))
        found += _guarded("seeding", _seeding(single, steps))
        found += _guarded("bounds", _bounds(single))
    found += _guarded("close", _close(single))
    found += _guarded("pickling", _pickles(env))
    if isinstance(single, VectorEnv):
        num_envs = single.num_envs
    found += _guarded("stream", _stream(env, steps, num_envs, kwargs))
    return sorted(found, key=lambda one: ("error", "warning", "ok").index(one.level))


def _guarded(check: str, trial: Iterator[Finding]) -> list[Finding]:
    """All findings of a trial; if the environment raises in it, that is one more."""
    found: list[Finding] = []
    try:
        for finding in trial:
            found.append(finding)
    except Exception as error:
        found.append(
            Finding("error", check, f"It raised {_words(error)}.", "Run it alone with this seed and debug it.")
        )
    return found


def _single(env: Any, kwargs: dict[str, Any]) -> Any:
    """One plain environment to examine: a gymnasium.Env where there is one."""
    if isinstance(env, str):
        stream = make(env, 1, backend="auto", **kwargs)
        stream.close()
        if stream.backend in ("ale", "envpool"):
            return None
        return gym.make(env, disable_env_checker=True, **kwargs)
    return env(**kwargs)


def _spaces(env: gym.Env) -> Iterator[Finding]:
    for space, role, canonical in (
        (env.observation_space, "observation", Layout),
        (env.action_space, "action", ActionCodec),
    ):
        if not isinstance(space, gym.Space):
            yield Finding(
                "error", "spaces", f"{role}_space is {space!r}, not a gymnasium space.", "Set it in __init__."
            )
            continue
        try:
            canonical(space)
        except ShoalError as error:
            yield Finding("error", "spaces", f"{error}.", "Wrap the environment.")
            continue
        yield Finding("ok", "spaces", f"The {role} space is {space}.")
        if isinstance(space, spaces.Box) and not np.all(space.low < space.high):
            yield Finding(
                "warning", "spaces", f"The {role} Box has entries with low >= high.", "Remove constant entries."
            )
    box = env.observation_space
    if isinstance(box, spaces.Box) and box.dtype == np.float64:
        text = "Observations are float64; shoal stores float32."
        yield Finding("ok", "spaces", text)
    act = env.action_space
    if isinstance(act, spaces.Box) and not (np.isfinite(act.low).all() and np.isfinite(act.high).all()):
        yield Finding(
            "warning", "spaces", "The action Box is unbounded.", "Give it finite bounds: noise and squashing need them."
        )


def _reset(env: gym.Env) -> Iterator[Finding]:
    answer = env.reset(seed=0)
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
        text = f"reset() returned {type(answer).__name__}, not (observation, info)."
        yield Finding("error", "reset", text, "Return the observation and a dictionary.")
        return
    yield from _observation(env, answer[0], "reset()")
    yield Finding("ok", "reset", "reset(seed=0) returns (observation, info).")


def _observation(env: gym.Env, observation: Any, origin: str) -> Iterator[Finding]:
    """Shape, dtype and range of one observation; silent if it is fine."""
    layout = Layout(env.observation_space)
    try:
        buffers = layout.buffers(1)
        layout.write(buffers, 0, observation)
    except Exception as error:
        yield Finding("error", "observation", f"{origin}: {error}.", "Return what observation_space promises.")
        return
    with np.errstate(**QUIET):
        fault = layout.fault(buffers)
    if fault:
        yield Finding(
            "error", "observation", f"{origin}: {fault[1]}.", "Observations must be finite and in their space."
        )
    elif not env.observation_space.contains(observation):
        text = f"{origin} gives an observation outside its space, or with another dtype than its space."
        yield Finding("warning", "observation", text, "Widen the space's bounds or cast the observation.")


def _play(env: gym.Env, steps: int) -> Iterator[Finding]:
    """Random actions: the five values of step(), masks, and whether episodes end."""
    observation, info = env.reset(seed=0)
    env.action_space.seed(0)
    episodes, told, masked = 0, set(), 0
    for t in range(steps):
        mask = _mask(observation, info)
        masked += mask is not None
        answer = env.step(_sample(env.action_space, mask))
        if not (isinstance(answer, tuple) and len(answer) == 5):
            text = (
                f"step() returned {len(answer) if isinstance(answer, tuple) else type(answer).__name__} values, not 5."
            )
            yield Finding("error", "step", text, "Return (observation, reward, terminated, truncated, info).")
            return
        observation, reward, terminated, truncated, info = answer
        for finding in (
            *_observation(env, observation, f"step {t + 1}"),
            *_scalars(reward, terminated, truncated, info, t + 1),
        ):
            if finding.check not in told:
                told.add(finding.check)
                yield finding
        if terminated or truncated:
            episodes += 1
            observation, info = env.reset()
    if not told:
        yield Finding("ok", "step", f"{steps} random steps gave well-formed observations, rewards and flags.")
    if masked:
        yield from _mask_findings(env, observation, info)
    if episodes:
        yield Finding("ok", "episodes", f"{episodes} episodes ended in {steps} random steps.")
    else:
        text = f"No episode ended in {steps} random steps."
        yield Finding(
            "warning", "episodes", text, "Give it a time limit: gymnasium.wrappers.TimeLimit or max_episode_steps."
        )


def _scalars(reward: Any, terminated: Any, truncated: Any, info: Any, t: int) -> Iterator[Finding]:
    if np.ndim(reward) != 0 or np.asarray(reward).dtype.kind not in "fiub":
        yield Finding("error", "reward", f"Step {t}: reward is {reward!r}, not a number.", "Return float(reward).")
    elif not np.isfinite(reward):
        yield Finding("error", "reward", f"Step {t}: reward is {reward}.", "Rewards must be finite.")
    for value, name in ((terminated, "terminated"), (truncated, "truncated")):
        if not isinstance(value, bool | np.bool_):
            text = f"Step {t}: {name} is {value!r} ({type(value).__name__}), not a bool."
            yield Finding("error", name, text, f"Return bool({name}).")
    if not isinstance(info, dict):
        yield Finding(
            "error", "info", f"Step {t}: info is {type(info).__name__}, not a dict.", "Return {} if there is none."
        )


def _mask(observation: Any, info: Any) -> Any:
    if isinstance(observation, dict) and "action_mask" in observation:
        return observation["action_mask"]
    return info.get("action_mask") if isinstance(info, dict) else None


def _mask_findings(env: gym.Env, observation: Any, info: Any) -> Iterator[Finding]:
    codec, value = ActionCodec(env.action_space), _mask(observation, info)
    try:
        fault = codec.mask_fault(codec.mask(value)[None])
    except Exception as error:
        yield Finding("error", "mask", f"{error}.", "A mask has one entry per action, 1 where it is legal.")
        return
    if fault:
        yield Finding("error", "mask", f"{fault[1]}.", "End the episode when nothing is legal.")
    else:
        yield Finding("ok", "mask", f"Actions are masked ({codec.mask_size} entries).")


def _sample(space: gym.Space, mask: Any) -> Any:
    if mask is None or not isinstance(space, spaces.Discrete):
        return space.sample()
    legal = np.flatnonzero(mask)
    return space.start + int(legal[int(space.np_random.integers(len(legal)))]) if len(legal) else space.sample()


def _seeding(env: gym.Env, steps: int) -> Iterator[Finding]:
    """The same seed and actions twice."""
    runs = []
    for _ in range(2):
        env.action_space.seed(7)
        observation, info = env.reset(seed=7)
        trace = [pickle.dumps(observation)]
        for _ in range(min(steps, 100)):
            observation, reward, terminated, truncated, info = env.step(
                _sample(env.action_space, _mask(observation, info))
            )
            trace.append(pickle.dumps((observation, float(reward), bool(terminated), bool(truncated))))
            if terminated or truncated:
                observation, info = env.reset()
        runs.append(trace)
    if runs[0] == runs[1]:
        yield Finding("ok", "seeding", "The same seed and actions give the same episode.")
    else:
        t = next(k for k, pair in enumerate(zip(*runs, strict=True)) if pair[0] != pair[1])
        text = f"The same seed and actions give different episodes from step {t} on."
        yield Finding("warning", "seeding", text, "Draw from self.np_random, and call super().reset(seed=seed).")


def _bounds(env: gym.Env) -> Iterator[Finding]:
    """The extreme actions are accepted."""
    space = env.action_space
    if isinstance(space, spaces.Box):
        extremes = [np.clip(bound, -1e6, 1e6).astype(space.dtype) for bound in (space.low, space.high)]
    elif isinstance(space, spaces.Discrete):
        mask = _mask(*env.reset(seed=0))
        legal = np.arange(space.n) if mask is None else np.flatnonzero(mask)
        extremes = [int(space.start + legal[k]) for k in (0, -1)]
    else:
        return
    for action in extremes:
        env.reset(seed=0)
        env.step(action)
    yield Finding("ok", "bounds", "The smallest and the largest action are accepted.")


def _close(env: Any) -> Iterator[Finding]:
    if hasattr(env, "close"):
        env.close()
        yield Finding("ok", "close", "close() works.")


def _pickles(env: Any) -> Iterator[Finding]:
    """The recipe must travel to other processes; an id always does."""
    if isinstance(env, str):
        return
    try:
        cloudpickle.loads(cloudpickle.dumps(env))
    except Exception as error:
        text = f"It cannot be sent to other processes: {_words(error)}."
        yield Finding("error", "pickling", text, "Open files, sockets and windows inside the function, not outside.")
        return
    yield Finding("ok", "pickling", "It can be sent to other processes.")


def _stream(env: Any, steps: int, num_envs: int, kwargs: dict[str, Any]) -> Iterator[Finding]:
    """The stream as training would use it: back-end, autoreset mode, speed."""
    stream = make(env, num_envs, **kwargs)
    try:
        mode = getattr(stream, "mode", None)
        yield Finding("ok", "back-end", stream.line)
        if mode is not None and mode.name == "NEXT_STEP":
            text = "Its autoreset mode is NEXT_STEP: one step per episode is spent on resetting."
            yield Finding("warning", "autoreset", text, "Offer autoreset_mode=SAME_STEP in the constructor if you can.")
        step = stream.reset(seed=0)
        rng = np.random.default_rng(0)
        actions = [_random_actions(stream, step, rng)]
        count, began = 0, time.perf_counter()
        while count < steps and time.perf_counter() - began < 5:
            if step.action_mask is not None:
                actions = [_random_actions(stream, step, rng)]
            elif len(actions) < 16:
                actions.append(_random_actions(stream, step, rng))
            step = stream.step(actions[count % len(actions)])
            count += 1
        rate = count * stream.num_seats / (time.perf_counter() - began)
        yield Finding(
            "ok", "speed", f"{rate:,.0f} steps/s with {num_envs} environments on back-end '{stream.backend}'."
        )
    finally:
        stream.close()


def _random_actions(stream: Any, step: Any, rng: np.random.Generator) -> np.ndarray:
    space, rows, mask = stream.action_space, stream.num_seats, step.action_mask
    if isinstance(space, spaces.Box):
        low, high = np.clip(space.low, -1e3, 1e3), np.clip(space.high, -1e3, 1e3)
        return rng.uniform(low, high, (rows, *space.shape)).astype(space.dtype)
    nvec = [int(space.n)] if isinstance(space, spaces.Discrete) else [int(n) for n in space.nvec]
    score = rng.random((rows, sum(nvec)))
    if mask is not None:
        score = np.where(mask, score, -1.0)
    parts = np.split(score, np.cumsum(nvec)[:-1], axis=1)
    chosen = np.stack([part.argmax(1) for part in parts], axis=1)
    return chosen[:, 0] if isinstance(space, spaces.Discrete) else chosen


def _words(error: BaseException) -> str:
    text = str(error).strip().rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
