"""ddpg, td3 and sac: phases, joined batches, tensors, exploration, priorities of actors, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from shoal import algorithms, envs
from shoal.acting import Progress, StepView
from shoal.algorithms import ddpg, sac, td3
from shoal.algorithms.off_policy.policy import UNIFORM, OrnsteinUhlenbeck
from shoal.device.batched_inference import BatchedInference
from shoal.device.placement import Hardware
from shoal.envs import EnvSpec
from shoal.errors import ConfigError
from shoal.learning import phases_due
from shoal.nets import NetConfig
from shoal.slots import map_tree
from tests.algorithms.replay_loop import Actor, batch_of, batches
from tests.algorithms.toys import toy_env, toy_spec

NET = NetConfig(hidden=(16,), activation="relu")
FAST = {"actor_lr": 1e-2, "critic_lr": 1e-2, "optimiser_epsilon": 1e-2, "random_steps": 0}  # where nothing is learned nothing moves
CASES = {
    "ddpg": (ddpg.Config(**FAST, n_step=2, noise="ou", actor_grad_limit=0.5, target_tau=0.1), {"actions": "box"}),
    "dpg": (ddpg.Config(**FAST, actor_priorities=True, target_tau=1.0, target_period_updates=3, grad_norm=1.0), {"actions": "box"}),
    "td3": (td3.Config(**FAST, normalise_observations=True, target_tau=0.1), {"actions": "box"}),
    "sac": (sac.Config(**FAST, alpha_lr=1e-2, target_tau=0.1), {"actions": "box", "observations": "dict"}),
    "fixed": (sac.Config(**FAST, alpha=0.1), {"actions": "box"}),
    "discrete": (sac.Config(**FAST, alpha_lr=1e-2, importance_final=1.0), {"masked": True}),
    "judging": (sac.Config(**FAST, actor_priorities=True), {"masked": True}),
}
LEARNED = [name for name in CASES if name not in ("dpg", "judging")]


def made(case, seats=4):
    config, toy = CASES[case]
    return algorithms.make(config, toy_spec(**toy), NET, seats), toy


def update(learn, minibatch, progress):
    found = {}
    for phase in phases_due(learn, progress):
        gradient, metrics = learn.gradients(minibatch, phase)
        found[phase] = torch.as_tensor(gradient).clone(), metrics, bool(learn.apply(gradient, phase))
    return found


def minibatch_of(learn, batch, progress=None, seed=0):
    progress = progress or Progress(learner_steps=1)
    (minibatch,) = learn.minibatches(batch, learn.sums(batch), progress, np.random.default_rng(seed))
    return minibatch


# ---------------------------------------------------------------------------------------------- updates
@pytest.mark.parametrize("case", CASES)
def test_each_phase(case):
    """A phase moves its own part and reports what is declared."""
    algorithm, toy = made(case)
    learn, declared = algorithm.learn(3), {metric.name for metric in algorithm.metrics}
    phases = ("critic", "actor", "temperature") if getattr(algorithm.config, "alpha", None) == "auto" else ("critic", "actor")
    assert learn.phases == phases
    batch = next(iter(batches(algorithm, toy_env(4, **toy), 1)))
    minibatch, reported = minibatch_of(learn, batch), set()
    for phase in phases:
        before = learn.state["params"].detach().clone()
        gradient, metrics = learn.gradients(minibatch, phase)
        assert learn.apply(gradient, phase)
        moved = torch.nonzero(before != learn.state["params"].detach())
        assert len(moved) and learn.span(phase).start <= int(moved.min()) and int(moved.max()) < learn.span(phase).stop
        reported |= set(metrics)
    assert reported == {name for name in declared if learn.phases == phases and not (
        name.startswith("temperature") and "temperature" not in phases)}
    assert learn.priorities.shape == batch["reward"].shape and (learn.priorities > 0).all()


def test_td3_delays_its_actor():
    """TD3 updates its actor and the targets every second time."""
    algorithm, toy = made("td3")
    learn = algorithm.learn(3)
    moved = []
    for step, batch in enumerate(batches(algorithm, toy_env(4, **toy), 5)):
        progress, before = Progress(learner_steps=step), {name: learn.state[name].detach().clone() for name in ("params", "target")}
        update(learn, minibatch_of(learn, batch, progress), progress)
        actor, critic = learn.span("actor"), learn.span("critic")
        moved.append([not torch.equal(before[name][part], learn.state[name].detach()[part])
                      for name in ("params", "target") for part in (actor, critic)])
    assert moved == [[False, True, False, False], [True, True, True, True]] * 2 + [[False, True, False, False]]


@pytest.mark.parametrize("case", CASES)
def test_two_learners_equal_one(case):
    """In every phase: the mean of their gradients is that of one learner with both batches, of different sizes, and their noise."""
    algorithm, toy = made(case)
    one, two = algorithm.learn(3), [algorithm.learn(3) for _ in range(2)]
    actor = Actor(algorithm, toy_env(4, **toy), 5)
    actor.play(80)
    items, rng = actor.items()[0], np.random.default_rng(0)
    for step in range(4):
        progress, parts = Progress(learner_steps=step, fraction=step / 4), []
        for size in (8, 24):
            chosen = rng.integers(len(items["reward"]), size=size)
            parts.append(batch_of(map_tree(lambda x: x[chosen], items), rng.random(size) / 500 + 1e-4, 500))  # noqa: B023
        sums = sum(learn.sums(part, k, 2) for k, (learn, part) in enumerate(zip(two, parts, strict=True)))
        halves = [next(learn.minibatches(part, sums, progress, np.random.default_rng(10 * step + k)))
                  for k, (learn, part) in enumerate(zip(two, parts, strict=True))]
        joined = map_tree(lambda a, b: np.concatenate([a, b]) if len(a) > 1 else a, *parts)
        whole = minibatch_of(one, joined, progress)
        if whole.noise is not None:
            whole = replace(whole, noise=torch.cat([half.noise for half in halves]))
        for phase in phases_due(one, progress):
            expected = one.gradients(whole, phase)[0].copy()
            mean = np.mean([learn.gradients(half, phase)[0] for learn, half in zip(two, halves, strict=True)], 0)
            np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=2e-6, err_msg=phase)
            for learn in (one, *two):
                learn.apply(expected.copy(), phase)


@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("case", CASES)
def test_learner_in_tensors(case, captures):
    """As on a GPU (tests/gpu has the graphs); the batch whose rewards are NaN leaves the critics alone."""
    algorithm, toy = made(case)
    here, there = algorithm.learn(3), algorithm.learn(3)
    there.to(Hardware())
    if captures:
        there.capture()
    for step, batch in enumerate(batches(algorithm, toy_env(4, **toy), 8)):
        progress = Progress(learner_steps=step, fraction=step / 8)
        found = [update(learn, minibatch_of(learn, batch, progress, step), progress) for learn in (here, there)]
        for phase, (gradient, metrics, finite) in found[0].items():
            other, readings, also = found[1][phase]
            assert finite == also == (phase != "critic" or step != 5)
            np.testing.assert_allclose(other, gradient, rtol=1e-4, atol=1e-5)
            assert dict(readings.items()) == pytest.approx(dict(metrics), rel=1e-3, abs=1e-5, nan_ok=True)
        np.testing.assert_allclose(torch.as_tensor(there.priorities), here.priorities, rtol=1e-4, atol=1e-6)
        for name, tensor in here.state.items():
            np.testing.assert_allclose(there.state[name].detach(), tensor.detach(), rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("case", LEARNED)
def test_all_phases_at_once(case, captures):
    """As on a GPU, bit for bit; one batch has rewards that are NaN."""
    algorithm, toy = made(case)
    apart, at_once = algorithm.learn(3), algorithm.learn(3)
    for learn in (apart, at_once):
        learn.to(Hardware())
        if captures:
            learn.capture()
    for step, batch in enumerate(batches(algorithm, toy_env(4, **toy), 8)):
        progress = Progress(learner_steps=step, fraction=step / 8)
        found = update(apart, minibatch_of(apart, batch, progress, step), progress)
        metrics, finite = at_once.update((minibatch_of(at_once, batch, progress, step),), (phases_due(at_once, progress),))
        assert finite.tolist() == [one for _, _, one in found.values()] == [phase != "critic" or step != 5 for phase in found]
        expected = {name: value for _, readings, _ in found.values() for name, value in readings.items()}
        assert dict(metrics.items()) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
        np.testing.assert_array_equal(at_once.priorities, apart.priorities)
        assert all(torch.equal(tensor, at_once.state[name]) for name, tensor in apart.state.items())


@pytest.mark.parametrize("case", LEARNED)
def test_critics_learn_a_fixed_batch(case):
    algorithm, toy = made(case)
    learn = algorithm.learn(3)
    batch, losses = next(iter(batches(algorithm, toy_env(4, **toy), 1))), []
    batch["discount"][:] = 0  # targets that stay
    for _ in range(60):
        losses.append(update(learn, minibatch_of(learn, batch), Progress(learner_steps=1))["critic"][1]["critic_loss"])
    assert losses[-1] < 0.5 * losses[0]


def test_the_temperature_follows_the_entropy():
    """Towards its target from both sides; the actor's gradient leaves it alone."""
    for target, sign in ((-8.0, -1), (-0.01, 1)):
        algorithm = sac.SAC(sac.Config(target_entropy=target, alpha_lr=1e-2), toy_spec(actions="box"), NET, 4)
        learn = algorithm.learn(0)
        batch = next(iter(batches(algorithm, toy_env(4, actions="box"), 1)))
        found = update(learn, minibatch_of(learn, batch), Progress())
        entropy = found["actor"][1]["entropy"]
        assert float(found["temperature"][0][0]) == pytest.approx(entropy - target, rel=1e-4)  # times alpha, which is 1
        log_alpha = float(learn.state["params"].detach()[-1])
        assert np.sign(log_alpha) == sign * (1 if entropy < target or sign < 0 else -1)


# ---------------------------------------------------------------------------------------------- acting
BOUNDS = gym.spaces.Box(np.array([[-2.0, 0.0]], np.float32), np.array([[2.0, 3.0]], np.float32))  # shape [1, 2]
SEATS = 20_000


def acting(config, space=BOUNDS):
    spec = EnvSpec("v", gym.spaces.Box(-1, 1, (3,), np.float32), space, 100, 1, 1, False, "none", "", 0)
    return algorithms.make(config, spec, NET, SEATS).policy()


def view(first=False):
    return StepView(np.zeros((SEATS, 3), np.float32), np.full(SEATS, first))


def acted(policy, explore, state=None, first=False):
    amount = None if explore is None else np.full(SEATS, explore, np.float32)
    state = policy.initial_state(SEATS) if state is None else state
    return policy.act(view(first), state, amount, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("config", [ddpg.Config(), td3.Config(noise="ou"), sac.Config()], ids=["ddpg", "td3", "sac"])
def test_random_and_greedy_actions(config):
    """Random actions fill the bounds and greedy ones are one."""
    policy = acting(config)
    wild, _, _ = acted(policy, UNIFORM)
    assert wild.shape == (SEATS, 1, 2) and wild.dtype == np.float32 and (wild >= BOUNDS.low).all() and (wild <= BOUNDS.high).all()
    np.testing.assert_allclose(wild.mean(0), [[0.0, 1.5]], atol=0.05)
    np.testing.assert_allclose(wild.std(0), np.array([[4.0, 3.0]]) / np.sqrt(12), atol=0.02)
    greedy, _, _ = acted(policy, None)
    assert (greedy == greedy[0]).all() and (acted(policy, 0.0)[0] == greedy).all()
    np.testing.assert_allclose(greedy[0], [[0.0, 1.5]], atol=0.05)


def test_deviation_of_the_noise():
    """Noise has its deviation where actions lie in plus minus one."""
    policy = acting(ddpg.Config())
    noisy = acted(policy, 0.3)[0] - acted(policy, None)[0]
    np.testing.assert_allclose(noisy.std(0), [[0.3 * 2, 0.3 * 1.5]], rtol=0.03)
    assert np.abs(acted(policy, 5.0)[0]).max() <= 3.0
    sampled = acted(acting(sac.Config()), 1.0)[0]  # tanh of a standard normal
    np.testing.assert_allclose(sampled.std(0), [[2 * 0.6279, 1.5 * 0.6279]], rtol=0.03)


def test_ou_noise_until_episode_end():
    policy, noise = acting(ddpg.Config(noise="ou")), OrnsteinUhlenbeck(0.15)
    greedy, state = acted(policy, None)[0], policy.initial_state(SEATS)
    seen = []
    for _ in range(40):
        action, state, _ = acted(policy, 0.02, state)
        seen.append((action - greedy)[:, 0, 0] / 2)  # the same fresh noise at every step: x goes to fresh / theta
    np.testing.assert_allclose(seen[-1], seen[0] / 0.15, rtol=0.01, atol=1e-3)
    again, state, _ = acted(policy, 0.02, state, first=True)
    np.testing.assert_allclose((again - greedy)[:, 0, 0] / 2, seen[0], atol=1e-6)
    x, steps = torch.zeros(SEATS, 1), torch.Generator().manual_seed(1)
    for _ in range(60):
        x, _ = noise.of(0.2 * torch.randn(SEATS, 1, generator=steps), {"noise": x}, torch.zeros(SEATS, dtype=torch.bool))
    assert float(x.std()) == pytest.approx(0.2 / np.sqrt(1 - 0.85**2), rel=0.03)


def test_random_steps_come_first():
    algorithm = algorithms.make(replace(CASES["td3"][0], random_steps=100, noise_std=0.3), toy_spec(actions="box"), NET, 4)
    assert algorithm.explore(0, 2, 4, Progress(env_steps=99)).tolist() == [UNIFORM] * 4
    np.testing.assert_allclose(algorithm.explore(1, 2, 4, Progress(env_steps=100)), 0.3)


@pytest.mark.parametrize("case", CASES)
def test_a_servers_answers_are_the_policys(case):
    """In tensors, as an inference server on a GPU acts; greedily, and legally where it explores."""
    algorithm, toy = made(case)
    policy, other = algorithm.policy(), algorithm.policy()
    for one in (policy, other):
        one.load(algorithm.learn(3).published(Progress()))
    inference = BatchedInference(policy, Hardware(), torch.Generator().manual_seed(0))
    env, viewer, action = toy_env(4, **toy), algorithm.record.viewer(4), None
    now, state = env.reset(seed=0), policy.initial_state(4)
    for explore in (0.0, 0.0, 1.0, UNIFORM, 0.0):
        seen = viewer.of(now, action)
        action, state, extras = inference.act([seen], [state], np.full(4, explore, np.float32))
        greedy, _, wanted = other.act(seen, other.initial_state(4), None, torch.Generator())
        if explore == 0.0:
            np.testing.assert_allclose(action, greedy, rtol=1e-5, atol=1e-6)
            for name, x in wanted.items():
                np.testing.assert_allclose(extras[name], x, rtol=1e-5, atol=1e-6)
        if seen.action_mask is not None:
            assert seen.action_mask[np.arange(4), action].all()
        now = env.step(action)


@pytest.mark.parametrize("case", ["dpg", "judging"])
def test_actors_judge_as_the_learner(case):
    """With the learner's own weights, its first errors are the first priorities: of one critic with itself as its target."""
    config, toy = CASES[case]
    algorithm = algorithms.make(replace(config, **({"alpha": 0.0} if case == "judging" else {})), toy_spec(**toy), NET, 4)
    learn, actor = algorithm.learn(3), Actor(algorithm, toy_env(4, **toy), 5)
    actor.policy.load(learn.published(Progress()))
    actor.play(40)
    items, priority = actor.items()
    assert len(learn.published(Progress())["params"]) == len(learn.state["params"])
    if case == "judging":  # its critics are two, and the smaller one judges
        assert (priority > 0).all()
        return
    learn.gradients(minibatch_of(learn, batch_of(items)), "critic")
    known = items["discount"] > 0
    close = np.isclose(learn.priorities, priority, rtol=1e-3, atol=1e-4)
    assert close[~known].all() and close[known].mean() > 0.7  # of a truncated episode's last observation an actor knows nothing


# ---------------------------------------------------------------------------------------------- what they refuse
@pytest.mark.parametrize(("config", "env", "said"), [
    (td3.Config(), "CartPole-v1", "td3 cannot act in CartPole-v1: its actions are continuous, but the action space is Discrete"),
    (ddpg.Config(), "CartPole-v1", "or sac, dqn or ppo"),
    (sac.Config(target_entropy=1.0), "Pendulum-v1", "--algorithm.target-entropy 1 has the wrong sign"),
    (sac.Config(target_entropy=-1.0), "CartPole-v1", "--algorithm.target-entropy -1 cannot be reached"),
    (sac.Config(target_entropy=0.7), "CartPole-v1", "log 2 = 0.693"),
])
def test_what_cannot_be_is_refused(config, env, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        algorithms.make(config, envs.describe(env), NET, 4)


@pytest.mark.parametrize("config", [ddpg.Config(), td3.Config(), sac.Config()], ids=["ddpg", "td3", "sac"])
def test_bounds_leave_a_choice(config):
    for space, said in ((gym.spaces.Box(-np.inf, np.inf, (2,)), "it needs finite bounds"),
                        (gym.spaces.Box(np.array([0.0, 1.0], np.float32), np.ones(2, np.float32)), "leave a choice")):
        with pytest.raises(ConfigError, match=said):
            acting(config, space)
    with pytest.raises(ConfigError, match="which have no past"):
        algorithms.make(config, toy_spec(actions="box"), NetConfig(recurrent="lstm"), 4)
    with pytest.raises(ConfigError, match="separate_value"):
        algorithms.make(config, toy_spec(actions="box"), NetConfig(separate_value=True), 4)
