"""bc, marwil, td3_bc, cql, iql: identities, closed forms, joined batches, tensors, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from shoal import algorithms
from shoal.acting import Progress, StepView
from shoal.algorithms import bc, cql, dqn, iql, marwil, sac, td3, td3_bc
from shoal.device.placement import Hardware
from shoal.envs import EnvSpec
from shoal.errors import ConfigError
from shoal.learning import phases_due
from shoal.nets import NetConfig
from shoal.ops.offline import action_gap
from shoal.slots import map_tree
from tests.algorithms.replay_loop import Actor, batch_of, batches
from tests.algorithms.test_off_policy import minibatch_of, update
from tests.algorithms.toys import toy_env, toy_spec

NET = NetConfig(hidden=(16,), activation="relu")
FAST = {"actor_lr": 1e-2, "optimiser_epsilon": 1e-2}  # where nothing is learned nothing moves
BOX = {"actions": "box"}
CASES = {
    "bc": (bc.Config(**FAST), {"masked": True}),
    "bc, box": (bc.Config(**FAST, normalise_observations=True), BOX),
    "bc, squared": (bc.Config(**FAST, loss="squared"), BOX),
    "iql": (iql.Config(**FAST, critic_lr=1e-2, value_lr=1e-2, target_tau=0.1), {"masked": True}),
    "iql, box": (iql.Config(**FAST, critic_lr=1e-2, actor_lr_final=1e-3, importance_final=1.0), {**BOX, "observations": "dict"}),
    "td3_bc": (td3_bc.Config(**FAST, critic_lr=1e-2, target_tau=0.1, normalise_observations=True), BOX),
    "marwil": (marwil.Config(**FAST, value_lr=1e-2, n_step=4), {"masked": True}),
    "marwil, box": (marwil.Config(**FAST, value_lr=1e-2, normalise_observations=True), BOX),
    "cql": (cql.Config(dqn=cql.CQLDiscreteOptions(lr=1e-2, optimiser_epsilon=1e-2)), {}),
    "cql, box": (cql.Config(alpha=5.0, samples=3, sac=cql.CQLBoxOptions(**FAST, critic_lr=1e-2, alpha_lr=1e-2)), BOX),
    "cql, lagrange": (cql.Config(alpha=5.0, samples=3, lagrange=1.0, lagrange_lr=1e-2,
                                 sac=cql.CQLBoxOptions(**FAST, critic_lr=1e-2, alpha=0.1)), {**BOX, "observations": "dict"}),
}
PHASES = {"bc": ("actor",), "iql": ("value", "actor", "critic"), "td3_bc": ("critic", "scale", "actor"),
          "marwil": ("scale", "actor", "value"), "cql": ("all",), "cql, box": ("critic", "actor", "temperature"),
          "cql, lagrange": ("critic", "actor", "multiplier")}


def made(case, seats=4):
    config, toy = CASES[case]
    return algorithms.make(config, toy_spec(**toy), NET, seats), toy


@pytest.mark.parametrize("case", CASES)
def test_each_phase(case):
    """A phase moves its own part and reports what is declared."""
    algorithm, toy = made(case)
    learn, declared = algorithm.learn(3), {metric.name for metric in algorithm.metrics}
    assert learn.phases == PHASES.get(case, PHASES[algorithm.name])
    batch = next(iter(batches(algorithm, toy_env(4, **toy), 1)))
    minibatch, reported = minibatch_of(learn, batch), set()
    for phase in learn.phases:
        before = learn.state["params"].detach().clone()
        gradient, metrics = learn.gradients(minibatch, phase)
        assert learn.apply(gradient, phase)
        moved = torch.nonzero(before != learn.state["params"].detach())
        assert len(moved) and learn.span(phase).start <= int(moved.min()) and int(moved.max()) < learn.span(phase).stop
        reported |= set(metrics)
    absent = {"returns_clipped"} | {name for name in declared if name.startswith("temperature") or name in ("alpha", "entropy")}
    assert reported <= declared and declared - reported <= absent
    assert learn.priorities.shape == batch["reward"].shape and (learn.priorities > 0).all()


@pytest.mark.parametrize("case", CASES)
def test_two_learners_equal_one(case):
    """In every phase; td3_bc's scale is that of both batches too."""
    algorithm, toy = made(case)
    one, two = algorithm.learn(3), [algorithm.learn(3) for _ in range(2)]
    actor = Actor(algorithm, toy_env(4, **toy), 5)
    actor.play(80)
    items, rng = actor.items()[0], np.random.default_rng(0)
    for step in range(4):
        progress, parts = Progress(learner_steps=step, fraction=step / 4), []
        for size in (8, 24):
            chosen = rng.integers(len(items["reward"]), size=size)
            parts.append(batch_of(map_tree(lambda x: x[chosen], items), np.full(size, 1 / 500), 500))  # noqa: B023
        sums = sum(learn.sums(part, k, 2) for k, (learn, part) in enumerate(zip(two, parts, strict=True)))
        halves = [next(learn.minibatches(part, sums, progress, np.random.default_rng(10 * step + k)))
                  for k, (learn, part) in enumerate(zip(two, parts, strict=True))]
        whole = minibatch_of(one, map_tree(lambda a, b: np.concatenate([a, b]) if len(a) > 1 else a, *parts), progress)
        if whole.noise is not None:
            whole = replace(whole, noise=torch.cat([half.noise for half in halves]))
        for phase in phases_due(one, progress):
            expected = one.gradients(whole, phase)[0].copy()
            mean = np.mean([learn.gradients(half, phase)[0] for learn, half in zip(two, halves, strict=True)], 0)
            np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=2e-6, err_msg=phase)
            for learn in (one, *two):
                learn.apply(expected.copy(), phase)


@pytest.mark.parametrize("case", CASES)
def test_learner_in_tensors(case):
    """As on a GPU, with its graphs."""
    algorithm, toy = made(case)
    here, there = algorithm.learn(3), algorithm.learn(3)
    there.to(Hardware())
    there.capture()
    for step, batch in enumerate(batches(algorithm, toy_env(4, **toy), 4)):
        progress = Progress(learner_steps=step, fraction=step / 8)
        for learn in (here, there):
            update(learn, minibatch_of(learn, batch, progress, step), progress)
    for name, tensor in here.state.items():
        np.testing.assert_allclose(there.state[name].detach(), tensor.detach(), rtol=1e-3, atol=1e-5, err_msg=name)


# ---------------------------------------------------------------------------------------------- identities
def test_td3_bc_without_cloning_is_td3():
    """TD3+BC without cloning is td3 bit for bit."""
    more = {"actor_lr": 1e-2, "critic_lr": 1e-2, "target_tau": 0.1}
    plain = algorithms.make(td3.Config(**more), toy_spec(**BOX), NET, 4)
    other = algorithms.make(td3_bc.Config(**more, cloning=0.0), toy_spec(**BOX), NET, 4)
    one, two = same_updates(plain, other, plain, BOX)
    assert one.state.keys() == two.state.keys()
    assert all(torch.equal(tensor, two.state[name]) for name, tensor in one.state.items())


def same_updates(one, two, algorithm, toy):
    """Whether two learners make the same updates of the same batches: what they have in common is bit-equal."""
    one, two = one.learn(3), two.learn(3)
    for step, batch in enumerate(batches(algorithm, toy_env(4, **toy), 5)):
        progress = Progress(learner_steps=step)
        for learn in (one, two):
            update(learn, minibatch_of(learn, batch, progress, step), progress)
    return one, two


def test_marwil_beta_0_is_bc():
    for toy in ({"masked": True}, BOX):
        clone = algorithms.make(bc.Config(**FAST), toy_spec(**toy), NET, 4)
        other = algorithms.make(marwil.Config(**FAST, beta=0.0), toy_spec(**toy), NET, 4)
        one, two = same_updates(clone, other, other, toy)
        assert torch.equal(one.state["params"], two.state["params"][two.span("actor")])
        assert torch.equal(one.state["adam.v"], two.state["actor.adam.v"])


def test_cql_alpha_0_is_its_base():
    discrete = {"lr": 1e-2, "loss": "squared"}
    plain = algorithms.make(dqn.Config(**discrete), toy_spec(), NET, 4)
    other = algorithms.make(cql.Config(alpha=0.0, dqn=cql.CQLDiscreteOptions(**discrete)), toy_spec(), NET, 4)
    box = {"actor_lr": 1e-2, "critic_lr": 1e-2, "alpha_lr": 1e-2}
    soft = algorithms.make(sac.Config(**box), toy_spec(**BOX), NET, 4)
    same = algorithms.make(cql.Config(alpha=0.0, entropy_backup=True, sac=cql.CQLBoxOptions(**box)), toy_spec(**BOX), NET, 4)
    for one, two in (same_updates(plain, other, plain, {}), same_updates(soft, same, soft, BOX)):
        assert one.state.keys() == two.state.keys()
        assert all(torch.equal(tensor, two.state[name]) for name, tensor in one.state.items())


def test_penalty_of_cql():
    """By the formula, one sample at a time; the next state's actions are judged at this state."""
    algorithm, toy = made("cql, box")
    learn = algorithm.learn(3)
    minibatch = minibatch_of(learn, next(iter(batches(algorithm, toy_env(4, **toy), 1))))
    net, items, see = learn.model.net, minibatch.items, learn.model.see
    seen, following, K = see(items["observation"]), see(items["next_observation"]), 3
    size = net.actor.out.out_features // 2
    noise = minibatch.noise[:, 2 * size :].reshape(len(items["reward"]), 3, K, size)
    with torch.no_grad():
        terms = []
        for k in range(K):
            wild = 2 * torch.special.ndtr(noise[:, 0, k]) - 1
            terms.append(net.critic.of_unit(seen, wild) - size * np.log(0.5))
            for source, at in ((1, seen), (2, following)):
                action, log_prob = net.actor.sample(at, noise[:, source, k])
                terms.append(net.critic.of_unit(seen, action) - log_prob)
        expected = torch.logsumexp(torch.stack(terms), 0) - net.critic(seen, items["action"])
    _, metrics = learn.gradients(minibatch, "critic")
    assert metrics["conservative_gap"] == pytest.approx(float(expected.mean()), rel=1e-4)


def test_gap_s_share_of_cql_s_gradient():
    """With discrete actions it is alpha times the gradient of the weighted mean gap; with Box actions it makes the gap smaller."""
    learns = [algorithms.make(cql.Config(alpha=alpha), toy_spec(), NET, 4).learn(3) for alpha in (0.0, 2.5)]
    batch = next(iter(batches(made("cql")[0], toy_env(4), 1)))
    base, whole = (learn.gradients(minibatch_of(learn, batch), "all")[0].copy() for learn in learns)
    model, drawn = learns[1].model, minibatch_of(learns[1], batch)
    model.grad.zero_()
    gap = action_gap(model.values(drawn.items["observation"]), drawn.items["action"])
    ((drawn.weight * gap).sum() * drawn.scale).backward()
    np.testing.assert_allclose(whole - base, 2.5 * model.grad.numpy(), rtol=1e-4, atol=1e-6)

    learns = [algorithms.make(replace(CASES["cql, box"][0], alpha=alpha), toy_spec(**BOX), NET, 4).learn(3) for alpha in (0.0, 2.5)]
    minibatch = minibatch_of(learns[0], next(iter(batches(made("cql, box")[0], toy_env(4, **BOX), 1))))
    base, whole = (learn.gradients(minibatch, "critic")[0].copy() for learn in learns)
    before = learns[1].gradients(minibatch, "critic")[1]["conservative_gap"]
    with torch.no_grad():
        learns[1].state["params"][learns[1].span("critic")] -= 0.01 * torch.from_numpy(whole - base)
    assert float(learns[1].gradients(minibatch, "critic")[1]["conservative_gap"]) < float(before) - 0.002


def test_cql_s_multiplier_follows_the_gap():
    for lagrange, rises in ((-50.0, True), (500.0, False)):
        config = replace(CASES["cql, lagrange"][0], lagrange=lagrange)
        learn = algorithms.make(config, toy_spec(**BOX), NET, 4).learn(0)
        batch = next(iter(batches(algorithms.make(config, toy_spec(**BOX), NET, 4), toy_env(4, **BOX), 1)))
        update(learn, minibatch_of(learn, batch), Progress())
        assert (float(learn.model.net.multiplier().detach()) > 1) == rises


def test_weight_of_td3_bc():
    """TD3+BC weighs values by the mean size of what its actions are worth."""
    algorithm, toy = made("td3_bc")
    learn = algorithm.learn(3)
    batch = next(iter(batches(algorithm, toy_env(4, **toy), 1)))
    minibatch = minibatch_of(learn, batch)
    for phase in ("critic", "scale"):
        learn.apply(learn.gradients(minibatch, phase)[0], phase)
    net, seen = learn.model.net, learn.model.see(minibatch.items["observation"])
    with torch.no_grad():
        unit = net.actor.unit(seen)
        q = net.critic.of_unit(seen, unit)[0]
    assert float(net.scale()) == pytest.approx(float(q.abs().mean()), rel=1e-5)
    recorded = net.critic._range.unit(minibatch.items["action"].flatten(1))
    expected = -2.5 / q.abs().mean() * q.mean() + (unit - recorded).square().mean()
    assert float(learn.gradients(minibatch, "actor")[1]["actor_loss"]) == pytest.approx(float(expected), rel=1e-4)


# ---------------------------------------------------------------------------------------------- the fork
START, MIDDLE = (1.0, 0.0), (0.0, 1.0)
FORK = [(START, 0, 0.3, None, 50), (START, 1, 0.0, MIDDLE, 50), (MIDDLE, 1, 1.0, None, 10), (MIDDLE, 0, 0.0, None, 90)]


def fork_batch():
    """Start: left ends with 0.3, right goes on. Middle: up ends with 1 (a tenth of the data), down with 0."""
    rows = [row[:4] for row in FORK for _ in range(row[4])]
    items = {"observation": np.array([row[0] for row in rows], np.float32), "action": np.array([row[1] for row in rows]),
             "reward": np.array([row[2] for row in rows], np.float32),
             "discount": np.array([0.99 * (row[3] is not None) for row in rows], np.float32),
             "next_observation": np.array([row[3] or (0.0, 0.0) for row in rows], np.float32),
             "weights_version": np.zeros(len(rows), np.int32)}
    return batch_of(items, np.full(len(rows), 1 / len(rows)), len(rows))


@pytest.mark.parametrize(("expectile", "middle", "right"), [(0.7, 0.2059, 0.2038), (0.9, 0.5, 0.495)])
def test_expectiles_at_the_fork(expectile, middle, right):
    """specs/value.md 13.6. A linear net of one-hot states is a table."""
    spec = EnvSpec("fork", gym.spaces.Box(0, 1, (2,), np.float32), gym.spaces.Discrete(2), 2, 1, 1, False, "none", "", 0)
    config = iql.Config(expectile=expectile, beta=30.0, actor_lr=0.02, critic_lr=0.02, value_lr=0.02, target_tau=0.1)
    learn = (algorithm := algorithms.make(config, spec, NetConfig(hidden=()), 1)).learn(0)
    batch, progress = fork_batch(), Progress()
    for _ in range(500):
        update(learn, minibatch_of(learn, batch), progress)
    net, states = learn.model.net, torch.tensor([START, MIDDLE])
    with torch.no_grad():
        assert float(net.value(states)[0, 1, 0]) == pytest.approx(middle, abs=0.005)
        np.testing.assert_allclose(net.critic(states)[0, 0], [0.3, right], atol=0.005)
    policy = algorithm.policy()
    policy.load(learn.published(progress))
    action = policy.act(StepView(states.numpy(), np.ones(2, bool)), {}, None, torch.Generator())[0]
    assert action.tolist() == [int(right > 0.3), 1]


# ---------------------------------------------------------------------------------------------- acting, refusing
def test_actors_sample_around_the_mean():
    """Actors sample around the mean within the bounds and evaluations take it."""
    algorithm, _ = made("iql, box")
    policy, seats = algorithm.policy(), 4_000
    policy.load(algorithm.learn(0).published(Progress()))
    space = algorithm.plan.spec.observation_space
    rows = {name: np.zeros((seats, *part.shape), part.dtype) for name, part in space.spaces.items()}
    view = StepView(rows, np.zeros(seats, bool))
    greedy = policy.act(view, {}, None, torch.Generator())[0]
    drawn = policy.act(view, {}, algorithm.explore(0, 1, seats, Progress()), torch.Generator().manual_seed(0))[0]
    box = algorithm.space
    assert (greedy == greedy[0]).all() and ((drawn >= box.low) & (drawn <= box.high)).all() and len(np.unique(drawn)) > 100


def test_returns_of_marwil():
    """MARWIL's returns are those of the whole episode."""
    algorithm = algorithms.make(marwil.Config(gamma=0.5), toy_spec(), NET, 1)
    actor = Actor(algorithm, toy_env(1), 5)
    actor.play(60)
    items = actor.items()[0]
    ends = np.flatnonzero(items["discount"] == 0)
    assert len(ends) > 2  # items of an episode end with it, so that each reward is a part of the next return
    for first, last in zip(ends[:-1] + 1, ends[1:], strict=True):
        rows = items["reward"][first : last + 1]
        np.testing.assert_allclose(rows[:-1] - 0.5 * rows[1:], (rows[:-1] - 0.5 * rows[1:]).round(4), atol=1e-4)


def test_scaled_and_shifted_rewards():
    """Rewards are scaled and shifted before they are learned from."""
    plain, scaled = (algorithms.make(replace(CASES["iql"][0], **more), toy_spec(masked=True), NET, 4)
                     for more in ({}, {"reward_scale": 2.0, "reward_shift": -1.0}))
    found = [Actor(one, toy_env(4, masked=True), 5) for one in (plain, scaled)]
    for actor in found:
        actor.play(40)
    rewards = [actor.items()[0]["reward"] for actor in found]
    np.testing.assert_allclose(rewards[1], 2 * rewards[0] - 1, rtol=1e-6)


@pytest.mark.parametrize(("config", "toy", "words"), [
    (bc.Config(loss="squared"), {}, "its actions are discrete"),
    (td3_bc.Config(), {}, "its actions are continuous"),
    (iql.Config(expectile=1.0), BOX, "below 1"),
    (cql.Config(lagrange=5.0), {}, "only with Box actions"),
    (cql.Config(dqn=cql.CQLDiscreteOptions(atoms=51)), {}, "plain values")])
def test_what_makes_no_sense_is_refused(config, toy, words):
    with pytest.raises(ConfigError, match=words):
        algorithms.make(config, toy_spec(**toy), NET, 4)
