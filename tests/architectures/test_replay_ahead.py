"""A learner that runs ahead, as on a GPU: it begins an update before it asks what became of the last one. Here on a CPU, with the
same code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.acting import Progress
from shoal.algorithms import dqn, r2d2
from shoal.device.placement import Hardware
from shoal.nets import NetConfig
from shoal.roles.learner import Learner
from shoal.roles.replay import Replay
from shoal.roles.replay_config import ReplayConfig
from shoal.roles.replay_endpoints import ReplaySampler
from shoal.roles.replay_wires import items_layout
from tests.architectures.graphs import Weights, counted, draw, go

CATCH, TMAZE = "shoal/Catch-v0", "shoal/TMaze-v0"
APEX = dqn.Config(n_step=3, dueling=True, loss="squared", exploration="ladder", epsilon=0.4, target_period_updates=10)
R2D2 = r2d2.Config(burn_in=2, length=4, stride=2, lr=1e-3, target_period_updates=10)
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16, prev_action_reward=True)
FREE = ReplayConfig(capacity=400, min_size=64, batch_size=16, insert_batch=10, samples_per_insert=None)
RATIO = replace(FREE, samples_per_insert=4.0)


class Ahead(Learner):
    """On a CPU as on a GPU."""

    def __init__(self, me, **arguments):
        super().__init__(me, **arguments)
        self.learn.to(Hardware())
        self.learn.capture()
        self.device = self.learn


def run(tmp_path, algorithm, role, replay, updates=40, kind="inline", architecture="actor_learner", hearing=Replay):
    program, parts = draw(algorithm, architecture, TMAZE if algorithm is R2D2 else CATCH, replay=replay,
                          net=LSTM if algorithm is R2D2 else None)
    program.nodes["learner"].role = counted(role, updates, lambda role: role.counts[1])
    program.nodes["replay"].role = hearing
    return go(program, kind, tmp_path), parts


@pytest.mark.parametrize(("architecture", "algorithm"), [("actor_learner", APEX), ("actor_learner", R2D2), ("synchronous", APEX)])
def test_without_a_batch_ahead(architecture, algorithm, tmp_path, monkeypatch):
    """A learner without a batch ahead waits, and learns as ever."""
    monkeypatch.setattr(ReplaySampler, "waiting", lambda self, count=1: False)
    table = replace(RATIO, exponent=0.0, insert_batch=4)  # priorities that differ in the last digit would change the draw
    roles = (Learner, Ahead)
    (plain, parts), (ahead, _) = (run(tmp_path, algorithm, role, table, architecture=architecture) for role in roles)
    assert plain.reason == ahead.reason == "counted" and plain.version == ahead.version == 41
    np.testing.assert_allclose(ahead.published["params"], plain.published["params"], atol=1e-4)
    begun = parts.algorithm.learn(parts.seed).published(Progress())["params"]
    assert np.abs(plain.published["params"] - begun).max() > 1e-2


@pytest.mark.parametrize("replay", [FREE, replace(RATIO, publish_updates=3)], ids=["free", "ratio"])
def test_each_batch_is_reported_once(replay, tmp_path):
    """Every batch is reported once, in order, and at most one late."""
    events, learned, drawn, heard = [], [], [], []

    class Noting(Ahead):
        def __init__(self, me, **arguments):
            super().__init__(me, **arguments)
            tell = self.batches.samples.update

            def update(keys, priorities):
                events.append(("told", sum(kind == "told" for kind, _ in events)))
                tell(keys, priorities)

            self.batches.samples.update = update

        async def _update(self, batch):
            seen = batch["observation"].copy()
            steps = await super()._update(batch)
            events.append(("made", len(learned)))
            learned.append((seen, self.learn.priorities.clone().numpy()))
            return steps

    class Hearing(Replay):
        def _heed(self, data):
            count = int(data["count"][0])
            heard.append((data["key"][:count].copy(), data["priority"][:count].copy()))
            super()._heed(data)

        def _sample(self, request):
            super()._sample(request)
            drawn.append((request.answer["key"].copy(), request.answer["items"].copy()))

    watch, parts = run(tmp_path, APEX, Noting, replay, hearing=Hearing)
    layout, size = items_layout(parts.algorithm.record.layout, replay.batch_size), replay.batch_size
    keys, values = (np.concatenate(rows).reshape(-1, size) for rows in zip(*heard, strict=True))
    assert len(keys) >= 35 and {len(k) for k, _ in heard} <= {0, size, 2 * size}
    for k, ((mine, block), (seen, errors)) in enumerate(zip(drawn[: len(keys)], learned, strict=False)):
        np.testing.assert_array_equal(layout.views(block)["observation"], seen)
        np.testing.assert_array_equal(mine, keys[k])
        np.testing.assert_array_equal(errors, values[k])
    place = {event: at for at, event in enumerate(events)}
    late = [place["told", k] > place["made", k + 1] for k in range(35)]
    assert any(late) and all(place["made", k] < place["told", k] < place["made", k + 2] for k in range(35))
    if replay.samples_per_insert is not None:  # one that was late and one that was not, with the same question
        assert not all(late) and 2 * size in {len(k) for k, _ in heard}
    made, each = len(learned), replay.publish_updates
    assert 1 + (made - 1) // each <= watch.version <= 1 + made // each


def test_batches_that_wait_are_taken_together(tmp_path):
    """Four updates are one launch: each batch has the priorities that the table hears for its keys, and all are counted."""
    together, told, learned = [], [], []

    class Noting(Ahead):
        def _launch(self, batches):
            together.append(len(batches))
            done = super()._launch(batches)
            learned.append((np.concatenate(self.batches.keys), self.learn.priorities.clone().numpy()))
            return done

        async def _update(self, batch):
            done = await super()._update(batch)
            learned.append((np.concatenate(self.batches.keys), self.learn.priorities.clone().numpy()))
            return done

    class Hearing(Replay):
        def _heed(self, data):
            count = int(data["count"][0])
            told.append((data["key"][:count].copy(), data["priority"][:count].copy()))
            super()._heed(data)

    watch, _ = run(tmp_path, APEX, Noting, replace(FREE, prefetch=8, publish_updates=4), updates=60, hearing=Hearing)
    assert len(together) >= 5 and set(together) == {4}
    made = sum(len(keys) for keys, _ in learned) // FREE.batch_size
    assert made == watch.final["learner-0"]["learner_steps"] >= 60 and watch.version >= made // 4
    for mine, theirs in zip(zip(*learned, strict=True), zip(*told, strict=True), strict=True):
        heard = np.concatenate(theirs)
        assert len(heard) >= 40 * FREE.batch_size
        np.testing.assert_array_equal(np.concatenate(mine)[: len(heard)], heard)


def test_it_publishes_with_processes(tmp_path):
    """With processes it runs and what it learned is published."""
    watch, _ = run(tmp_path, R2D2, Ahead, FREE, updates=60, kind="local")
    assert watch.reason == "counted" and np.isfinite(watch.published["params"]).all() and watch.version >= 60
    assert watch.final["learner-0"]["loss"] > 0 and watch.final["replay-0"]["priority_updates"] > 55 * FREE.batch_size * 0.5


def test_updates_that_are_not_finite(tmp_path):
    """Updates that are not finite are noticed and end the run."""

    class Broken(Ahead):
        async def _update(self, batch):
            batch["reward"][:] = np.nan
            return await super()._update(batch)

    watch = Weights()
    program, _ = draw(APEX, "actor_learner", CATCH, replay=FREE)
    program.nodes["learner"].role = Broken
    with pytest.raises(Exception, match="10 updates in a row had a loss or gradient that is not finite"):
        go(program, "inline", tmp_path, watch)
