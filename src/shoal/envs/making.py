"""make() and describe(): which back-end runs an environment, and why.

an id of shoal's own                     compiled    one Numba kernel for the whole batch; CartPole-v1 has one too, on request
ALE/...                                  ale         ale_py's vector environment
an id with a vector_entry_point          vector      the environment's own vectorised version
any other id, class or callable          loop        single environments, one after the other, in this process
a callable that returns a VectorEnv      vector
a callable that returns a ParallelEnv    loop        one seat per agent
a callable that takes `device`           tensors     a shoal.envs.device.TensorEnv, as arrays
backend="envpool"                        envpool     on request only
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.envs.atari import AtariPoolStream, AtariStream, load_ale
from shoal.envs.builtin.catalog import CATALOG, plan
from shoal.envs.loop import LoopEnv
from shoal.envs.parallel import ParallelStream, is_parallel
from shoal.envs.pool import PoolStream
from shoal.envs.stream import BatchedEnv, EnvSpec
from shoal.envs.vector import VectorStream
from shoal.errors import ConfigError, EnvironmentError_, ShoalError

__all__ = ["BACKENDS", "describe", "make"]

BACKENDS = ("auto", "compiled", "vector", "loop", "ale", "envpool")
Source = str | type | Callable[..., Any]


def make(
    env: Source,
    num_envs: int,
    *,
    backend: str = "auto",
    check: bool = True,
    seed: int | None = None,
    **kwargs: Any,
) -> BatchedEnv:
    """A batch of `num_envs` environments as one canonical stream; see shoal.envs.stream.

    env is an id, a gymnasium.Env class, or a callable that returns a gymnasium.Env, a VectorEnv (then it should take
    `num_envs`, and may take `autoreset_mode`), a PettingZoo-style ParallelEnv or a TensorEnv (then it takes `num_envs` and
    `device`). kwargs go to the environment. `seed`
    is used by the first reset() that is given none. check=False leaves out the tests for NaN, inf and ranges.
    The arrays of a Step may be reused by the next call: copy what you keep.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r}: use one of {', '.join(BACKENDS)}")
    if num_envs < 1:
        raise ConfigError(f"num_envs={num_envs}: use at least 1")
    try:
        if isinstance(env, str):
            return _from_id(env, num_envs, backend, check, seed, kwargs)
        if callable(env):
            return _from_callable(env, num_envs, backend, check, seed, kwargs)
    except ShoalError:
        raise
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"{_name(env)}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{_name(env)} could not be made with {kwargs or 'no options'}: {error}") from error
    except Exception as error:
        raise EnvironmentError_(f"{_name(env)} could not be made: {type(error).__name__}: {error}") from error
    raise ConfigError(
        f"env must be an id, a gymnasium.Env class or a callable that makes one, not {type(env).__name__}"
    )


def describe(env: Source, **kwargs: Any) -> EnvSpec:
    """What make(env, ...) would give, found by making one and, where masks may hide in info, resetting it."""
    stream = make(env, _own_width(env, kwargs), **kwargs)
    try:
        masked = False
        if stream.backend in ("loop", "vector"):
            masked = stream.reset(seed=0).action_mask is not None
        return EnvSpec(
            name=stream.name,
            observation_space=stream.observation_space,
            action_space=stream.action_space,
            max_episode_steps=stream.max_episode_steps,
            frame_skip=stream.frame_skip,
            seats_per_env=stream.seats_per_env,
            has_action_mask=masked,
            backend=stream.backend,
            line=stream.line,
            mask_size=stream.codec.mask_size,
            has_executed_action=stream.has_executed_action,
        )
    finally:
        stream.close()


def _from_id(name: str, num_envs: int, backend: str, check: bool, seed: int | None, kwargs: dict) -> BatchedEnv:
    if backend == "envpool":
        pool = AtariPoolStream if name.startswith("ALE/") else PoolStream
        return _told(pool(name, num_envs, check=check, seed=seed, **kwargs), "as asked")
    # CartPole-v1 is gymnasium's: our kernel has the same dynamics and is faster, but is used only when asked for.
    if name in CATALOG and (backend == "compiled" or (backend == "auto" and name != "CartPole-v1")):
        return _compiled(name, num_envs, seed, dict(kwargs))
    if backend == "ale" or (backend == "auto" and name.startswith("ALE/")):
        if not name.startswith("ALE/"):
            raise ConfigError(f"backend='ale' runs ids that begin with ALE/, not {name!r}")
        stream = AtariStream(name, num_envs, check=check, seed=seed, **kwargs)
        return _told(stream, "ale_py's own vector environment is the fastest for Atari")
    if backend == "compiled":
        raise ConfigError(f"{name!r} has no compiled version; there are {', '.join(CATALOG)}")
    spec = _find(name)
    own = spec.vector_entry_point is not None and not spec.additional_wrappers
    if backend == "vector" and not own:
        raise ConfigError(f"{name!r} has no vectorised version of its own; use backend='loop'")
    if own and backend != "loop":
        return _own_vector(spec, num_envs, check, seed, kwargs)
    envs = [gym.make(name, disable_env_checker=True, **kwargs) for _ in range(num_envs)]
    why = "as asked" if backend == "loop" else "it has no vectorised version of its own"
    return _told(_singles(name, envs, check, seed), f"{num_envs} in one process; {why}")


def _from_callable(
    env: Callable[..., Any], num_envs: int, backend: str, check: bool, seed: int | None, kwargs: dict
) -> BatchedEnv:
    name = _name(env)
    if backend not in ("auto", "loop", "vector"):
        raise ConfigError(f"backend={backend!r} needs an id, and {name} is a {type(env).__name__}")
    accepted = _parameters(env)
    extra: dict[str, Any] = {}
    if "num_envs" in accepted:
        extra["num_envs"] = num_envs
    if "autoreset_mode" in accepted:
        extra["autoreset_mode"] = AutoresetMode.SAME_STEP
    if "device" in accepted and "device" not in kwargs:
        return _tensors(name, env, num_envs, check, seed, kwargs)
    first = env(**{**extra, **kwargs})
    if isinstance(first, VectorEnv):
        if backend == "loop":
            raise ConfigError(f"{name} returns a VectorEnv, which backend='loop' cannot use")
        if first.num_envs != num_envs:
            raise ConfigError(f"{name} made {first.num_envs} environments instead of {num_envs}; let it take num_envs")
        return _vector(VectorStream(name, first, check=check, seed=seed), first, "the callable returns a VectorEnv")
    if backend == "vector":
        raise ConfigError(f"{name} returns a {type(first).__name__}, not a VectorEnv; use backend='loop'")
    envs = [first] + [env(**{**extra, **kwargs}) for _ in range(num_envs - 1)]
    if isinstance(first, gym.Env):
        return _told(_singles(name, envs, check, seed), f"{num_envs} in one process; it makes single environments")
    if hasattr(first, "agent_iter"):
        raise ConfigError(f"{name} is an AEC environment (agents in turn); wrap it with pettingzoo's aec_to_parallel")
    if is_parallel(first):
        stream = ParallelStream(name, envs, check=check, seed=seed)
        limit = getattr(first, "max_cycles", None)
        stream.max_episode_steps = limit if isinstance(limit, int) else None
        return _told(stream, f"{num_envs} in one process with {stream.seats_per_env} agents each")
    raise ConfigError(f"{name} returned a {type(first).__name__}; return a gymnasium.Env, a VectorEnv or a ParallelEnv")


def _tensors(name: str, env: Callable[..., Any], num_envs: int, check: bool, seed: int | None, kwargs: dict) -> BatchedEnv:
    import torch

    from shoal.envs.device.base import make_tensors
    from shoal.envs.device.host import TensorStream

    where = "cuda" if torch.cuda.device_count() else "cpu"
    stream = TensorStream(name, make_tensors(env, num_envs, where, **kwargs), check=check, seed=seed)
    return _told(stream, f"tensor code on {where}, copied to arrays; --architecture device leaves it where it is")


def _compiled(name: str, num_envs: int, seed: int | None, kwargs: dict) -> BatchedEnv:
    limit = kwargs.pop("max_episode_steps", None)
    design = plan(name, kwargs)
    from shoal.envs.builtin.driver import CompiledEnv  # imports Numba

    stream = CompiledEnv(design, num_envs, max_episode_steps=limit, seed=seed)
    own = "shoal's version of gymnasium's, same dynamics" if name == "CartPole-v1" else "one of shoal's own"
    return _told(stream, f"{own}, one Numba kernel for the whole batch")


def _own_vector(spec: Any, num_envs: int, check: bool, seed: int | None, kwargs: dict) -> BatchedEnv:
    extra = {}
    entry = spec.vector_entry_point
    creator = entry if callable(entry) else gym.envs.registration.load_env_creator(entry)
    if "autoreset_mode" in _parameters(creator):
        extra["autoreset_mode"] = AutoresetMode.SAME_STEP
    env = gym.make_vec(spec.id, num_envs, vectorization_mode="vector_entry_point", **extra, **kwargs)
    stream = VectorStream(spec.id, env, check=check, seed=seed)
    stream.max_episode_steps = kwargs.get("max_episode_steps", spec.max_episode_steps)
    return _vector(stream, env, "its own vectorised version")


def _vector(stream: VectorStream, env: VectorEnv, why: str) -> BatchedEnv:
    if stream.max_episode_steps is None and env.spec is not None:
        stream.max_episode_steps = env.spec.max_episode_steps
    note = ", whose dead rows are marked invalid" if stream.mode is AutoresetMode.NEXT_STEP else ""
    return _told(stream, f"{why}, autoreset {stream.mode.name}{note}")


def _singles(name: str, envs: list[gym.Env], check: bool, seed: int | None) -> LoopEnv:
    stream = LoopEnv(name, envs, check=check, seed=seed)
    spec = envs[0].spec
    stream.max_episode_steps = spec.max_episode_steps if spec is not None else _limit_of(envs[0])
    stream.frame_skip = _frame_skip_of(envs[0])
    return stream


def _layers(env: Any) -> list[Any]:
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _limit_of(env: gym.Env) -> int | None:
    limits = [one._max_episode_steps for one in _layers(env) if isinstance(one, gym.wrappers.TimeLimit)]
    return min(limits) if limits else None


def _frame_skip_of(env: gym.Env) -> int:
    """Frames per decision. Only Atari counts them: AtariPreprocessing.frame_skip over AtariEnv._frameskip."""
    skip = 1
    for layer in _layers(env):
        value = (
            layer.frame_skip if isinstance(layer, gym.wrappers.AtariPreprocessing) else getattr(layer, "_frameskip", 1)
        )
        skip *= value if isinstance(value, int) and not isinstance(value, bool) else 1
    return skip


def _find(name: str) -> Any:
    """gymnasium's registration of an id; imports ale_py for Atari's plain names (Pong-v4)."""
    if name not in gym.registry and ":" not in name:
        try:
            load_ale()
        except ConfigError:
            if name.startswith("ALE/"):
                raise
    try:
        module, _, rest = name.rpartition(":")
        if module:
            __import__(module)
        return gym.spec(rest)
    except (gym.error.Error, ImportError) as error:
        near = difflib.get_close_matches(name, gym.registry, 3, 0.7)
        near += [one for one in (f"ALE/{name}", f"shoal/{name}") if one in gym.registry and one not in near]
        other = "or give module:Env-v0 (it is imported and registers it) or module:callable"
        hint = f"did you mean {', '.join(near)}?" if near else other
        raise ConfigError(f"unknown environment {name!r} ({str(error).strip()}); {hint}") from error


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def _own_width(env: Source, kwargs: dict) -> int:
    """1, except for a callable that makes a VectorEnv of a width of its own."""
    if isinstance(env, str) or not callable(env) or "num_envs" in _parameters(env):
        return 1
    try:
        probe = env(**{key: value for key, value in kwargs.items() if key not in ("backend", "check", "seed")})
    except Exception:  # it may want num_envs or options: make() calls it properly and says what is wrong
        return 1
    width = probe.num_envs if isinstance(probe, VectorEnv) else 1
    probe.close()
    return width


def _name(env: Any) -> str:
    return env if isinstance(env, str) else getattr(env, "__name__", None) or type(env).__name__


def _told(stream: Any, why: str) -> Any:
    stream.line = f"{stream.name} runs on back-end '{stream.backend}': {why}."
    return stream
