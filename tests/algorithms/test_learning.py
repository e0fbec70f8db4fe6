"""Learning, by the plain loop of loop.py. Each test can fail: with the gradient turned around it must."""

import pytest

from shoal.algorithms import a2c, ppo, vtrace
from shoal.nets import NetConfig
from tests.algorithms.loop import Loop

CATCH = {
    "vtrace": (vtrace.Config(unroll=20, lr=2e-3, normalise_returns=True), {"actors": 2, "seats": 8, "lag": 2}),
    "ppo": (ppo.Config(unroll=128, normalise_returns=True), {"actors": 2, "seats": 4}),
    "a2c": (a2c.Config(unroll=16, lr=2e-3, lambda_=1.0, normalise_returns=True), {"actors": 2, "seats": 8}),
}


def best(loop, threshold, budget, every=20_000):
    """The first evaluation that reaches the threshold, or the best of all within the budget."""
    results = [loop.evaluate()]
    while loop.env_steps < budget and results[-1] < threshold:
        loop.run(loop.env_steps + every)
        results.append(loop.evaluate(seed=loop.env_steps))
    return max(results)


@pytest.mark.parametrize("name", CATCH)
def test_catch(name):
    config, shape = CATCH[name]
    assert best(Loop(config, "shoal/Catch-v0", NetConfig(), **shape), 0.95, 200_000) >= 0.95


@pytest.mark.parametrize("name", CATCH)
def test_catch_is_not_learned_uphill(name):
    config, shape = CATCH[name]
    assert best(Loop(config, "shoal/Catch-v0", NetConfig(), flip=True, **shape), 0.95, 60_000) < 0.5


def risky(correction, seed, budget=100_000):
    """Greedy and sampled return of the learned policy; 30 % of what the actors do is random.

    The entropy keeps the risky first action alive while the chain is being learned. It is the same for both arms.
    """
    config = vtrace.Config(gamma=1.0, behaviour_mix=0.3, correction=correction, lr=5e-3, entropy=0.4, entropy_final=0.1)
    loop = Loop(config, "shoal/RiskyChain-v0", NetConfig(), actors=2, seats=8, seed=seed, budget=budget).run(budget)
    return loop.evaluate(50), loop.evaluate(1000, greedy=False)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_the_correction_is_what_dares(seed):
    """policy.md 4d (1): the chain is worth -.345 to the policy that acts, +1 to the one that learns; safe is 0.5."""
    assert min(risky("vtrace", seed)) >= 0.95
    assert max(risky("none", seed)) <= 0.6
