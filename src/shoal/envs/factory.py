"""make() and describe(): which back-end runs an environment, and why.

an id of shoal's own                     compiled    one Numba kernel for the whole batch; CartPole-v1 has one too, on request
ALE/...                                  ale         ale_py's vector environment
an id with a vector_entry_point          vector      the environment's own vectorised version
any other id, class or callable          loop        single environments, one after the other, in this process
a callable that returns a VectorEnv      vector
a callable that returns a ParallelEnv    loop        one seat per agent; an AECEnv too, whose agents take turns
pettingzoo:MODULE                        loop        its parallel_env() where it has one, else its env()
a callable that takes `device`           tensors     a shoal.envs.device.TensorEnv, as arrays
backend="envpool"                        envpool     on request only
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.envs.atari import AleAdapter, AtariAdapter, AtariEnvPoolAdapter, registered
from shoal.envs.builtin.catalog import CATALOG, builtin_spec
from shoal.envs.builtin.compiled_games import CompiledGames
from shoal.envs.builtin.games import GAMES, game_spec
from shoal.envs.envpool_env import EnvPoolAdapter
from shoal.envs.handling import Handling, Restarts
from shoal.envs.interface import BatchedEnv, EnvSpec, env_name
from shoal.envs.multi_agent import GroupEnv, GroupSpec, MultiAgentEnv, PlainGroup
from shoal.envs.pettingzoo_envs import ParallelEnvs, TurnEnvs, is_parallel, is_turn_based
from shoal.envs.pettingzoo_module import PETTINGZOO, pettingzoo_maker
from shoal.envs.recorded_env import RecordedEnv
from shoal.envs.seat_rows import AgentEnvs
from shoal.envs.single_envs import SingleEnvsAdapter
from shoal.envs.vector_env import VectorEnvAdapter
from shoal.errors import ConfigError, EnvironmentError_, ShoalError

__all__ = ["BACKENDS", "describe", "describe_multi_agent", "make", "make_multi_agent", "must_be_compiled"]

BACKENDS = ("auto", "compiled", "vector", "loop", "ale", "envpool")
EnvLike = str | type | Callable[..., Any] | RecordedEnv
Options = dict[str, Any]
Made = TypeVar("Made", bound=BatchedEnv | AgentEnvs | CompiledGames)


def make(
    env: EnvLike,
    num_envs: int,
    *,
    backend: str = "auto",
    check: bool = True,
    seed: int | None = None,
    handling: Handling | None = None,
    **kwargs: Any,
) -> BatchedEnv:
    """A batch of `num_envs` environments behind one interface; see shoal.envs.interface.

    env is an id, a gymnasium.Env class, or a callable that returns a gymnasium.Env, a VectorEnv (then it should take `num_envs`,
    and may take `autoreset_mode`), a PettingZoo-style ParallelEnv or AECEnv whose agents have equal spaces, or a TensorEnv (then it
    takes `num_envs` and `device`).
    `handling`: what is read from info, and whether environments that raise are restarted. kwargs go to the environment. The first
    reset() without a seed uses `seed`. check=False leaves out the tests for NaN, inf and ranges. The next call
    may reuse the arrays of a Step: copy what you keep.
    """
    made = _handled(_make(env, num_envs, backend, check, seed, kwargs), handling)
    return made if not isinstance(made, AgentEnvs | CompiledGames) else _one_group(made)


def make_multi_agent(
    env: EnvLike,
    num_envs: int,
    *,
    backend: str = "auto",
    check: bool = True,
    seed: int | None = None,
    handling: Handling | None = None,
    **kwargs: Any,
) -> MultiAgentEnv:
    """The same with every agent's own spaces: see shoal.envs.multi_agent. A single-agent environment has one agent, "agent"."""
    made = _handled(_make(env, num_envs, backend, check, seed, kwargs), handling)
    return made if isinstance(made, AgentEnvs | CompiledGames) else PlainGroup(made)


def _make(
    env: EnvLike, num_envs: int, backend: str, check: bool, seed: int | None, kwargs: Options
) -> BatchedEnv | AgentEnvs | CompiledGames:
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r}: use one of {', '.join(BACKENDS)}")
    if num_envs < 1:
        raise ConfigError(f"num_envs={num_envs}: use at least 1")
    if isinstance(env, RecordedEnv):
        raise env.refuse()
    try:
        if isinstance(env, str):
            return _from_id(env, num_envs, backend, check, seed, kwargs)
        if callable(env):
            return _from_callable(env, num_envs, backend, check, seed, kwargs)
    except ShoalError:
        raise
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"{env_name(env)}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"cannot create {env_name(env)} with {kwargs or 'no options'}: {error}") from error
    except Exception as error:
        raise EnvironmentError_(f"cannot create {env_name(env)}: {type(error).__name__}: {error}") from error
    raise ConfigError(f"env must be an id, a gymnasium.Env class or a callable that makes one, not {type(env).__name__}")


def _handled(
    made: BatchedEnv | AgentEnvs | CompiledGames, handling: Handling | None
) -> BatchedEnv | AgentEnvs | CompiledGames:
    """Let the adapter do what `handling` says; a sentence where it cannot."""
    if handling is None:
        return made
    if handling.restart_on_error:
        if not isinstance(made, SingleEnvsAdapter | AgentEnvs):
            raise ConfigError(
                f"--envs.restart-on-error {handling.restart_on_error} restarts single environments, but {made.name} runs on "
                f"back-end '{made.backend}', which steps all of them at once; add --envs.backend loop, or leave it out"
            )
        made.restarts.limit = handling.restart_on_error
    if handling.info:
        if not isinstance(made, SingleEnvsAdapter | VectorEnvAdapter | AgentEnvs):
            raise ConfigError(
                f"--log.info {handling.info[0]} reads info, but {made.name} runs on back-end '{made.backend}', which has none; "
                "leave it out"
            )
        made.watch_info(handling.info)
    if handling.state:
        if not isinstance(made, AgentEnvs):
            raise ConfigError(
                f"--net.state-value needs an environment with state(), which PettingZoo's have; {made.name} has none: use "
                "--net.central-value or --net.separate-value"
            )
        made.watch_state()
    return made


def describe(env: EnvLike, **kwargs: Any) -> EnvSpec:
    """What make(env, ...) would give. Makes one environment and, where masks may hide in info, resets it.

    Training needs different numbers of environments for actors and the evaluator, so this refuses a callable that makes a VectorEnv
    of one fixed width.
    """
    if isinstance(env, RecordedEnv):
        return env.describe()
    made = make(env, 1, **kwargs)
    try:
        if isinstance(made, VectorEnvAdapter) and callable(env) and "num_envs" not in _parameters(env):
            raise _fixed_width(made.name, made.num_envs)
        masked = (made.backend in ("loop", "vector") or made.seats_per_env > 1) and made.reset(seed=0).action_mask is not None
        return EnvSpec(
            name=made.name,
            observation_space=made.observation_space,
            action_space=made.action_space,
            max_episode_steps=made.max_episode_steps,
            frame_skip=made.frame_skip,
            seats_per_env=made.seats_per_env,
            has_action_mask=masked,
            backend=made.backend,
            backend_reason=made.backend_reason,
            mask_size=made.mask_size,
            has_executed_action=made.has_executed_action,
            takes_turns=made.takes_turns,
            frame_stack=made.protocol.stack_num if isinstance(made, AtariAdapter) else 1,
        )
    finally:
        made.close()


def describe_multi_agent(env: EnvLike, **kwargs: Any) -> tuple[GroupSpec, ...]:
    """What make_multi_agent(env, ...) would give: every group of agents with equal spaces."""
    made = make_multi_agent(env, 1, **kwargs)
    try:
        steps = made.reset(seed=0).groups
        return tuple(
            GroupSpec(
                group.agents,
                EnvSpec(
                    name=made.name,
                    observation_space=group.observation_space,
                    action_space=group.action_space,
                    max_episode_steps=made.max_episode_steps,
                    frame_skip=1,
                    seats_per_env=len(group.agents),
                    has_action_mask=step.action_mask is not None,
                    backend=made.backend,
                    backend_reason=made.backend_reason,
                    mask_size=group.mask_size,
                    takes_turns=made.takes_turns,
                ),
                group.raw_observation_space,
                group.raw_action_space,
            )
            for group, step in zip(made.groups, steps, strict=True)
        )
    finally:
        made.close()


def _from_id(
    name: str, num_envs: int, backend: str, check: bool, seed: int | None, kwargs: Options
) -> BatchedEnv | AgentEnvs | CompiledGames:
    if name in GAMES:
        return _game(name, num_envs, backend, seed, kwargs)
    if name.startswith(PETTINGZOO):
        if backend not in ("auto", "loop"):
            raise ConfigError(f"backend={backend!r} does not run PettingZoo's environments; leave it out")
        maker = pettingzoo_maker(name)
        return _agents(name, [maker(**kwargs) for _ in range(num_envs)], check, seed, lambda: maker(**kwargs))
    if backend == "envpool":
        pool = AtariEnvPoolAdapter if name.startswith("ALE/") else EnvPoolAdapter
        return _with_reason(pool(name, num_envs, check=check, seed=seed, **kwargs), "as asked")
    # CartPole-v1 is gymnasium's: our kernel has the same dynamics and is faster, but is used only when asked for.
    if name in CATALOG and (backend == "compiled" or (backend == "auto" and name != "CartPole-v1")):
        return _compiled(name, num_envs, seed, dict(kwargs))
    if backend == "ale" or (backend == "auto" and name.startswith("ALE/")):
        if not name.startswith("ALE/"):
            raise ConfigError(f"backend='ale' runs ids that begin with ALE/, not {name!r}")
        ale = AleAdapter(name, num_envs, check=check, seed=seed, **kwargs)
        return _with_reason(ale, "ale_py's own vector environment is the fastest for Atari")
    if backend == "compiled":
        raise ConfigError(f"{name!r} has no compiled version; these have one: {', '.join(CATALOG)}")
    spec = registered(name)
    has_vector_version = spec.vector_entry_point is not None and not spec.additional_wrappers
    if backend == "vector" and not has_vector_version:
        raise ConfigError(f"{name!r} has no vectorised version of its own; use backend='loop'")
    if has_vector_version and backend != "loop":
        return _own_vector(spec, num_envs, check, seed, kwargs)
    made = partial(gym.make, name, disable_env_checker=True, **kwargs)
    envs = [made() for _ in range(num_envs)]
    why = "as asked" if backend == "loop" else "it has no vectorised version of its own"
    return _with_reason(_singles(name, envs, check, seed, made), f"{num_envs} in one process; {why}")


def _from_callable(
    env: Callable[..., Any], num_envs: int, backend: str, check: bool, seed: int | None, kwargs: Options
) -> BatchedEnv | AgentEnvs:
    name = env_name(env)
    if backend not in ("auto", "loop", "vector"):
        raise ConfigError(f"backend={backend!r} needs an id, and {name} is a {type(env).__name__}")
    accepted = _parameters(env)
    extra: Options = {}
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
            first.close()
            if "num_envs" not in accepted:
                raise _fixed_width(name, first.num_envs)
            raise ConfigError(f"{name} made {first.num_envs} environments when asked for num_envs={num_envs}; make that many")
        return _vector(VectorEnvAdapter(name, first, check=check, seed=seed), first, "the callable returns a VectorEnv")
    if backend == "vector":
        raise ConfigError(f"{name} returns a {type(first).__name__}, not a VectorEnv; use backend='loop'")
    made = partial(env, **{**extra, **kwargs})
    envs = [first] + [made() for _ in range(num_envs - 1)]
    if isinstance(first, gym.Env):
        return _with_reason(_singles(name, envs, check, seed, made), f"{num_envs} in one process; it makes single environments")
    return _agents(name, envs, check, seed, made)


def _agents(name: str, envs: list[Any], check: bool, seed: int | None, remake: Callable[[], Any]) -> AgentEnvs:
    """Environments with several agents each. PettingZoo's are recognised by attributes: it need not be installed."""
    first, made = envs[0], f"{len(envs)} in one process with {{}} agents each"
    adapter: AgentEnvs
    if is_turn_based(first):
        adapter, made = TurnEnvs(name, envs, check=check, seed=seed), made + ", which take turns"
    elif is_parallel(first):
        adapter = ParallelEnvs(name, envs, check=check, seed=seed)
        limit = getattr(first, "max_cycles", None)  # PettingZoo's convention, declared nowhere
        adapter.max_episode_steps = limit if isinstance(limit, int) else None
    else:
        raise ConfigError(
            f"{name} returned a {type(first).__name__}; return a gymnasium.Env, a VectorEnv, a ParallelEnv or an AECEnv"
        )
    adapter.restarts = Restarts(remake, len(envs), 0)
    _with_reason(adapter, made.format(len(adapter.agents)))
    return adapter


def _one_group(env: AgentEnvs | CompiledGames) -> GroupEnv:
    """All agents as seats of one kind, for a policy that all share."""
    if len(env.groups) > 1:
        one, other = (group.agents[0] for group in env.groups[:2])
        raise ConfigError(
            f"{env.name}: agents {one!r} and {other!r} have different spaces, and one policy cannot play for both; give "
            "each agent its own (--policies independent), or pad the spaces to be equal (supersuit.pad_observations_v0, "
            "pad_action_space_v0)"
        )
    return GroupEnv(env)


def _game(name: str, num_envs: int, backend: str, seed: int | None, kwargs: Options) -> CompiledGames:
    if backend not in ("auto", "compiled"):
        raise ConfigError(f"{name!r} runs on backend='compiled' only, not {backend!r}")
    made = CompiledGames(game_spec(name, kwargs), num_envs, seed=seed)
    _with_reason(made, "one of shoal's own, one Numba kernel for the whole batch")
    return made


def _tensors(name: str, env: Callable[..., Any], num_envs: int, check: bool, seed: int | None, kwargs: Options) -> BatchedEnv:
    import torch

    from shoal.envs.device.host_adapter import TensorEnvAdapter
    from shoal.envs.device.tensor_env import make_tensor_env

    device = torch.device("cuda" if torch.cuda.device_count() else "cpu")
    adapter = TensorEnvAdapter(name, make_tensor_env(env, num_envs, device, **kwargs), device, check=check, seed=seed)
    return _with_reason(adapter, f"tensor code on {device}, copied to arrays; --architecture device leaves it where it is")


def must_be_compiled(env: EnvLike) -> bool:
    """Whether it is one of shoal's own environments that was never used on this machine: its first steps take some seconds."""
    if not isinstance(env, str) or env == "CartPole-v1" or env not in {*CATALOG, *GAMES}:
        return False
    from shoal.envs.builtin import env_kernels, game_kernels  # imports Numba
    from shoal.envs.builtin.kernel_random import was_compiled

    return not was_compiled(game_kernels.STEPS[game_spec(env, {}).kernel] if env in GAMES
                            else env_kernels.STEPS[builtin_spec(env, {}).step])


def _compiled(name: str, num_envs: int, seed: int | None, kwargs: Options) -> BatchedEnv:
    limit = kwargs.pop("max_episode_steps", None)
    spec = builtin_spec(name, kwargs)
    from shoal.envs.builtin.compiled import CompiledEnv  # imports Numba

    made = CompiledEnv(spec, num_envs, max_episode_steps=limit, seed=seed)
    origin = "shoal's version of gymnasium's, same dynamics" if name == "CartPole-v1" else "one of shoal's own"
    return _with_reason(made, f"{origin}, one Numba kernel for the whole batch")


def _own_vector(spec: Any, num_envs: int, check: bool, seed: int | None, kwargs: Options) -> BatchedEnv:
    extra: Options = {}
    entry = spec.vector_entry_point
    creator = entry if callable(entry) else gym.envs.registration.load_env_creator(entry)
    if "autoreset_mode" in _parameters(creator):
        extra["autoreset_mode"] = AutoresetMode.SAME_STEP
    env = gym.make_vec(spec.id, num_envs, vectorization_mode="vector_entry_point", **extra, **kwargs)
    adapter = VectorEnvAdapter(spec.id, env, check=check, seed=seed)
    adapter.max_episode_steps = kwargs.get("max_episode_steps", spec.max_episode_steps)
    return _vector(adapter, env, "its own vectorised version")


def _vector(adapter: VectorEnvAdapter, env: VectorEnv[Any, Any, Any], why: str) -> BatchedEnv:
    if adapter.max_episode_steps is None and env.spec is not None:
        adapter.max_episode_steps = env.spec.max_episode_steps
    note = ", whose dead rows are marked invalid" if adapter.mode is AutoresetMode.NEXT_STEP else ""
    return _with_reason(adapter, f"{why}, autoreset {adapter.mode.name}{note}")


def _singles(
    name: str, envs: list[gym.Env[Any, Any]], check: bool, seed: int | None, remake: Callable[[], Any]
) -> SingleEnvsAdapter:
    adapter = SingleEnvsAdapter(name, envs, check=check, seed=seed)
    adapter.restarts = Restarts(remake, len(envs), 0)
    spec = envs[0].spec
    adapter.max_episode_steps = spec.max_episode_steps if spec is not None else _limit_of(envs[0])
    adapter.frame_skip = _frame_skip_of(envs[0])
    return adapter


def _layers(env: Any) -> list[Any]:
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _limit_of(env: gym.Env[Any, Any]) -> int | None:
    limits = [layer._max_episode_steps for layer in _layers(env) if isinstance(layer, gym.wrappers.TimeLimit)]
    return min(limits) if limits else None


def _frame_skip_of(env: gym.Env[Any, Any]) -> int:
    """Frames per decision. Only Atari counts them: AtariPreprocessing.frame_skip times ale_py's AtariEnv._frameskip."""
    skip = 1
    for layer in _layers(env):
        preprocessing = isinstance(layer, gym.wrappers.AtariPreprocessing)
        value = layer.frame_skip if preprocessing else getattr(layer, "_frameskip", 1)
        skip *= value if isinstance(value, int) and not isinstance(value, bool) else 1
    return skip


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def _fixed_width(name: str, width: int) -> ConfigError:
    return ConfigError(
        f"{name} returns a VectorEnv that always has {width} environments, but actors and the evaluator need different numbers; "
        'let it take num_envs: def make(num_envs): return gymnasium.make_vec("CartPole-v1", num_envs)'
    )


def _with_reason(env: Made, why: str) -> Made:
    env.backend_reason = f"{env.name} runs on back-end '{env.backend}': {why}."
    return env
