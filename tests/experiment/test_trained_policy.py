"""`run.policy` and `run.module` after training."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import shoal
from shoal.errors import ConfigError

QUIET = {"runtime": "inline", "max_env_steps": 300, "eval.enabled": False, "console.mode": "none", "tensorboard": False,
         "net.hidden": (8,), "actors": 1}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path_factory.mktemp("plain") / "run"), **QUIET)


def observations(rows=16):
    return np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)


def test_a_batch_is_its_rows(plain):
    seen = observations()
    actions = plain.policy.act(seen)
    assert actions.shape == (16,)
    assert actions.tolist() == [plain.policy.act(row) for row in seen]


def test_sampled_actions_differ(plain):
    seen = np.zeros((200, 4), np.float32)
    assert len(set(plain.policy.act(seen).tolist())) == 1
    assert len(set(plain.policy.act(seen, deterministic=False).tolist())) == 2


def test_masks_of_a_batch(plain):
    legal = np.tile([True, False], (16, 1))
    assert not plain.policy.act(observations(), mask=legal).any()
    with pytest.raises(ConfigError, match=r"the mask does not fit: action_mask has shape \(16, 3\)"):
        plain.policy.act(observations(), mask=np.ones((16, 3)))


def test_a_vector_env_takes_it(plain):
    env = gym.make_vec("CartPole-v1", 3)
    seen, _ = env.reset(seed=1)
    for _ in range(5):
        seen, *_ = env.step(plain.policy.act(seen, deterministic=False))
    assert seen.shape == (3, 4)


def test_rows_that_begin_forget(tmp_path):
    run = shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "run"), **QUIET, **{"net.recurrent": "lstm", "net.lstm_size": 4})
    policy, seen = run.policy, observations(2)
    policy.act(seen)
    with pytest.raises(ConfigError, match=r"remembers 2 episodes and is asked to act in 1; call policy.reset\(\)"):
        policy.act(seen[0])
    policy.reset()
    policy.act(seen)
    after = [leaf.clone() for leaf in policy._state.values()]
    policy.act(seen[::-1].copy())
    policy.act(seen, first=[True, False])
    for before, now in zip(after, policy._state.values(), strict=True):
        assert np.allclose(before[0], now[0]) and not np.allclose(before[1], now[1])


class Parts(gym.Env):
    """Sees a dictionary."""

    observation_space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": gym.spaces.Discrete(3)})
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"a": np.zeros(2, np.float32), "b": 1}, {}

    def step(self, action):
        return {"a": np.zeros(2, np.float32), "b": 1}, 0.0, True, False, {}


def test_batches_that_do_not_fit(plain, tmp_path):
    """One sentence for each, and the policy acts as before afterwards."""
    several = shoal.train("a2c", Parts, run_dir=str(tmp_path / "run"), **QUIET).policy
    memory = shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "memory"), **QUIET, net={"recurrent": "lstm"}).policy
    zeros = np.zeros
    wrong = [
        (plain.policy, zeros((3, 4)), {"first": [True, False]}, r"first=\[True, False\] does not fit .* of 3 rows; give one"),
        (plain.policy, zeros(4), {"first": [True, False]}, r"first=\[True, False\] does not fit .* of 1 row;"),
        (memory, zeros((3, 4)), {"first": [[True]] * 3}, r"first=.* does not fit an observation of 3 rows"),
        (plain.policy, zeros((3, 4)), {"first": [[True], [True, False], 1]}, "does not fit an observation of 3 rows"),
        (plain.policy, zeros((0, 4)), {}, "the batch of observations is empty"),
        (plain.policy, zeros((3, 5)), {}, r"the observation does not fit Box.*has shape \(3, 5\), its space says \(3, 4\)"),
        (plain.policy, [[0, 1], [0]], {}, "the observation does not fit Box"),
        (plain.policy, zeros((3, 4)), {"mask": [[True, False], [True]]}, "the mask does not fit"),
        (several, {"a": zeros((3, 2)), "b": zeros(2, int)}, {}, "do not fit each other: a has 3 rows, b has 2 rows; give one"),
        (several, {"a": zeros((3, 2)), "b": 1}, {}, "do not fit each other: a has 3 rows, b has no batch"),
        (several, {"a": zeros((3, 2))}, {}, "the observation does not fit Dict.*has no 'b'"),
    ]
    for policy, observation, more, said in wrong:
        with pytest.raises(ConfigError, match=said):
            policy.act(observation, **more)
    assert plain.policy.act(zeros((3, 4)), first=[True, False, True]).shape == plain.policy.act(zeros((3, 4)), first=True).shape
    assert several.act({"a": zeros((3, 2)), "b": zeros(3, int)}).shape == (3,) and several.act({"a": zeros(2), "b": 1}) in (0, 1)
    memory.reset()
    with pytest.raises(ConfigError):
        memory.act(zeros((3, 5)))
    assert memory.act(zeros((2, 4))).shape == (2,), "a refused call leaves no trace"


class Bounded(gym.Env):
    """Sees numbers of any size, does two numbers within bounds."""

    observation_space, action_space = gym.spaces.Box(-1e6, 1e6, (3,)), gym.spaces.Box(-2.0, 2.0, (2,))

    def _seen(self):
        return self.np_random.normal(5.0, 3.0, 3).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action):
        return self._seen(), float(action[0]), False, self.np_random.random() < 0.1, {}


SMALL = {**QUIET, "max_env_steps": 80, "replay.min_size": 50, "replay.batch_size": 8}
NORMAL = {"algorithm.normalise_observations": True}


@pytest.mark.parametrize(("preset", "env", "more", "names"), [
    ("ppo", "CartPole-v1", NORMAL, {"action", "logits", "value"}), ("a2c", Parts, {}, {"action", "logits", "value"}),
    ("ppo", Bounded, NORMAL, {"action", "mean", "log_std", "value"}), ("dqn", "CartPole-v1", SMALL, {"action", "q"}),
    ("rainbow", "CartPole-v1", SMALL, {"action", "q"}), ("td3", Bounded, SMALL, {"action"}),
    ("sac", Bounded, {**SMALL, **NORMAL}, {"action", "mean", "log_std"}), ("sac", "CartPole-v1", SMALL, {"action", "logits"}),
    ("curl", "shoal/PixelCatch-v0", SMALL, {"action", "q"}), ("es", "CartPole-v1", {}, {"action", "outputs"})])
def test_the_module_is_called(preset, env, more, names, tmp_path):
    """With observations as environments give them; it answers what `act` does, and gradients flow."""
    more = {**QUIET, **more}
    run = shoal.train(preset, env, run_dir=str(tmp_path / "run"), **more)
    space = run.prepared.raw_spaces()[0]
    space.seed(3)
    batch = [space.sample() for _ in range(5)]
    if isinstance(space, gym.spaces.Dict):
        seen = {name: np.stack([one[name] for one in batch]) for name in batch[0]}
    else:
        seen = np.stack(batch) if space.dtype == np.uint8 else np.clip(np.stack(batch), -10, 10)
    found = run.module(seen)
    assert set(found) == names and all(len(tensor) == 5 for tensor in found.values())
    act = run.policy.act(seen)
    low, high = (-2, 2) if env is Bounded else (0, 1e9)
    np.testing.assert_allclose(found["action"].detach().clamp(low, high).numpy(), act, rtol=1e-5, atol=1e-6)
    sum(tensor.sum() for tensor in found.values() if tensor.requires_grad).backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in run.module.parameters())
    assert ("observation_mean" in run.module.state_dict()) == bool(run.policy._policy.model.norm_size)


def test_what_the_module_refuses(plain, tmp_path):
    assert plain.module(np.zeros((2, 4)))["logits"].shape == (2, 2), "float64 too"
    legal = torch.tensor([[True, False], [False, True]])
    assert plain.module(torch.zeros(2, 4), mask=legal)["action"].tolist() == [0, 1]
    with pytest.raises(ConfigError, match=r"has the shape \(4,\), and the network takes .*: give a batch, as observation\[None\]"):
        plain.module(torch.zeros(4))
    with pytest.raises(ConfigError, match="has no parts a, b; give a dictionary"):
        shoal.train("a2c", Parts, run_dir=str(tmp_path / "parts"), **QUIET).module(torch.zeros(2, 2))
    memory = {"recurrent": "lstm", "lstm_size": 4}
    run = shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "run"), **QUIET, net=memory)
    seen = observations(2)
    first = run.module(seen)
    again = run.module(seen, first["state"])
    run.policy.act(seen)
    assert run.policy.act(seen).tolist() == again["action"].tolist() and not torch.equal(first["logits"], again["logits"])
    sees = shoal.train("a2c", "CartPole-v1", run_dir=str(tmp_path / "sees"), **QUIET, net={**memory, "prev_action_reward": True})
    with pytest.raises(ConfigError, match="sees its previous action and reward"):
        sees.module(seen)
    search = shoal.train("qtopt", "shoal/PointGrasp-v0", run_dir=str(tmp_path / "search"), **SMALL)
    with pytest.raises(ConfigError, match=r"qtopt finds actions by a search.*use run.policy.act"):
        search.module(torch.zeros(2, *search.prepared.raw_spaces()[0].shape))


def test_the_module_is_exported(plain):
    """What was exported gives the same numbers for another number of rows."""
    exported = torch.export.export(plain.module, (torch.zeros(2, 4),), dynamic_shapes=({0: torch.export.Dim("rows", max=1023)},))
    seen = torch.from_numpy(observations(7))
    torch.testing.assert_close(exported.module()(seen)["logits"], plain.module(seen)["logits"])


def test_the_module_is_saved_and_loaded(plain, tmp_path):
    torch.save(plain.module.state_dict(), tmp_path / "policy.pt")
    loaded = torch.load(tmp_path / "policy.pt", weights_only=True)
    assert loaded and all(torch.equal(loaded[name], tensor) for name, tensor in plain.module.state_dict().items())
