"""dqn and r2d2 in tensors, as they learn and act on a GPU: the same numbers as in arrays. (tests/gpu has the graphs.)"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from shoal import envs
from shoal.acting import Progress, StepView
from shoal.algorithms import dqn, r2d2
from shoal.device.batched_inference import BatchedInference
from shoal.device.placement import Hardware
from shoal.nets import NetConfig
from shoal.nets.cores import LSTMCore
from shoal.nets.q_network import HeadConfig, build_q
from tests.algorithms.replay_loop import batches
from tests.algorithms.toys import toy_env, toy_spec

SMALL = NetConfig(hidden=(16,))
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=8, prev_action_reward=True)
WINDOW = {"burn_in": 2, "length": 4, "stride": 2}
ANNEALED = {"lr": 1e-2, "lr_final": 1e-4, "importance": 0.4, "importance_final": 1.0}
CASES = {
    "dqn": (dqn.DQN, dqn.Config(**ANNEALED, target_period_updates=3), SMALL, {}),
    "polyak": (dqn.DQN, dqn.Config(**ANNEALED, target_tau=0.1, optimiser="rmsprop_centred", grad_norm=1.0), SMALL,
               {"masked": True}),
    "adagrad": (dqn.DQN, dqn.Config(**ANNEALED, target_period_updates=4, optimiser="adagrad", grad_norm=0.0), SMALL,
                {"observations": "dict"}),
    "rainbow": (dqn.DQN, dqn.Config(**ANNEALED, target_period_updates=3, dueling=True, n_step=3, atoms=11, noisy_sigma=0.5), SMALL,
                {"masked": True}),
    "r2d2": (r2d2.R2D2, r2d2.Config(**ANNEALED, **WINDOW, target_period_updates=3), LSTM, {"masked": True}),
    "diagnosed": (r2d2.R2D2, r2d2.Config(**ANNEALED, **WINDOW, diagnose=True, target_period_updates=0), LSTM, {}),
}


@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("case", CASES)
def test_learner_in_tensors(case, captures):
    """A learner in tensors makes the same updates."""
    make, config, net, toy = CASES[case]
    algorithm = make(config, toy_spec(**toy), net, 4)
    here, there = algorithm.learn(3), algorithm.learn(3)
    there.to(Hardware())
    if captures:
        there.capture()
    assert (not there._graphs) == (not captures or case == "diagnosed")
    targets = []
    for number, batch in enumerate(batches(algorithm, toy_env(4, **toy), 11)):
        seen = []
        for learn in (here, there):
            sums, progress = learn.sums(batch), Progress(learner_steps=number, fraction=number / 10)
            (minibatch,) = learn.minibatches(batch, sums, progress, np.random.default_rng(0))
            gradient, metrics = learn.gradients(minibatch, "all")
            seen.append((torch.as_tensor(gradient).clone(), dict(metrics.items()), torch.as_tensor(learn.priorities).clone()))
            assert bool(learn.apply(gradient, "all")) == (number != 5)
        (gradient, metrics, priorities), (other, others, heard) = seen
        np.testing.assert_allclose(other, gradient, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(heard, priorities, rtol=1e-4, atol=1e-6)
        assert others == pytest.approx(metrics, rel=1e-3, abs=1e-5, nan_ok=True)
        assert bool(torch.isnan(gradient).all()) == (number == 5)
        for name, tensor in here.state.items():
            np.testing.assert_allclose(there.state[name], tensor, rtol=1e-3, atol=1e-5, err_msg=name)
        targets.append(there.state["target"].clone())
    moved = [not torch.equal(a, b) for a, b in pairwise(targets)]
    if config.target_tau:
        assert moved == [number != 5 for number in range(1, 11)]
    else:  # the one that was left out does not count
        period = config.target_period_updates
        assert moved == [bool(period) and number != 5 and (number + (number < 5)) % period == 0 for number in range(1, 11)]
    assert int(there.state["updates"]) == 10


@pytest.mark.parametrize("captures", [False, True], ids=["eager", "captured"])
def test_updates_at_once_are_those_one_by_one(captures):
    algorithm = dqn.DQN(dqn.Config(**ANNEALED, target_period_updates=3), toy_spec(), SMALL, 4)
    one, four = algorithm.learn(3), algorithm.learn(3)
    for learn in (one, four):
        learn.to(Hardware())
        if captures:
            learn.capture()
    drawn = list(batches(algorithm, toy_env(4), 8))
    for start in (0, 4):
        judged, waiting, verdicts = [], [], []
        for number in range(start, start + 4):
            batch, progress = drawn[number], Progress(learner_steps=number)
            mine, its = (next(learn.minibatches(batch, learn.sums(batch), progress, np.random.default_rng(0)))
                         for learn in (one, four))
            metrics, finite = one.update((mine,), (one.phases,))
            verdicts += finite.tolist()
            judged.append(one.priorities.clone())
            waiting.append(its)
        last, finite = four.update(tuple(waiting), (four.phases,) * 4)
        assert finite.tolist() == verdicts and dict(last.items()) == dict(metrics.items())
        torch.testing.assert_close(four.priorities, torch.cat(judged), rtol=0, atol=0, equal_nan=True)
        for name, tensor in one.state.items():
            torch.testing.assert_close(four.state[name], tensor, rtol=0, atol=0, msg=name)


def test_two_snapshots_under_way():
    """Two snapshots may be under way while a learner goes on."""
    algorithm = dqn.DQN(dqn.Config(), toy_spec(), SMALL, 4)
    learn, kept = algorithm.learn(3), []
    learn.to(Hardware())
    learn.capture()
    for batch in batches(algorithm, toy_env(4), 5):
        (minibatch,) = learn.minibatches(batch, learn.sums(batch), Progress(), np.random.default_rng(0))
        assert learn.apply(learn.gradients(minibatch, "all")[0], "all")
        kept.append((learn.snapshot(Progress()), learn.published(Progress())["params"].copy()))
        for snapshot, params in kept[-2:]:
            np.testing.assert_array_equal(snapshot()["params"], params)
    assert not np.array_equal(kept[0][1], kept[1][1])


@pytest.mark.parametrize("net", [SMALL, LSTM], ids=["mlp", "lstm"])
def test_a_servers_answers_are_the_policys(net):
    algorithm = (r2d2.R2D2(r2d2.Config(**WINDOW), toy_spec(masked=True), net, 4) if net is LSTM
                 else dqn.DQN(dqn.Config(), toy_spec(masked=True), net, 4))
    policy, other = algorithm.policy(), algorithm.policy()
    inference = BatchedInference(policy, Hardware(), torch.Generator().manual_seed(0))
    env, viewer, state, action = toy_env(4, masked=True), algorithm.record.viewer(4), policy.initial_state(4), None
    now = env.reset(seed=0)
    for _ in range(12):
        view = viewer.of(now, action)
        action, after, extras = inference.act([view], [state], np.zeros(4, np.float32))
        greedy, expected, wanted = other.act(view, state, None, torch.Generator())
        np.testing.assert_allclose(extras["q"], wanted["q"], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(action, greedy)
        for name, x in expected.items():
            np.testing.assert_allclose(after[name], x, rtol=1e-5, atol=1e-6)
        state, now = after, env.step(action)


def test_server_explores_as_told():
    """A server explores as often as it is told and legally."""
    algorithm = dqn.DQN(dqn.Config(), toy_spec(masked=True), SMALL, 4)
    policy, seats = algorithm.policy(), 20_000
    inference = BatchedInference(policy, Hardware(), torch.Generator().manual_seed(0))
    view = StepView(np.zeros((seats, 3), np.float32), np.zeros(seats, bool), np.tile([True, True, True, False], (seats, 1)))
    greedy, _, _ = policy.act(view, {}, None, torch.Generator())
    explore = np.where(np.arange(seats) < seats // 2, 0.3, 0.0).astype(np.float32)
    action, _, _ = inference.act([view], [{}], explore)
    np.testing.assert_array_equal(action[seats // 2 :], greedy[seats // 2 :])
    share, count = np.bincount(action[: seats // 2], minlength=4) / (seats // 2), seats // 2
    want = np.array([0.1, 0.1, 0.1, 0.0])
    want[greedy[0]] = 0.8
    assert (np.abs(share - want) <= 4 * np.sqrt(want * (1 - want) / count)).all()


def test_bfloat16():
    """What autocast would round at every step of a sequence, or where two actions differ by little."""
    core, x = LSTMCore(6, 8), torch.randn(20, 3, 6, generator=torch.Generator().manual_seed(0))
    state, first = core.initial_state(3), torch.zeros(20, 3, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        out, after, _ = core(x, state, first)
        stepped = state
        for t in range(20):
            h, stepped = core.step(x[t], stepped, first[t])
            torch.testing.assert_close(h, out[t], rtol=1e-4, atol=1e-5)
    assert out.dtype == after["c"].dtype == stepped["c"].dtype == torch.float32
    out.sum().backward()
    spec = envs.describe("shoal/PixelCatch-v0")
    net = build_q(spec.observation_space, spec.action_space, NetConfig(), HeadConfig(dueling=True), 0)
    seen = torch.from_numpy(envs.make("shoal/PixelCatch-v0", 16).reset(seed=0).observation)
    exact = net(seen)
    with torch.autocast("cpu", torch.bfloat16):
        rough = net(seen)
    assert rough.dtype == torch.float32
    assert (rough != rough.bfloat16()).any()  # finer than bfloat16 can be
    torch.testing.assert_close(rough, exact, rtol=0.1, atol=0.05)
