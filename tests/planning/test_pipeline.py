"""The model alone: where the answer can be worked out by hand, and against a slow oracle."""

import itertools
import math
from dataclasses import replace

import pytest

from shoal.planning.pipeline import Node, simulate
from shoal.planning.terms import Cluster, Cost, Costs

ROOMY = Cluster(64)


def costs(**changes):
    base = Costs(decisions=10.0, env=Cost(0.0, 0.08), inference=Cost(0.015), put=Cost(0.005), pull=Cost(0.0), get=Cost(0.0),
                 update=Cost(0.04), publish=Cost(0.01))
    return replace(base, **changes)


def test_actors_that_nobody_holds_up_do_what_they_do_alone():
    for n in (1, 2, 3):
        seen = simulate(costs(update=Cost(0.015)), ROOMY, n, batch=1)
        assert seen.env_steps_per_second == pytest.approx(n * 10 / 0.1, rel=0.03)
        assert seen.blocked == 0.0 and seen.bottleneck.startswith("actors: environment (80 %")
        assert seen.learner_idle == pytest.approx(1 - 0.025 * n / 0.1, abs=0.03)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_a_learner_that_is_too_slow_sets_the_rate_and_the_lag(batch):
    seen = simulate(costs(get=Cost(0.001)), ROOMY, 40, batch=batch, depth=3)
    assert seen.env_steps_per_second == pytest.approx(10 * batch / (0.05 + 0.001 * batch), rel=0.01)
    assert seen.learner_idle == pytest.approx(0.0, abs=0.01) and seen.bottleneck.startswith("learner: updates")
    assert seen.policy_lag == pytest.approx(40 * 3 / batch, rel=0.05)  # all slots but a batch are ahead of one that is begun


def test_cores_are_shared_and_slower_when_all_are_busy():
    busy = costs(env=Cost(0.08), update=Cost(0.001), publish=Cost(0.0))
    alone = simulate(busy, Cluster(2), 1, batch=1).env_steps_per_second
    for speed in (1.0, 0.7):
        crowd = simulate(replace(busy, full_speed=speed), Cluster(2), 8, batch=1)
        assert crowd.env_steps_per_second == pytest.approx(2 * speed * alone, rel=0.03)
        assert crowd.bottleneck.startswith("cores") and crowd.inflation == pytest.approx(1 / speed, rel=0.02)


def test_learners_in_a_group_take_twice_as_much_and_wait_for_each_other():
    one, two = (simulate(costs(), ROOMY, 40, learners, 2).env_steps_per_second for learners in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.02)
    shared = simulate(costs(reduce=Cost(0.03)), ROOMY, 40, 2, 2)
    assert shared.env_steps_per_second == pytest.approx(2 * 10 * 2 / (0.04 + 0.03 + 0.01), rel=0.02)
    assert simulate(costs(reduce=Cost(0.2)), ROOMY, 40, 2, 2).bottleneck.startswith("learner: sharing gradients")


@pytest.mark.parametrize("learners", [1, 2])
def test_in_lock_step_all_wait_for_the_update(learners):
    steady = costs(env=Cost(0.0, 0.08), update=Cost(0.02), update_slot=Cost(0.005))
    for n in (1, 4):
        seen = simulate(steady, ROOMY, n, learners, lockstep=True, depth=1)
        round_ = learners * 0.1 + 0.02 + n * 0.005 + 0.01  # an unroll for each learner, the update, the weights
        assert seen.env_steps_per_second == pytest.approx(10 * n * learners / round_, rel=0.06)  # the slowest of n counts
        assert seen.policy_lag == 0.0
    assert simulate(steady, ROOMY, 1000, 1, lockstep=True, depth=1).bottleneck.startswith("learner: updates")


def test_links_fill_and_weights_come_late():
    big = costs(slot_bytes=125e6, weights_bytes=0.0, update=Cost(0.0001), publish=Cost(0.0))  # 0.1 s each at 10 Gbit/s
    seen = simulate(big, Cluster.of(100, 1, 16), 100, batch=1)
    assert seen.env_steps_per_second == pytest.approx(10 / 0.1, rel=0.02) and seen.bottleneck.startswith("the link into")
    heavy = costs(slot_bytes=1e3, weights_bytes=125e6)
    near, far = simulate(heavy, ROOMY, 40, batch=4), simulate(heavy, Cluster.of(40, 1, 8), 40, batch=4)
    assert far.env_steps_per_second == pytest.approx(near.env_steps_per_second, rel=0.05)
    assert far.policy_lag > near.policy_lag + 3 and "weights arrive late" in far.bottleneck


@pytest.mark.parametrize("actors", [2, 4, 5, 6, 9, 30])
def test_lag_as_seen_and_lag_by_littles_law_agree(actors, monkeypatch):
    import shoal.planning.pipeline as pipeline

    empty = simulate(costs(), ROOMY, actors, batch=2)
    monkeypatch.setattr(pipeline, "FULL_AT", 0.0)  # from full queues, too
    full = simulate(costs(), ROOMY, actors, batch=2)
    assert full.env_steps_per_second == pytest.approx(empty.env_steps_per_second, rel=0.03)
    assert full.policy_lag == pytest.approx(empty.policy_lag, rel=0.15, abs=0.6)


def test_equal_shares_against_a_slow_clock():
    """A node's jobs end when a clock of small steps says so."""
    for cores, speed in itertools.product((1, 2, 3), (1.0, 0.6)):
        node, works, arrivals = Node(cores, speed), [0.5, 0.2, 0.9, 0.4, 0.4], [0.0, 0.1, 0.15, 0.6, 0.61]
        ended: dict[int, float] = {}
        waiting, now, due = sorted(zip(arrivals, range(5), works, strict=True)), 0.0, math.inf
        while len(ended) < 5:
            if waiting and waiting[0][0] <= due:
                now, who, work = waiting.pop(0)
                node.advance(now)
                node.jobs.append((node.virtual + work, who))
                node.jobs.sort()
            else:
                now = due
                node.advance(now)
                ended[node.jobs.pop(0)[1]] = now
            due = node.reprice()
        assert [ended[k] for k in range(5)] == pytest.approx(slow_clock(cores, speed, works, arrivals), abs=2e-3)


def slow_clock(cores, speed, works, arrivals, tick=1e-4):
    left, ended, now = list(works), [math.nan] * len(works), 0.0
    while any(math.isnan(end) for end in ended):
        here = [k for k, at in enumerate(arrivals) if at <= now and math.isnan(ended[k])]
        busy = min(len(here), cores)
        for k in here:
            left[k] -= tick * busy / len(here) * (1 - (1 - speed) * ((busy - 1) / (cores - 1) if cores > 1 else 1.0))
            if left[k] <= 0:
                ended[k] = now + tick
        now += tick
    return ended


def test_ten_thousand_actors_or_sixty_four_learners():
    small = costs(env=Cost(0.001), inference=Cost(0.001), slot_bytes=1e4, weights_bytes=1e5, reduce=Cost(1e-5))
    seen = simulate(small, Cluster.of(10_000, 4, 16), 10_000, 4)
    assert seen.nodes == 1 + 625 and seen.learner_idle < 0.2 and seen.bottleneck.startswith("learner")
    assert simulate(small, Cluster.of(1, 64, 16), 1, 64).learner_idle > 0.8


def test_the_same_seed_gives_the_same_answer():
    assert simulate(costs(), Cluster(2), 5, 2, seed=3) == simulate(costs(), Cluster(2), 5, 2, seed=3)
