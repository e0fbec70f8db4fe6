"""Numbers that must agree: actor and learner, A2C and PPO, two learners and one, hand-worked bootstraps."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal import algorithms
from shoal.acting import Progress, StepView
from shoal.algorithms import a2c, ppo, vtrace
from shoal.envs import EnvSpec
from shoal.nets import NetConfig
from tests.algorithms.loop import Actor, join, update
from tests.algorithms.toys import ReadOff, toy_env, toy_spec

LSTM = NetConfig(recurrent="lstm", lstm_size=16)
CASES = {
    "plain": ({}, NetConfig(), {}),
    "normalised": ({}, NetConfig(), {"normalise_observations": True, "normalise_returns": True}),
    "masked": ({"masked": True}, NetConfig(), {}),
    "masked multi": ({"masked": True, "actions": "multi"}, NetConfig(), {}),
    "lstm": ({}, LSTM, {"normalise_observations": True}),
    "lstm previous": ({"actions": "multi"}, replace(LSTM, prev_action_reward=True), {}),
    "previous box": ({"actions": "box"}, NetConfig(prev_action_reward=True), {}),
    "multi": ({"actions": "multi"}, NetConfig(), {}),
    "box": ({"actions": "box"}, NetConfig(separate_value=True), {"normalise_returns": True}),
    "squashed": ({"actions": "box"}, NetConfig(continuous="tanh_gaussian"), {}),
    "squashed lstm": ({"actions": "box"}, replace(LSTM, prev_action_reward=True, continuous="tanh_gaussian"), {}),
    "dict": ({"observations": "dict", "actions": "box"}, NetConfig(), {"normalise_observations": True}),
}


def setup(config, case, seats=4, actors=2, seed=3):
    kwargs, net, more = CASES[case]
    algorithm = algorithms.make(replace(config, **more), toy_spec(**kwargs), net, seats)
    people = [Actor(algorithm, toy_env(seats, **kwargs), seed + i) for i in range(actors)]
    return algorithm, algorithm.learn(seed), people


def collect(algorithm, learn, people):
    for actor in people:
        actor.policy.load(learn.published(Progress()))
    return [actor.unroll() for actor in people]


def close(gradient, expected, tolerance=3e-6):
    """Equal but for the rounding of float32, measured against the length of the gradient."""
    return np.linalg.norm(gradient - expected) < tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "config", [ppo.Config(unroll=12, lr=3e-3), vtrace.Config(unroll=12, lr=3e-3)], ids=["ppo", "vtrace"]
)
def test_the_learner_sees_what_the_actor_did(config, case):
    algorithm, learn, people = setup(config, case)
    for _ in range(4):  # weights and statistics that have moved
        update(learn, join(algorithm.record, collect(algorithm, learn, people)))
    batch = join(algorithm.record, collect(algorithm, learn, people))
    first = next(learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(1)))
    with torch.no_grad():
        log_prob, _ = learn.model.judge(learn.model.unroll(first.batch), first.batch)
    assert (log_prob - first.batch.log_prob).abs().max() < 1e-5
    metrics = learn.gradients(first, "all")[1]
    assert metrics["mean_rho"] == pytest.approx(1, abs=1e-6)
    assert metrics["clip_fraction"] == 0 and abs(metrics["approx_kl"]) < 1e-6
    if "normalise_observations" in CASES[case][2]:  # the statistics are not trivial
        assert abs(learn.state["observations.used_mean"] - 3).max() < 2
        assert abs(1 / learn.state["observations.used_scale"] - 5).max() < 2


@pytest.mark.parametrize("config", [ppo.Config(unroll=12), vtrace.Config(unroll=12)], ids=["ppo", "vtrace"])
def test_saturated_action(config):
    """The action is 1 to all digits of float32: only the latent action tells how far beyond it the policy was."""
    algorithm, learn, people = setup(config, "squashed")
    with torch.no_grad():
        learn.model.net.out.bias[:2] = 12.0
    batch = join(algorithm.record, collect(algorithm, learn, people))
    assert (np.abs(batch["action"]) == 1.0).mean() > 0.4 and batch["extras"]["latent"].max() > 10
    minibatch = next(learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(0)))
    metrics = learn.gradients(minibatch, "all")[1]
    assert metrics["mean_rho"] == pytest.approx(1, abs=1e-6) and abs(metrics["approx_kl"]) < 1e-6


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("case", ["plain", "lstm", "box", "masked"])
def test_a2c_is_ppo_with_one_epoch(case, normalise):
    """A2C is PPO with one epoch and one minibatch."""
    same = {"unroll": 12, "lambda_": 0.9, "lr": 1e-2, "normalise_advantage": normalise}
    algorithm, one, people = setup(a2c.Config(**same), case)
    two = algorithms.make(
        ppo.Config(epochs=1, minibatches=1, **same, **CASES[case][2]), algorithm.plan.spec, CASES[case][1], 4
    )
    two = two.learn(3)
    for _ in range(3):
        batch = join(algorithm.record, collect(algorithm, one, people))
        gradients = []
        for learn in (one, two):
            minibatches = learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(0))
            gradients += [learn.gradients(minibatch, "all")[0].copy() for minibatch in minibatches]
        assert len(gradients) == 2 and close(gradients[1], gradients[0])
        for learn in (one, two):  # the same step, so that rounding does not add up
            assert learn.apply(gradients[0].copy(), "all")
            learn.absorb(learn.moments(batch))


@pytest.mark.parametrize("case", ["plain", "normalised", "lstm"])
@pytest.mark.parametrize(
    "config",
    [
        vtrace.Config(unroll=12, lr=1e-2),
        vtrace.Config(unroll=12, lr=1e-2, reduction="sum", grad_norm=40.0),
        ppo.Config(unroll=12, lr=1e-2, minibatches=1, epochs=2),
        a2c.Config(unroll=12, lr=1e-2, normalise_advantage=True),
    ],
    ids=["vtrace", "vtrace sum", "ppo", "a2c"],
)
def test_two_learners_make_the_update_of_one(config, case):
    """Compared are gradients: clipping and Adam would hide a wrong scale and magnify rounding."""
    algorithm, one, people = setup(config, case)
    left, right = algorithm.learn(3), algorithm.learn(3)
    rng = np.random.default_rng(0)
    for n in range(3):
        slots = collect(algorithm, one, people)
        if n == 1:
            slots[0]["valid"][3:, 1] = False  # unequal halves
        whole, halves = join(algorithm.record, slots), [join(algorithm.record, [slot]) for slot in slots]
        sums, moments = left.sums(halves[0]) + right.sums(halves[1]), left.moments(halves[0]) + right.moments(halves[1])
        whole_sums, whole_moments = one.sums(whole), one.moments(whole)
        np.testing.assert_allclose(moments, whole_moments, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(sums[1:], whole_sums[1:], rtol=1e-5, atol=1e-4)
        runs = [(one, whole, whole_sums), (left, halves[0], sums), (right, halves[1], sums)]
        for parts in zip(*(learn.minibatches(data, s, Progress(), rng) for learn, data, s in runs), strict=True):
            joined, a, b = (learn.gradients(part, "all")[0] for (learn, _, _), part in zip(runs, parts, strict=True))
            mean = (a + b) / 2
            assert close(mean, joined)
            for learn in (one, left, right):
                assert learn.apply(mean.copy(), "all")
        for learn in (one, left, right):
            learn.absorb(moments)
        for name, value in one.state.items():
            assert torch.equal(left.state[name], value) and torch.equal(right.state[name], value), name


def test_sum_and_mean():
    """Twice the data doubles a summed gradient and leaves a mean one alone."""
    gradients = {}
    for reduction in ("mean", "sum"):
        config = vtrace.Config(unroll=12, reduction=reduction, grad_norm=40.0)
        algorithm, learn, people = setup(config, "plain")
        slots = collect(algorithm, learn, people)
        for copies in (1, 2):
            batch = join(algorithm.record, slots * copies)
            minibatch = next(learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(0)))
            gradients[reduction, copies] = learn.gradients(minibatch, "all")[0].copy()
    assert close(gradients["mean", 2], gradients["mean", 1])
    assert close(gradients["sum", 2], 2 * gradients["sum", 1])
    assert close(gradients["sum", 1], 12 * 8 * gradients["mean", 1])


class Scripted:
    """policy.md section 14: V = [1, 2, .5], bootstrap 3, r = [1, 0, 2]; step 1 ends, with 4 as the last value."""

    num_seats = 1

    def __init__(self, truncated):
        self.truncated, self.values = truncated, [1, 2, 0.5, 3]

    def observe(self):
        return np.array([[self.values[self.t]]], np.float32)

    def make(self, reward=0.0, last=False):
        from shoal.envs import Step

        flag, rows = np.array([last]), np.flatnonzero([last and self.truncated])
        discount = np.array([0.0 if last and not self.truncated else 1.0], np.float32)
        return Step(
            self.observe(),
            np.array([reward], np.float32),
            discount,
            np.array([self.t == 0 or last]),
            flag,
            flag & self.truncated,
            np.ones(1, bool),
            rows,
            np.array([[4.0]], np.float32) if len(rows) else None,
        )

    def reset(self, seed=None):
        self.t = 0
        return self.make()

    def step(self, action):
        self.t += 1
        return self.make([1, 0, 2][self.t - 1], last=self.t == 2)


def scripted(config):
    import gymnasium as gym

    box = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    spec = EnvSpec("scripted", box, gym.spaces.Discrete(2), None, 1, 1, False, "none", "", 2)
    return algorithms.make(config, spec, NetConfig(hidden=(4,)), 1)


@pytest.mark.parametrize("truncated, expected", [(True, [3.168, 1.6, 4.2]), (False, [0.09, -2, 4.2])])
def test_bootstrap_of_a_truncated_episode(truncated, expected):
    """A truncated episode bootstraps from its true end."""
    algorithm = scripted(ppo.Config(unroll=3, gamma=0.9, lambda_=0.95))
    learn, actor = algorithm.learn(0), Actor(algorithm, Scripted(truncated), 0)
    learn.model.net = ReadOff(learn.model.net.head)
    advantages = learn.objective.advantages(learn.batch(join(algorithm.record, [actor.unroll()])))
    np.testing.assert_allclose(advantages.advantage[:, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(advantages.target[:, 0], np.add(expected, [1, 2, 0.5]), rtol=1e-6)


def test_vtrace_bootstraps_there_too():
    from shoal.ops import returns

    algorithm = scripted(vtrace.Config(unroll=3, gamma=0.9))
    learn, actor = algorithm.learn(0), Actor(algorithm, Scripted(True), 0)
    learn.model.net = ReadOff(learn.model.net.head)
    batch = learn.batch(join(algorithm.record, [actor.unroll()]))
    output = learn.model.unroll(batch)
    v_t = learn.model.next_values(batch, output)
    np.testing.assert_allclose(v_t[:, 0], [2, 4, 3])
    target = returns.vtrace(
        torch.zeros(3, 1), batch.reward, 0.9 * batch.discount, output.value[:-1], v_t, keep_t=batch.keep
    )
    np.testing.assert_allclose(target.vs[:, 0], [1 + 0.9 * 3.6, 3.6, 4.7], rtol=1e-6)


def test_pg_rho_bar():
    """Two steps that the learner would take three times as often: the golden numbers of V-trace with another pg_rho_bar."""
    algorithm = scripted(vtrace.Config(unroll=3, gamma=0.9, rho_bar=2.0, c_bar=1.0))
    actor = Actor(algorithm, Scripted(True), 0)
    batch = join(algorithm.record, [actor.unroll()])
    batch["extras"]["log_prob"][:] = np.log(0.5 / 3)  # pi is uniform over two actions: the ratio is 3
    losses = {}
    for bar in (1.0, 2.0, 5.0):
        learn = scripted(vtrace.Config(unroll=3, gamma=0.9, rho_bar=2.0, c_bar=1.0, pg_rho_bar=bar)).learn(0)
        learn.model.net = ReadOff(learn.model.net.head)
        (minibatch,) = learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(0))
        losses[bar] = float(learn.loss(minibatch, "all").metrics["policy_loss"].detach())
    # V is 1, 2, 0.5, then 3, and 4 at the true end of step 1. There v_s - V = 2 (0.9 x 4 - 2) = 3.2, and no trace crosses it.
    advantage = [1 + 0.9 * (2 + 3.2) - 1, 0 + 0.9 * 4 - 2, 2 + 0.9 * 3 - 0.5]
    want = np.log(2) * np.mean(advantage)
    assert losses == pytest.approx({1.0: want, 2.0: 2 * want, 5.0: 3 * want}, rel=1e-5)


def test_memory_at_the_true_end():
    """The true end is seen with the memory of its episode."""
    algorithm, learn, (actor,) = setup(ppo.Config(unroll=12), "lstm previous", actors=1)
    slot = collect(algorithm, learn, [actor])[0]
    batch = learn.batch(slot)
    output = learn.model.unroll(batch)
    v_t = learn.model.next_values(batch, output)
    assert len(batch.finals.t) > 2
    net, state = learn.model.net, {k: torch.from_numpy(v) for k, v in slot["state"].items()}
    for t in range(12):
        step = net.step(batch.observation[t], batch.first[t], state, batch.prev_action[t], batch.prev_reward[t])
        state = step.state
        for k in (batch.finals.t == t).nonzero()[:, 0]:
            b = batch.finals.b[k : k + 1]
            alone = net.step(
                batch.finals.observation[k : k + 1],
                None,
                {name: x[b] for name, x in state.items()},
                batch.action[t][b],
                batch.reward[t][b],
            )
            torch.testing.assert_close(alone.value[0], v_t[t, b[0]], rtol=0, atol=1e-5)


def test_the_behaviour_is_the_mixture():
    _, _, (actor, _) = setup(vtrace.Config(unroll=4, behaviour_mix=0.3), "masked")
    assert (actor.explore == np.float32(0.3)).all()
    step = actor.step
    action, _, extras = actor.policy.act(actor.recorder.view(step), {}, actor.explore, actor.rng)
    with torch.no_grad():
        logits = actor.policy.model.net.step(torch.from_numpy(step.observation), None, {}).params.double().numpy()
    p = np.where(step.action_mask, np.exp(logits), 0)
    p = 0.7 * p / p.sum(1, keepdims=True) + 0.3 * step.action_mask / step.action_mask.sum(1, keepdims=True)
    np.testing.assert_allclose(extras["log_prob"], np.log(p[np.arange(4), action]), atol=1e-5)
    assert step.action_mask[np.arange(4), action].all()
    greedy = [actor.policy.act(actor.recorder.view(step), {}, None, actor.rng)[0] for _ in range(3)]
    assert (greedy[0] == greedy[1]).all() and (greedy[0] == np.where(step.action_mask, logits, -np.inf).argmax(1)).all()


@pytest.mark.parametrize("name", ["a2c", "ppo", "vtrace"])
def test_bad_numbers_change_nothing(name):
    algorithm, learn, people = setup(replace(algorithms.named(name).config_class(), unroll=12), "plain")
    batch = join(algorithm.record, collect(algorithm, learn, people))
    batch["reward"][3, 2] = np.nan
    before = {key: value.clone() for key, value in learn.state.items()}
    sums = learn.sums(batch)
    for minibatch in learn.minibatches(batch, sums, Progress(), np.random.default_rng(0)):
        gradient, _ = learn.gradients(minibatch, "all")
        assert np.isnan(gradient).all() and not learn.apply(gradient, "all")
    assert all(torch.equal(before[key], value) for key, value in learn.state.items())


@pytest.mark.parametrize("optimiser", ["adam", "rmsprop", "sgd"])
def test_everything_stateful_is_in_the_state(optimiser):
    config = ppo.Config(unroll=12, optimiser=optimiser, normalise_observations=True, normalise_returns=True)
    algorithm, one, people = setup(config, "plain")
    batches = [join(algorithm.record, collect(algorithm, one, people)) for _ in range(3)]
    update(one, batches[0])
    two = algorithm.learn(99)
    for name, value in one.state.items():
        two.state[name].copy_(value)
    for batch in batches[1:]:
        update(one, batch)
        update(two, batch)
    assert all(torch.equal(one.state[name], two.state[name]) for name in one.state)
    policies = algorithm.policy(), algorithm.policy()
    for policy, learn in zip(policies, (one, two), strict=True):
        layout = algorithm.published_layout()
        wire = layout.empty()
        layout.copy(wire, learn.published(Progress(5, 6, 0.5)))
        np.testing.assert_array_equal(wire["progress"], [5, 6, 0.5])
        policy.load(wire)
    view = StepView(batches[0]["observation"][0], batches[0]["first"][0])
    acts = [policy.act(view, {}, np.zeros(8, np.float32), torch.Generator().manual_seed(1)) for policy in policies]
    np.testing.assert_array_equal(acts[0][2]["log_prob"], acts[1][2]["log_prob"])


def test_memory_order_of_observations():
    """An observation reaches a policy straight from its environment, in any order, or through a slot, in C order."""
    algorithm, _, people = setup(ppo.Config(), "lstm")
    policy, numbers = people[0].policy, np.random.default_rng(0)
    first, state = np.zeros(4, bool), policy.initial_state(4)
    shape = algorithm.record.layout.fields["observation"].shape[2:]
    for _ in range(20):
        observation = numbers.standard_normal((4, *shape), np.float32)
        answers = [
            policy.act(StepView(order(observation), first), state, np.zeros(4, np.float32), torch.Generator().manual_seed(1))
            for order in (np.ascontiguousarray, np.asfortranarray)
        ]
        np.testing.assert_array_equal(answers[0][2]["log_prob"], answers[1][2]["log_prob"])
        np.testing.assert_array_equal(answers[0][1]["h"], answers[1][1]["h"])


def test_same_seed_gives_the_same_weights():
    algorithm, one, _ = setup(ppo.Config(), "plain")
    again = pickle.loads(pickle.dumps(algorithm)).learn(3)
    assert torch.equal(one.state["params"], again.state["params"])
    assert not torch.equal(one.state["params"], algorithm.learn(4).state["params"])


def test_schedules_follow_the_progress():
    config = ppo.Config(unroll=12, lr=1.0, lr_final=0.0, clip=0.2, clip_final=0.1, entropy=0.1, entropy_final=0.0)
    algorithm, learn, people = setup(config, "plain")
    batch = join(algorithm.record, collect(algorithm, learn, people))
    for fraction, lr, clip, entropy in ((0, 1, 0.2, 0.1), (0.5, 0.5, 0.15, 0.05), (2, 0, 0.1, 0)):
        minibatch = next(
            learn.minibatches(batch, learn.sums(batch), Progress(0, 0, fraction), np.random.default_rng(0))
        )
        assert learn.parameters.optimiser("all").lr == pytest.approx(lr)
        assert (minibatch.clip, minibatch.entropy) == pytest.approx((clip, entropy))
