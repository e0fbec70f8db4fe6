"""Acting with a trained policy: `run.policy`, `shoal eval` and `shoal play`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from shoal.acting import Progress
from shoal.core import Tree
from shoal.envs import BatchedEnv
from shoal.errors import CheckpointError, ConfigError
from shoal.experiment.checkpoints import TensorFiles, holds_table
from shoal.experiment.policy_choice import PolicyChoice, policy_files
from shoal.experiment.trained_policy import TrainedPolicy
from shoal.learning import Algorithm
from shoal.roles.episodes import EpisodePlay
from shoal.roles.matches import match_rates, rate_interval
from shoal.slots import leaves
from shoal.telemetry.console import counted

__all__ = ["Evaluation", "evaluate", "frames", "learned_arrays", "published_of"]


def published_of(algorithm: Algorithm, folder: Path, choice: PolicyChoice, scope: str = "") -> Tree:
    """The weights of a checkpoint to act with; `scope` says whose, where it has several policies."""
    try:
        return _published(algorithm, folder, choice, scope)
    except (KeyError, ValueError, RuntimeError, IndexError) as error:  # arrays of other names or shapes
        raise ConfigError(f"{folder} was saved with another network or environment than config.json describes ({error}); undo what "
                          "was changed there, or start a new run with `shoal train`") from None


def _published(algorithm: Algorithm, folder: Path, choice: PolicyChoice, scope: str) -> Tree:
    states = _states(folder, scope)
    published = algorithm.published_layout().empty()
    for state in states:
        if choice.source != "learner" and f"{choice.source}_return" in state:
            for path, leaf in leaves(published):
                leaf[...] = state[f"{choice.source}/{'/'.join(path)}"]
            return published
    learned = _joined(states)
    if learned:
        learn, counts = algorithm.learn(0), learned["counts"]
        with torch.no_grad():
            for name, tensor in learn.weights.items():
                tensor.copy_(torch.from_numpy(learned[f"learn/{name}"]))
        return learn.published(Progress(int(counts[0]), int(counts[1])))
    raise CheckpointError(f"{folder} holds no weights")


def learned_arrays(folder: Path, scope: str = "") -> dict[str, np.ndarray]:
    """What the learner of a policy has saved, by the names of its Learn; empty where there is none."""
    found = _joined(_states(folder, scope))
    return {name.removeprefix("learn/"): array for name, array in found.items() if name.startswith("learn/")}


def _states(folder: Path, scope: str) -> list[dict[str, np.ndarray]]:
    tensors = TensorFiles()
    return [tensors.load(path) for path in policy_files(folder, scope) if not holds_table(path)]


def _joined(states: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The state of a learner, or of the first of several; a parameter server's slices are put together."""
    learned = sorted((state for state in states if "counts" in state), key=lambda state: int(state.get("learn/begin", (0,))[0]))
    if len(learned) < 2 or "learn/begin" not in learned[0]:
        return learned[0] if learned else {}
    cut = len(learned[0]["learn/params"])
    return {name: np.concatenate([state[name] for state in learned]) if array.shape == (cut,) else array
            for name, array in learned[0].items()}


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of fresh episodes."""

    returns: np.ndarray
    lengths: np.ndarray
    unfinished: int = 0
    """Episodes that had not ended after --eval.max-episode-steps, and count as they were."""
    matches: bool = False
    """Whether they were played against an opponent."""

    def sentence(self) -> str:
        cut = f"; {self.unfinished} of them had not ended" if self.unfinished else ""
        if self.matches:
            rates = match_rates(self.returns)
            low, high = rate_interval(rates["win_rate"], len(self.returns))
            cut += f"; win rate {rates['win_rate']:.3f} ({low:.3f} to {high:.3f}), losses {rates['loss_rate']:.3f}"
        return (f"return {self.returns.mean():.2f} ± {self.returns.std():.2f} over {counted(len(self.returns), 'episode')} "
                f"(min {self.returns.min():.2f}, max {self.returns.max():.2f}), length {self.lengths.mean():.1f}{cut}")


def evaluate(algorithm: Algorithm, published: Tree, env: BatchedEnv, episodes: int, seed: int,
             max_episode_steps: int | None = None, greedy: bool = True) -> Evaluation:
    """Fresh episodes, greedy or explored as in training; one of `max_episode_steps` decisions is cut off, unless the
    environment's own limit is higher."""
    policy = algorithm.policy()
    policy.load(published)
    longest = None if max_episode_steps is None else max(max_episode_steps, env.max_episode_steps or 0)
    rng = torch.Generator().manual_seed(seed)
    explore = None if greedy else algorithm.explore(0, 1, env.num_seats, Progress.of(published["progress"]))
    play = EpisodePlay(policy, algorithm.record, env, episodes, seed, rng, explore, max_episode_steps=longest).to_the_end()
    return Evaluation(play.returns, play.lengths, play.unfinished)


@dataclass(frozen=True)
class Frame:
    """One step of `shoal play`."""

    episode: int
    step: int
    action: Any
    reward: float
    total: float
    ended: bool
    picture: Any  # what render() gave


def frames(policy: TrainedPolicy, env: gym.Env, episodes: int, seed: int) -> Iterator[Frame]:
    """Play whole episodes in one plain environment, one frame a step."""
    for episode in range(episodes):
        observation, info = env.reset(seed=seed + episode)
        policy.reset()
        total, reward, step, ended = 0.0, 0.0, 0, False
        yield Frame(episode, 0, None, 0.0, 0.0, False, _render(env))
        while not ended:
            action = policy.act(observation, mask=info.get("action_mask"), reward=reward)
            observation, given, terminated, truncated, info = env.step(action)
            reward, ended = float(given), bool(terminated or truncated)
            total, step = total + reward, step + 1
            yield Frame(episode, step, action, reward, total, ended, _render(env))


def _render(env: gym.Env) -> Any:
    if env.render_mode is None:
        return None
    try:
        return env.render()
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"the environment cannot be drawn: {error}; install that, or leave --video out") from None


def plain_env(target: Any, kwargs: dict[str, Any], render_mode: str | None) -> gym.Env:
    """One ordinary gymnasium environment, for playing."""
    options = {**kwargs, "render_mode": render_mode} if render_mode else kwargs
    try:
        env = gym.make(target, disable_env_checker=True, **options) if isinstance(target, str) else target(**options)
    except Exception as error:  # whatever a foreign constructor raises
        raise ConfigError(f"{target} cannot be made with {options}: {error}; "
                          "leave --video out, or install what it needs") from None
    if not isinstance(env, gym.Env):
        raise ConfigError(f"{target} makes a {type(env).__name__}, but `shoal play` shows gymnasium environments; "
                          "use `shoal eval`")
    return env
