"""A central value sees what all agents of an environment see, in training only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal import algorithms, envs
from shoal.acting import Progress
from shoal.algorithms import a2c, ppo
from shoal.algorithms.actor_critic.unroll_batch import Finals, UnrollBatch
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from tests.algorithms.loop import Actor, join, update

NAME = "shoal/RockPaperScissors-v0"


def setup(kind=a2c, **net):
    config = kind.Config(unroll=4, lr=1e-2)
    algorithm = algorithms.make(config, envs.describe(NAME), NetConfig(hidden=(8,), **net), 6)
    actor = Actor(algorithm, envs.make(NAME, 3), seed=3)
    learn = algorithm.learn(1)
    actor.policy.load(learn.published(Progress()))
    return learn, join(algorithm.record, [actor.unroll() for _ in range(2)])


def test_own_agent_first():
    """Of columns 0 to 5 with three agents each; what follows a truncated step is what each agent saw last."""
    T, B = 3, 6
    seen = torch.arange((T + 1) * B, dtype=torch.float32).reshape(T + 1, B, 1)
    zeros = torch.zeros(T, B)
    finals = Finals(torch.tensor([1, 1]), torch.tensor([3, 4]), torch.tensor([[-1.0], [-2.0]]), None, None)
    batch = UnrollBatch(seen, torch.zeros(T + 1, B, dtype=torch.bool), None, None, None, {}, zeros, zeros, zeros, zeros, zeros + 1,
                        None, finals).joined(3)
    assert batch.joint[0, :, :, 0].tolist() == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [3, 4, 5], [4, 5, 3], [5, 3, 4]]
    assert batch.joint[3, 4, :, 0].tolist() == [22, 23, 21]
    assert batch.finals.joint[:, :, 0].tolist() == [[-1, -2, 17], [-2, 17, -1]]  # the third agent's episode went on
    part = batch.acted().flattened().select(torch.tensor([7]))
    assert part.joint[0, 0, :, 0].tolist() == [7, 8, 6] and part.observation.item() == 7


@pytest.mark.parametrize("kind", [a2c, ppo])
def test_values_of_all_policies_of_one(kind):
    """Values depend on the others' observations, the policy on its own; the policy acts without them."""
    learn, batch = setup(kind, central_value=True)
    tensors = learn.batch(batch)
    before = learn.model.unroll(tensors)
    other = tensors.observation.clone()
    other[:, 1] += 1  # what the second agent of the first environment sees
    changed = learn.model.unroll(learn.batch({**batch, "observation": other.numpy()}))
    moved = (changed.value - before.value).abs().amax(0) > 1e-6
    assert moved.tolist() == [True, True] + [False] * 10
    assert torch.equal(changed.params[:, 0], before.params[:, 0])
    params = learn.state["params"].clone()
    update(learn, batch)
    changed = learn.state["params"] != params
    assert changed[learn.model.span("value_torso")].any() and changed[learn.model.span("value_join")].any()
    plain = setup(kind, separate_value=True)[0].model.params.numel()
    assert learn.model.params.numel() == plain + 2 * 8 * 8 + 8 and np.isfinite(before.value.detach().numpy()).all()


def test_refused():
    from shoal import train

    quiet = {"console": {"mode": "none"}, "net": {"central_value": True}, "runtime": "inline"}
    for env, options, words in ((NAME, {"policies": "independent"}, "see their own agents only"),
                                ("CartPole-v1", {}, "has one agent; use --net.separate-value"),
                                ("shoal/Kuhn-v0", {"policies": "self-play"}, "take turns")):
        with pytest.raises(ConfigError, match=rf"--net\.central-value does not fit.*{words}"):
            train("ppo", env, **quiet, **options)
    with pytest.raises(ConfigError, match="central_value = True: dqn has no value function"):
        train("dqn", NAME, **quiet)
    with pytest.raises(ConfigError, match=r"--net\.central-value does not fit --net\.recurrent lstm"):
        NetConfig(recurrent="lstm", central_value=True).validate()
