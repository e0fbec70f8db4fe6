"""The measurement of a replay table and its learner: who is where, and from where the batches come."""

from __future__ import annotations

import os

import pytest

from benchmarks import feed
from shoal.experiment.preload import PRELOAD
from shoal.runtime.fork_server_client import ForkServerClient


@pytest.mark.slow
def test_each_way_is_measured(monkeypatch):
    """From memory the table is asked for the first batches only; alone, nobody acts."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("one core only")
    monkeypatch.setattr(feed, "WARM_UPDATES", feed.KEPT + 10)
    monkeypatch.setattr(feed, "WARM_SECONDS", 0.5)
    places, read = {}, feed.PinnedLearner._read

    def look(watch, control, now):
        places.update({name: os.sched_getaffinity(child.pid) for name, child in control.children.items()})
        read(watch, control, now)

    monkeypatch.setattr(feed.PinnedLearner, "_read", look)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cores[1]})
    try:
        with ForkServerClient(PRELOAD) as fork_server:
            found = {way: feed.measure("shoal/Catch-v0", way, cores, 0.5, fork_server) for way in feed.WAYS}
    finally:
        os.sched_setaffinity(0, before)
    assert places.pop("learner-0") == {cores[0]} and all(where == {cores[1]} for where in places.values())
    assert all(numbers["updates_per_second"] > 0 for numbers in found.values())
    assert found["memory"]["env_steps_per_second"] > 0 == found["alone"]["env_steps_per_second"]
    assert found["table"]["actor_acts"] > 0 and found["table"]["actor_makes_items"] > 0 == found["memory"]["samples_waited"]
