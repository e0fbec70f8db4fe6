"""shoal's own environments: known returns, exact rules, seeds, and gymnasium's contract."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from shoal import envs
from shoal.envs.builtin.catalog import CATALOG

OURS = [name for name in CATALOG if name.startswith("shoal/")]


def returns(name, policy, episodes, rows=256, **kwargs):
    """Returns and lengths of at least `episodes` whole episodes. Rows that finish early must not weigh more: the first
    episodes of each row are counted, the same number for each."""
    env = envs.make(name, rows, seed=11, **kwargs)
    step, rng = env.reset(), np.random.default_rng(5)
    each = -(-episodes // rows)
    got: list[list[tuple[float, int]]] = [[] for _ in range(rows)]
    memory: dict = {}
    while min(map(len, got)) < each:
        step = env.step(policy(step, rng, memory, env))
        pairs = zip(step.episode_return, step.episode_length, strict=True)
        for row, one in zip(np.flatnonzero(step.last), pairs, strict=True):
            got[row].append(one)
    kept = np.array([one[:each] for one in got], float).reshape(-1, 2)
    return kept[:, 0], kept[:, 1]


def uniform(step, rng, memory, env):
    if isinstance(env.action_space, gym.spaces.Box):
        return rng.uniform(env.action_space.low, env.action_space.high, (env.num_seats, *env.action_space.shape))
    return rng.integers(0, env.action_space.n, env.num_seats)


def chase(step, rng, memory, env):
    """Catch: walk under the ball."""
    side = {28: (4, 9), 24: (2, 7)}.get(step.observation.shape[-1])
    if side:
        board = step.observation[:, 0, side[0] : side[0] + 20 : 2, side[1] : side[1] + 10 : 2]
    else:
        board = step.observation.reshape(env.num_seats, 10, 5)
    ball, paddle = board[:, :9].any(1).argmax(1), board[:, 9].argmax(1)
    return 1 + np.sign(ball - paddle)


def follow_cue(step, rng, memory, env):
    """T-maze and Cue-lure: advance (1), and at the junction the action that the cue named."""
    seen = step.observation
    memory.setdefault("cue", np.zeros(env.num_seats))
    memory["cue"] = np.where(seen[:, 0] != 0, seen[:, 0], memory["cue"])
    return np.where(seen[:, 1] == 1, (memory["cue"] > 0).astype(int), 1)


def sail_right(step, rng, memory, env):
    size = round(np.sqrt(step.observation.shape[1]))
    mapping = np.random.default_rng(42).integers(0, 2, size * size)
    return mapping[step.observation.argmax(1)]


def grasp(step, rng, memory, env):
    p, o = step.observation[:, :2], step.observation[:, 2:4]
    move = np.clip((o - p) / 0.25, -1, 1)
    close = np.abs(p + 0.25 * move - o).max(1) <= 0.0999
    return np.concatenate([move, np.where(close, 1.0, -1.0)[:, None]], 1)


def risky(step, rng, memory, env):
    return np.where(step.observation[:, 0] == 1, 1 + rng.integers(0, 2, env.num_seats), 0)


def always(action):
    return lambda step, rng, memory, env: np.full(env.num_seats, action)


@pytest.mark.parametrize(
    ("name", "policy", "best", "length"),
    [
        ("shoal/Catch-v0", chase, 1.0, 9),
        ("shoal/PixelCatch-v0", chase, 1.0, 9),
        ("shoal/RiskyChain-v0", risky, 1.0, 6),
        ("shoal/RiskyChain-v0", always(0), 0.5, 1),
        ("shoal/LureChain-v0", always(1), 1.0, 4),
        ("shoal/LureChain-v0", always(0), 0.1, 1),
        ("shoal/BlindCliffwalk-v0", always(1), 1.0, 8),
        ("shoal/BlindCliffwalk-v0", always(0), 0.0, 1),
        ("shoal/DeepSea-v0", sail_right, 0.99, 10),
        ("shoal/TMaze-v0", follow_cue, 1.0, 9),
        ("shoal/CueLure-v0", follow_cue, 1.0, 13),
        ("shoal/CueLure-v0", always(0), 0.1, 1),
    ],
)
def test_known_policies(name, policy, best, length):
    got, lengths = returns(name, policy, 512)
    np.testing.assert_allclose(got, best, atol=1e-6)
    assert (lengths == length).all()


def risky_random():
    win = (1 / 3) ** 5
    return 1 / 3 * 0.5 + 2 / 3 * (win - (1 - win))


@pytest.mark.parametrize(
    ("name", "kwargs", "mean"),
    [
        ("shoal/Catch-v0", {}, -0.6),  # the ball's column is independent of the paddle: 1/5 - 4/5
        ("shoal/Catch-v0", {"reward_scale": 1000.0, "ball_column": 3}, None),
        ("shoal/PixelCatch-v0", {}, -0.6),
        ("shoal/RiskyChain-v0", {}, risky_random()),
        ("shoal/LureChain-v0", {}, 0.1 * (1 - 2**-4) + 2**-4),
        ("shoal/BlindCliffwalk-v0", {"length": 4}, 2**-4),
        ("shoal/DeepSea-v0", {"size": 4}, None),
        ("shoal/TMaze-v0", {}, 0.0),
        ("shoal/CueLure-v0", {"length": 3}, 0.1 * (1 - 2**-3) + 2**-3 * 0.5),
    ],
)
def test_random_policy_mean(name, kwargs, mean):
    got, _ = returns(name, uniform, 8192, **kwargs)
    if mean is None:
        assert len(np.unique(got)) >= 2
        return
    assert abs(got.mean() - mean) < 4 * got.std() / np.sqrt(len(got))


def test_point_grasp():
    got, lengths = returns("shoal/PointGrasp-v0", grasp, 4096)
    np.testing.assert_allclose(got, 1 - 0.05 * (lengths - 1), atol=1e-5)  # always a success
    assert abs(got.mean() - 0.894) < 4 * got.std() * np.sqrt(1 / 4096 + 1 / 4000) + 5e-4
    got, lengths = returns("shoal/PointGrasp-v0", uniform, 16384)
    success = (got + 0.05 * (lengths - 1)) > 0.9
    assert abs(success.mean() - 0.014) < 4 * np.sqrt(0.014 * (1 / 16384 + 1 / 4000)) + 5e-4
    assert lengths.max() == 10


def test_pixel_catch_is_catch():
    board, pixels = envs.make("shoal/Catch-v0", 8), envs.make("shoal/PixelCatch-v0", 8)
    small, centre = (
        envs.make("shoal/Catch-v0", 8, observation="pixels"),
        envs.make("shoal/PixelCatch-v0", 8, crop="centre"),
    )
    steps = [one.reset(seed=2) for one in (board, pixels, small, centre)]
    rng = np.random.default_rng(0)
    for _ in range(30):
        want = steps[0].observation.reshape(8, 10, 5)
        canvas = np.zeros((8, 28, 28))
        canvas[:, 4:24, 9:19] = 255 * want.repeat(2, 1).repeat(2, 2)
        assert want.sum((1, 2)).min() >= 1 and want.sum((1, 2)).max() <= 2
        np.testing.assert_array_equal(steps[1].observation[:, 0], canvas)
        np.testing.assert_array_equal(steps[2].observation[:, 0], 255 * want)
        np.testing.assert_array_equal(steps[3].observation[:, 0], canvas[:, 2:26, 2:26])
        action = rng.integers(0, 3, 8)
        steps = [one.step(action) for one in (board, pixels, small, centre)]


@pytest.mark.parametrize("backend", ["compiled", "loop", "vector", "sync"])
def test_tmaze_executed_action(backend):
    if backend == "sync":
        one = lambda: gym.make("shoal/TMaze-v0", length=2)  # noqa: E731
        mode = AutoresetMode.SAME_STEP
        env = envs.make(lambda: gym.vector.SyncVectorEnv([one] * 4, autoreset_mode=mode), 4)
    else:
        env = envs.make("shoal/TMaze-v0", 4, length=2, backend=backend)
    step = env.reset(seed=0)
    assert set(np.unique(step.observation[:, 0])) <= {-1.0, 1.0}
    for t in range(6):
        at_junction = step.observation[:, 1] == 1
        assert at_junction.all() == (t % 3 == 2)
        step = env.step(np.ones(4, int))
        np.testing.assert_array_equal(step.executed_action, at_junction.astype(int))
    assert envs.describe("shoal/TMaze-v0").has_executed_action


@pytest.mark.parametrize("limit", [1, 4])
def test_final_observation(limit):
    env = envs.make("shoal/LureChain-v0", 3, length=6, max_episode_steps=limit)
    step = env.reset(seed=0)
    for t in range(1, 9):
        step = env.step(np.ones(3, int))
        if t % limit == 0:
            assert step.truncated.all() and step.last.all() and step.first.all() and (step.discount == 1).all()
            assert step.final_rows.tolist() == [0, 1, 2]
            assert (step.final_observation.argmax(1) == limit).all() and (step.observation.argmax(1) == 0).all()
            assert (step.episode_length == limit).all()
        else:
            assert step.final_observation is None and not step.last.any()


def test_cartpole_is_gymnasiums():
    """The same start and actions, episode by episode, against gymnasium's single CartPole-v1."""
    theirs = gym.make("CartPole-v1").unwrapped
    ours = envs.make("CartPole-v1", 1, backend="compiled")
    assert ours.backend == "compiled"
    spec = envs.describe("CartPole-v1")
    assert spec.max_episode_steps == 500 and spec.observation_space == theirs.observation_space
    step, rng = ours.reset(seed=4), np.random.default_rng(1)
    for _ in range(20):
        theirs.reset(seed=0)
        theirs.state = tuple(ours._state[:, 0])
        np.testing.assert_allclose(step.observation[0], np.float32(theirs.state), rtol=1e-6)
        for _ in range(500):
            action = int(rng.integers(2))
            seen, reward, terminated, _, _ = theirs.step(action)
            step = ours.step(np.array([action]))
            assert reward == step.reward[0] and terminated == step.last[0]
            if terminated:
                break
            np.testing.assert_allclose(step.observation[0], seen, rtol=2e-5, atol=2e-6)


def test_cartpole_limit_and_pomdp():
    def balance(step, state):
        x, v, angle, spin = state
        return (angle + 0.3 * spin + 0.02 * x + 0.05 * v > 0).astype(int)

    full, hidden = envs.make("CartPole-v1", 4, backend="compiled"), envs.make("shoal/CartPolePOMDP-v0", 4)
    a, b = full.reset(seed=1), hidden.reset(seed=1)
    for t in range(1, 501):
        action = balance(a, full._state)
        a, b = full.step(action), hidden.step(action)
        if t < 500:
            assert not a.last.any()
            np.testing.assert_array_equal(b.observation, a.observation[:, [0, 2]])
    assert a.truncated.all() and b.truncated.all() and (a.episode_return == 500).all()
    np.testing.assert_array_equal(b.final_observation, a.final_observation[:, [0, 2]])
    got, _ = returns("shoal/CartPolePOMDP-v0", uniform, 4096)
    assert 21 < got.mean() < 23.5


@pytest.mark.parametrize("name", OURS)
def test_seeds(name):
    def trace(seed, rows=4):
        env, out = envs.make(name, rows), []
        env.reset(seed=9)
        env.step(uniform(None, np.random.default_rng(8), {}, env))
        step, rng = env.reset(seed=seed), np.random.default_rng(0)
        for _ in range(30):
            out.append((step.observation.copy(), step.reward.copy(), step.last.copy()))
            step = env.step(uniform(step, rng, {}, env))
        return out

    for one, two in zip(trace(3), trace(3), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    if "Chain" not in name and "Cliff" not in name and "Sea" not in name:  # those have no chance in them
        assert any(not np.array_equal(a[0], b[0]) for a, b in zip(trace(3, 16), trace(4, 16), strict=True))


@pytest.mark.parametrize("name", OURS)
def test_single_version(name):
    env = gym.make(name)
    check_env(env.unwrapped, skip_render_check=True)
    env.reset(seed=0)
    for _ in range(600):
        seen, _, terminated, truncated, _ = env.step(env.action_space.sample())
        assert env.observation_space.contains(seen)
        if terminated or truncated:
            env.reset()


@pytest.mark.parametrize("name", OURS)
def test_vector_version(name):
    """Through gymnasium's SAME_STEP interface and back: what make(id) gives directly."""
    options = {"max_episode_steps": 3}
    direct = envs.make(name, 5, **options)
    theirs = envs.make(name, 5, backend="vector", **options)
    assert theirs.mode is AutoresetMode.SAME_STEP and theirs.max_episode_steps == 3
    direct.reset(seed=1)
    theirs.reset(seed=1)
    direct._rng[:] = theirs._env._env._rng  # the vector layer derives a seed of its own
    direct._state[:] = theirs._env._env._state
    direct._out.obs[:] = theirs._env._env._out.obs
    rng = np.random.default_rng(0)
    for _ in range(20):
        action = uniform(None, rng, {}, direct)
        a, b = direct.step(action), theirs.step(action)
        for field in ("observation", "reward", "discount", "first", "last", "truncated", "valid", "final_rows"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field), err_msg=field)
        if len(a.final_rows):
            np.testing.assert_array_equal(a.final_observation, b.final_observation)
        np.testing.assert_allclose(a.episode_return, b.episode_return, atol=1e-6)
