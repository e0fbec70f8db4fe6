"""What the tests of dqn and r2d2 share: nets, and a learner with a batch of what an actor recorded."""

import torch

from shoal.acting import Progress
from shoal.nets import NetConfig
from shoal.slots import map_tree
from tests.algorithms.replay_loop import Actor
from tests.algorithms.toys import toy_env, toy_spec

LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=8)
LOOKING_BACK = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=8, prev_action_reward=True)
SMALL = NetConfig(hidden=(16,))
WINDOW = {"burn_in": 2, "length": 4, "stride": 2}


def made(algorithm, config, net, seats=4, steps=60, **toy):
    """An algorithm for a toy environment, its learner, and a batch of what an actor with its weights recorded."""
    algorithm = algorithm(config, toy_spec(**toy), net, seats)
    learn = algorithm.learn(3)
    actor = Actor(algorithm, toy_env(seats, **toy), 5)
    actor.policy.load(learn.published(Progress()))
    actor.play(steps)
    return (algorithm, learn, *actor.items())


def shake(learn):
    """A target net that differs from the net."""
    learn.target.params.add_(0.1 * torch.randn(learn.target.params.shape, generator=torch.Generator().manual_seed(1)))


def tensors(items):
    return map_tree(lambda x: torch.from_numpy(x.copy()), items)
