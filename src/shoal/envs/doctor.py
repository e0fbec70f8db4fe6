"""Checks an environment: `diagnose` tries everything that shoal relies on and reports in words. It never raises.

    for finding in diagnose("MyEnv-v0"):
        ...finding.level, finding.text, finding.advice

`shoal doctor --env ID` prints the findings.
"""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.envs.factory import make
from shoal.envs.random_policy import RandomPolicy
from shoal.envs.space_codecs import ActionCodec, ObservationCodec, ignore_overflow
from shoal.envs.vector_env import VectorEnvAdapter
from shoal.errors import ShoalError

__all__ = ["Finding", "diagnose"]

SPEED_SECONDS = 5.0


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: str  # "ok", "warning" or "error"
    check: str  # what was checked, in one or two words
    text: str  # what was found, as a sentence
    advice: str = ""  # what to do about it


def diagnose(env: Any, steps: int = 1000, num_envs: int = 8, **kwargs: Any) -> list[Finding]:
    """Findings about an id, class or callable, the worst first. Each check makes at most `steps` steps."""
    found: list[Finding] = []
    try:
        single = _single(env, kwargs)
    except Exception as error:
        found.append(Finding("error", "construction", f"It cannot be created: {_in_words(error)}.", "Fix this first."))
        return found + _guarded("pickling", _check_pickling(env))
    if isinstance(single, gym.Env):
        found += _guarded("spaces", _check_spaces(single))
        found += _guarded("reset", _check_reset(single))
        found += _guarded("step", _check_steps(single, steps))
        found += _guarded("seeding", _check_seeding(single, steps))
        found += _guarded("bounds", _check_bounds(single))
    found += _guarded("close", _check_close(single))
    found += _guarded("pickling", _check_pickling(env))
    if isinstance(single, VectorEnv):
        num_envs = single.num_envs
        found += _guarded("num_envs", _check_width(env, single))
    found += _guarded("batch", _check_batch(env, steps, num_envs, kwargs))
    return sorted(found, key=lambda one: ("error", "warning", "ok").index(one.level))


def _guarded(check: str, findings: Iterator[Finding]) -> list[Finding]:
    """All findings of a check; if the environment raises during it, that is one more."""
    found: list[Finding] = []
    try:
        for finding in findings:
            found.append(finding)
    except Exception as error:
        found.append(Finding("error", check, f"It raised {_in_words(error)}.", "Run it alone with this seed and debug it."))
    return found


def _single(env: Any, kwargs: dict[str, Any]) -> Any:
    """One plain environment to examine: a gymnasium.Env where there is one."""
    if isinstance(env, str):
        batch = make(env, 1, backend="auto", **kwargs)
        batch.close()
        if batch.backend in ("ale", "envpool") or batch.seats_per_env > 1:
            return None
        return gym.make(env, disable_env_checker=True, **kwargs)
    return env(**kwargs)


def _check_spaces(env: gym.Env[Any, Any]) -> Iterator[Finding]:
    for space, role, codec in (
        (env.observation_space, "observation", ObservationCodec),
        (env.action_space, "action", ActionCodec),
    ):
        if not isinstance(space, gym.Space):
            yield Finding("error", "spaces", f"{role}_space is {space!r}, not a gymnasium space.", "Set it in __init__.")
            continue
        try:
            codec(space)
        except ShoalError as error:
            yield Finding("error", "spaces", f"{error}.", "Wrap the environment.")
            continue
        yield Finding("ok", "spaces", f"The {role} space is {space}.")
        if isinstance(space, spaces.Box) and not np.all(space.low < space.high):
            yield Finding("warning", "spaces", f"The {role} Box has entries with low >= high.", "Remove constant entries.")
    if isinstance(env.observation_space, spaces.Box) and env.observation_space.dtype == np.float64:
        yield Finding("ok", "spaces", "Observations are float64; shoal stores float32.")
    box = env.action_space
    if isinstance(box, spaces.Box) and not (np.isfinite(box.low).all() and np.isfinite(box.high).all()):
        advice = "Give it finite bounds: exploration noise and squashing need them."
        yield Finding("warning", "spaces", "The action Box is unbounded.", advice)


def _check_reset(env: gym.Env[Any, Any]) -> Iterator[Finding]:
    answer = env.reset(seed=0)
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
        text = f"reset() returned {type(answer).__name__}, not (observation, info)."
        yield Finding("error", "reset", text, "Return the observation and a dictionary.")
        return
    yield from _check_observation(env, answer[0], "reset()")
    yield Finding("ok", "reset", "reset(seed=0) returns (observation, info).")


def _check_observation(env: gym.Env[Any, Any], observation: Any, origin: str) -> Iterator[Finding]:
    """Shape, dtype and range of one observation; no finding if it is fine."""
    codec = ObservationCodec(env.observation_space)
    try:
        buffers = codec.buffers(1)
        codec.write(buffers, 0, observation)
    except Exception as error:
        yield Finding("error", "observation", f"{origin}: {error}.", "Return what observation_space promises.")
        return
    with ignore_overflow():
        fault = codec.fault(buffers)
    if fault:
        yield Finding("error", "observation", f"{origin}: {fault[1]}.", "Observations must be finite and in their space.")
    elif not env.observation_space.contains(observation):
        text = f"{origin} returns an observation outside its space, or with another dtype."
        yield Finding("warning", "observation", text, "Widen the space's bounds or cast the observation.")


def _play(env: gym.Env[Any, Any], seed: int, steps: int) -> Iterator[tuple[Any, Any]]:
    """Random legal actions; yields (observation and info acted on, what step() returned). Stop it if that is malformed."""
    env.action_space.seed(seed)
    observation, info = env.reset(seed=seed)
    for _ in range(steps):
        answer = env.step(_sample(env.action_space, _mask(observation, info)))
        yield (observation, info), answer
        observation, _, terminated, truncated, info = answer
        if terminated or truncated:
            observation, info = env.reset()


def _check_steps(env: gym.Env[Any, Any], steps: int) -> Iterator[Finding]:
    """Random actions: the five values of step(), masks, and whether episodes end."""
    episodes, reported, masked = 0, set(), None
    for t, (before, answer) in enumerate(_play(env, 0, steps), 1):
        if _mask(*before) is not None:
            masked = before
        if not (isinstance(answer, tuple) and len(answer) == 5):
            count = len(answer) if isinstance(answer, tuple) else type(answer).__name__
            advice = "Return (observation, reward, terminated, truncated, info)."
            yield Finding("error", "step", f"step() returned {count} values, not 5.", advice)
            return
        observation, reward, terminated, truncated, info = answer
        for finding in (
            *_check_observation(env, observation, f"step {t}"),
            *_check_scalars(reward, terminated, truncated, info, t),
        ):
            if finding.check not in reported:
                reported.add(finding.check)
                yield finding
        episodes += bool(terminated or truncated)
    if not reported:
        yield Finding("ok", "step", f"{steps} random steps gave well-formed observations, rewards and flags.")
    if masked:
        yield from _check_mask(env, *masked)
    if episodes:
        yield Finding("ok", "episodes", f"{episodes} episodes ended in {steps} random steps.")
    else:
        advice = "Give it a time limit: gymnasium.wrappers.TimeLimit or max_episode_steps."
        yield Finding("warning", "episodes", f"No episode ended in {steps} random steps.", advice)


def _check_scalars(reward: Any, terminated: Any, truncated: Any, info: Any, t: int) -> Iterator[Finding]:
    if np.ndim(reward) != 0 or np.asarray(reward).dtype.kind not in "fiub":
        yield Finding("error", "reward", f"Step {t}: reward is {reward!r}, not a number.", "Return float(reward).")
    elif not np.isfinite(reward):
        yield Finding("error", "reward", f"Step {t}: reward is {reward}.", "Rewards must be finite.")
    for value, name in ((terminated, "terminated"), (truncated, "truncated")):
        if not isinstance(value, bool | np.bool_):
            text = f"Step {t}: {name} is {value!r} ({type(value).__name__}), not a bool."
            yield Finding("error", name, text, f"Return bool({name}).")
    if not isinstance(info, dict):
        yield Finding("error", "info", f"Step {t}: info is {type(info).__name__}, not a dict.", "Return {} if there is none.")


def _mask(observation: Any, info: Any) -> Any:
    if isinstance(observation, dict) and "action_mask" in observation:
        return observation["action_mask"]
    return info.get("action_mask") if isinstance(info, dict) else None


def _check_mask(env: gym.Env[Any, Any], observation: Any, info: Any) -> Iterator[Finding]:
    codec = ActionCodec(env.action_space)
    try:
        fault = codec.mask_fault(codec.mask(_mask(observation, info))[None])
    except Exception as error:
        yield Finding("error", "mask", f"{error}.", "A mask has one entry per action, 1 where it is legal.")
        return
    if fault:
        yield Finding("error", "mask", f"{fault[1]}.", "End the episode when nothing is legal.")
    else:
        yield Finding("ok", "mask", f"Actions are masked ({codec.mask_size} entries).")


def _sample(space: gym.Space[Any], mask: Any) -> Any:
    if mask is None or not isinstance(space, spaces.Discrete):
        return space.sample()
    legal = np.flatnonzero(mask)
    return space.start + int(legal[int(space.np_random.integers(len(legal)))]) if len(legal) else space.sample()


def _check_seeding(env: gym.Env[Any, Any], steps: int) -> Iterator[Finding]:
    """The same seed and actions twice."""
    traces = []
    for _ in range(2):
        trace = [pickle.dumps(env.reset(seed=7)[0])]
        for _, (observation, reward, terminated, truncated, _) in _play(env, 7, min(steps, 100)):
            trace.append(pickle.dumps((observation, float(reward), bool(terminated), bool(truncated))))
        traces.append(trace)
    if traces[0] == traces[1]:
        yield Finding("ok", "seeding", "The same seed and actions give the same episode.")
    else:
        t = next(k for k, pair in enumerate(zip(*traces, strict=True)) if pair[0] != pair[1])
        text = f"The same seed and actions give different episodes from step {t} on."
        yield Finding("warning", "seeding", text, "Draw from self.np_random, and call super().reset(seed=seed).")


def _check_bounds(env: gym.Env[Any, Any]) -> Iterator[Finding]:
    """The extreme actions are accepted."""
    space = env.action_space
    extremes: list[Any]
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
    yield Finding("ok", "bounds", "It accepts the smallest and the largest action.")


def _check_close(env: Any) -> Iterator[Finding]:
    if hasattr(env, "close"):  # anything may have been made
        env.close()
        yield Finding("ok", "close", "close() works.")


def _check_pickling(env: Any) -> Iterator[Finding]:
    """Other processes must be able to create it; by an id they always can."""
    if isinstance(env, str):
        return
    try:
        cloudpickle.loads(cloudpickle.dumps(env))
    except Exception as error:
        text = f"It cannot be sent to other processes: {_in_words(error)}."
        yield Finding("error", "pickling", text, "Open files, sockets and windows inside the function, not outside.")
        return
    yield Finding("ok", "pickling", "It can be sent to other processes.")


def _check_width(env: Any, made: VectorEnv[Any, Any, Any]) -> Iterator[Finding]:
    """Actors and the evaluator ask for different numbers of environments."""
    if callable(env) and "num_envs" not in inspect.signature(env).parameters:
        text = f"It returns a VectorEnv that always has {made.num_envs} environments; training needs other numbers too."
        yield Finding("error", "num_envs", text, "Let the function take num_envs, and make that many.")


def _check_batch(env: Any, steps: int, num_envs: int, kwargs: dict[str, Any]) -> Iterator[Finding]:
    """The batch as training would use it: back-end, autoreset mode, speed."""
    batch = make(env, num_envs, **kwargs)
    try:
        yield Finding("ok", "back-end", batch.backend_reason)
        if isinstance(batch, VectorEnvAdapter) and batch.mode is AutoresetMode.NEXT_STEP:
            text = "Its autoreset mode is NEXT_STEP: one step per episode is spent on resetting."
            yield Finding("warning", "autoreset", text, "Offer autoreset_mode=SAME_STEP in the constructor if you can.")
        step, act = batch.reset(seed=0), RandomPolicy(batch.action_space, np.random.default_rng(0))
        actions = [act(step) for _ in range(16)]  # drawn before the clock starts
        count, began = 0, time.perf_counter()
        while count < steps and time.perf_counter() - began < SPEED_SECONDS:
            step = batch.step(actions[count % 16] if step.action_mask is None else act(step))
            count += 1
        rate = count * batch.num_seats / (time.perf_counter() - began)
        yield Finding("ok", "speed", f"{rate:,.0f} steps/s with {num_envs} environments on back-end '{batch.backend}'.")
    finally:
        batch.close()


def _in_words(error: BaseException) -> str:
    text = str(error).strip().rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
