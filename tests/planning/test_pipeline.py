"""The model alone: where the answer can be worked out by hand, and against a slow oracle."""

import itertools
import math
from dataclasses import replace

import pytest

from shoal.planning import simulated_cores
from shoal.planning.pipeline import simulate
from shoal.planning.simulated_cores import SLICE, Cores
from shoal.planning.terms import Cluster, Cost, Costs

ROOMY = Cluster(64)


def costs(**changes):
    base = Costs(decisions=10.0, env=Cost(0.0, 0.08), inference=Cost(0.015), put=Cost(0.005), pull=Cost(0.0), get=Cost(0.0),
                 update=Cost(0.04), publish=Cost(0.01))
    return replace(base, **changes)


def test_actors_without_a_bottleneck():
    """Actors that nobody holds up do what they do alone."""
    for n in (1, 2, 3):
        seen = simulate(costs(update=Cost(0.015)), ROOMY, n, batch=1)
        assert seen.env_steps_per_second == pytest.approx(n * 10 / 0.1, rel=0.03)
        assert seen.blocked == 0.0 and seen.bottleneck.startswith("actors: environment (80 %")
        assert seen.learner_idle == pytest.approx(1 - 0.025 * n / 0.1, abs=0.03)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_slow_learner(batch):
    """A learner that is too slow sets the rate and the lag."""
    seen = simulate(costs(get=Cost(0.001)), ROOMY, 40, batch=batch, depth=3)
    assert seen.env_steps_per_second == pytest.approx(10 * batch / (0.05 + 0.001 * batch), rel=0.01)
    assert seen.learner_idle == pytest.approx(0.0, abs=0.01) and seen.bottleneck.startswith("learner: updates")
    assert seen.policy_lag == pytest.approx(40 * 3 / batch, rel=0.05)  # all slots but a batch are ahead of one that is begun


def test_shared_cores():
    """Cores are shared and slower when all are busy."""
    busy = costs(env=Cost(0.08), update=Cost(0.001), publish=Cost(0.0))
    alone = simulate(busy, Cluster(2), 1, batch=1).env_steps_per_second
    for speed in (1.0, 0.7):
        crowd = simulate(replace(busy, full_speed=speed), Cluster(2), 8, batch=1)
        assert crowd.env_steps_per_second == pytest.approx(2 * speed * alone, rel=0.03)
        assert crowd.bottleneck.startswith("cores") and crowd.inflation == pytest.approx(1 / speed, rel=0.02)


def test_two_learners():
    """Learners in a group take twice as much and wait for each other."""
    one, two = (simulate(costs(), ROOMY, 40, learners, 2).env_steps_per_second for learners in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.02)
    shared = simulate(costs(reduce=Cost(0.03)), ROOMY, 40, 2, 2)
    assert shared.env_steps_per_second == pytest.approx(2 * 10 * 2 / (0.04 + 0.03 + 0.01), rel=0.02)
    assert simulate(costs(reduce=Cost(0.2)), ROOMY, 40, 2, 2).bottleneck.startswith("learner: sharing gradients")


@pytest.mark.parametrize("learners", [1, 2])
def test_lock_step_waits_for_the_update(learners):
    steady = costs(env=Cost(0.0, 0.08), update=Cost(0.02), update_slot=Cost(0.005))
    for n in (1, 4):
        seen = simulate(steady, ROOMY, n, learners, lockstep=True, depth=1)
        round_ = learners * 0.1 + 0.02 + n * 0.005 + 0.01  # an unroll for each learner, the update, the weights
        assert seen.env_steps_per_second == pytest.approx(10 * n * learners / round_, rel=0.06)  # the slowest of n counts
        assert seen.policy_lag == 0.0
    assert simulate(steady, ROOMY, 200, 1, lockstep=True, depth=1).bottleneck.startswith("learner: updates")


def test_links_fill_and_weights_come_late():
    big = costs(slot_bytes=125e6, weights_bytes=0.0, update=Cost(0.0001), publish=Cost(0.0))  # 0.1 s each at 10 Gbit/s
    seen = simulate(big, Cluster.of(100, 1, 16), 100, batch=1)
    assert seen.env_steps_per_second == pytest.approx(10 / 0.1, rel=0.02) and seen.bottleneck.startswith("the link into")
    heavy = costs(slot_bytes=1e3, weights_bytes=125e6)
    near, far = simulate(heavy, ROOMY, 40, batch=4), simulate(heavy, Cluster.of(40, 1, 8), 40, batch=4)
    assert far.env_steps_per_second == pytest.approx(near.env_steps_per_second, rel=0.05)
    assert far.policy_lag > near.policy_lag + 3 and "weights arrive late" in far.bottleneck


@pytest.mark.parametrize("actors", [2, 4, 5, 6, 9, 30])
def test_lag_follows_littles_law(actors, monkeypatch):
    import shoal.planning.pipeline as pipeline

    uneven = costs(spread=0.05)
    empty = simulate(uneven, ROOMY, actors, batch=2)
    monkeypatch.setattr(pipeline, "FULL_AT", 0.0)  # from full queues, too
    full = simulate(uneven, ROOMY, actors, batch=2)
    assert full.env_steps_per_second == pytest.approx(empty.env_steps_per_second, rel=0.03)
    assert full.policy_lag == pytest.approx(empty.policy_lag, rel=0.15, abs=0.6)


def ends(node, works, arrivals):
    """When jobs end that come at these times."""
    ended: dict[int, float] = {}
    waiting, due = sorted(zip(arrivals, range(len(works)), works, strict=True)), math.inf
    while len(ended) < len(works):
        if waiting and waiting[0][0] <= due:
            now, who, work = waiting.pop(0)
            node.advance(now)
            node.add(who, work)
        else:
            node.advance(due)
            who = node.pop()
            node.release()
            if who is not None:
                ended[who] = due
        due = node.reprice()
    return [ended[who] for who in range(len(works))]


def test_equal_shares(monkeypatch):
    """Of jobs that take many slices, each gets as much as the others, whenever it came."""
    monkeypatch.setattr(simulated_cores, "SLICE", 0.0002)
    for count, speed in itertools.product((1, 2, 3), (1.0, 0.6)):
        works, arrivals = [0.5, 0.2, 0.9, 0.4, 0.4], [0.0, 0.1, 0.15, 0.6, 0.61]
        assert ends(Cores(count, speed), works, arrivals) == pytest.approx(slow_clock(count, speed, works, arrivals), abs=4e-3)


def test_short_jobs():
    """Short jobs are done one after the other and a core is kept warm."""
    works = [0.001] * 4
    assert ends(Cores(1, 1.0), works, [0.0] * 4) == pytest.approx([0.001, 0.002, 0.003, 0.004])
    cold = Cores(1, 1.0, turn=0.002)
    assert ends(cold, works, [0.0] * 4) == pytest.approx([0.001, 0.004, 0.007, 0.010]) and cold.turns == 3
    apart = Cores(4, 1.0, turn=0.002)
    assert ends(apart, works, [0.0] * 4) == pytest.approx([0.001] * 4) and apart.turns == 0


def test_least_served_job_comes_first():
    node = Cores(1, 1.0)
    node.add(0, 1.0)
    node.add(1, 1.0)
    for now in (SLICE, 2 * SLICE, 3 * SLICE):
        node.reprice()
        node.advance(now)
        assert node.pop() is None
    node.add(2, 1.0)  # level with the job that has had least: it is due one slice, not three
    for now, following in ((4 * SLICE, 2), (5 * SLICE, 0), (6 * SLICE, 1), (7 * SLICE, 2)):
        node.reprice()
        node.advance(now)
        assert node.pop() is None and node.running[0][1] == following


def test_learner_that_mostly_waits():
    """A learner that mostly waits is hardly held up by busy actors."""
    busy = costs(env=Cost(0.0), inference=Cost(0.005), put=Cost(0.0), update=Cost(0.001), publish=Cost(0.0))
    seen = simulate(busy, Cluster(2), 6, batch=2)
    rate = 2 / (0.005 + 0.0005)  # unrolls/s: both cores are always in use
    assert seen.env_steps_per_second == pytest.approx(10 * rate, rel=0.02) and seen.blocked == 0.0
    computing = rate / 2 * 0.001  # seconds in a second; with equal shares of two cores for seven it would take 7 / 2 times as long
    assert 0.99 * computing < 1 - seen.learner_idle < 1.5 * computing


def test_turns_cost_when_cores_are_short():
    busy = costs(env=Cost(0.0), inference=Cost(0.01), put=Cost(0.0), update=Cost(0.001), publish=Cost(0.0))
    for cluster, actors, more in ((ROOMY, 8, False), (Cluster(2), 8, True)):
        free, cold = (simulate(replace(busy, turn=turn), cluster, actors, batch=2) for turn in (0.0, 0.001))
        assert (free.env_steps_per_second > 1.05 * cold.env_steps_per_second) == more == (cold.inflation > 1.05)
        assert (cold.turns > 1) == more


def test_actors_that_wait_in_an_unroll():
    """Eight that compute a tenth of the time have room on two cores, even if all begin at once."""
    waiting = costs(env=Cost(0.0, 0.09), inference=Cost(0.01), put=Cost(0.0), update=Cost(0.02), publish=Cost(0.0))
    seen = simulate(waiting, Cluster(2), 8, lockstep=True, depth=1)
    assert 80 / (0.1 + 0.02) > seen.env_steps_per_second > 80 / (0.1 + 0.02 + 0.3 * 0.03)  # not 8 x 10 ms on two cores first


def test_in_lock_step_the_slowest_counts():
    uneven = costs(env=Cost(0.0, 0.1), inference=Cost(0.0), put=Cost(0.0), update=Cost(0.02), publish=Cost(0.0), spread=0.2)
    for n, largest in ((1, 0.0), (8, 1.42)):  # of n normal numbers, on average
        seen = simulate(uneven, ROOMY, n, lockstep=True, depth=1)
        assert seen.env_steps_per_second == pytest.approx(10 * n / (0.1 * (1 + 0.2 * largest) + 0.02), rel=0.08)


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


def test_lock_step_on_many_nodes():
    """In lock step on many nodes every learner gets its own and all wait for the weights."""
    far = costs(slot_bytes=1e7, weights_bytes=125e4)  # 8 ms and 1 ms at 10 Gbit/s
    for actors, learners in ((8, 1), (40, 4)):
        seen = simulate(far, Cluster.of(actors, learners, 4), actors, learners, lockstep=True, depth=1)
        assert seen.policy_lag == 0.0 and seen.learner_idle < 1.0


def test_thousands_of_actors():
    """Ten thousand actors, or sixty-four learners."""
    small = costs(env=Cost(0.001), inference=Cost(0.001), slot_bytes=1e4, weights_bytes=1e5, reduce=Cost(1e-5))
    seen = simulate(small, Cluster.of(10_000, 4, 16), 10_000, 4)
    assert seen.nodes == 1 + 625 and seen.learner_idle < 0.2 and seen.bottleneck.startswith("learner")
    assert simulate(small, Cluster.of(1, 64, 16), 1, 64).learner_idle > 0.8


def test_the_same_seed_gives_the_same_answer():
    assert simulate(costs(), Cluster(2), 5, 2, seed=3) == simulate(costs(), Cluster(2), 5, 2, seed=3)
