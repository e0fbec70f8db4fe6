"""An inference server's padded tables, on a CPU: what they answer is what the policy would have answered."""

import numpy as np
import pytest
import torch

from shoal import algorithms, envs
from shoal.algorithms import vtrace
from shoal.device.batched_inference import MIN_ROWS, BatchedInference, padded
from shoal.device.placement import Hardware
from shoal.nets import NetConfig
from shoal.slots import map_tree

LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16, prev_action_reward=True)


def test_rows_are_padded_to_few_sizes():
    assert [padded(n) for n in (1, MIN_ROWS, MIN_ROWS + 1, 100, 128, 129)] == [MIN_ROWS, MIN_ROWS, 2 * MIN_ROWS, 128, 128, 256]


@pytest.mark.parametrize("mix", [0.0, 0.3])
@pytest.mark.parametrize("net", [NetConfig(hidden=(16,)), LSTM], ids=["mlp", "lstm"])
def test_answers_for_any_number_of_groups(net, mix):
    """Answers are the policy's for any number of groups."""
    algorithm = algorithms.make(vtrace.Config(), envs.describe("shoal/Catch-v0"), net, 4)
    policy, other = algorithm.policy(), algorithm.policy()
    inference = BatchedInference(policy, Hardware(), torch.Generator().manual_seed(0))
    groups = [envs.make("shoal/Catch-v0", 4) for _ in range(11)]
    sights = [algorithm.record.viewer(4) for _ in groups]
    steps = [env.reset(seed=k) for k, env in enumerate(groups)]
    states = [policy.initial_state(4) for _ in groups]
    actions = [None] * len(groups)
    for count in (1, 11, 3, 8, 11):
        views = [sights[k].of(steps[k], actions[k]) for k in range(count)]
        action, after, extras = inference.act(views, states[:count], np.full(4 * count, mix, np.float32))
        assert action.shape == (4 * count,)
        for k in range(count):
            rows = slice(4 * k, 4 * k + 4)
            output = other.model.step(views[k], states[k])
            shares = torch.full((4,), mix) if mix else None
            expected = other.model.net.head.log_prob(output.params, torch.from_numpy(action[rows]), None, shares)
            np.testing.assert_allclose(extras["log_prob"][rows], expected, rtol=1e-5, atol=1e-6)
            for name, x in output.state.items():
                np.testing.assert_allclose(after[name][rows], x, rtol=1e-5, atol=1e-6)
            states[k] = map_tree(lambda x, rows=rows: x[rows], after)
            actions[k] = action[rows].copy()
            steps[k] = groups[k].step(actions[k])
