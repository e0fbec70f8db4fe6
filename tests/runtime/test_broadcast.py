"""The broadcast wire: whole values at full speed, a publisher that dies half-way, versions that never decrease."""

import time

import numpy as np
import pytest

from shoal.core import any_of
from shoal.runtime import Program
from shoal.slots import Field, Layout
from tests.runtime.harness import RUNTIMES, Killer, Watch, drive, up

BIG = Layout({"value": Field((1 << 18,), "i8"), "scalar": Field((), "f4")})


class Publisher:
    """Publishes big constant vectors as fast as it can, or piece by piece, which is easy to interrupt."""

    def __init__(self, me, weights, slow=False):
        self.me, self.weights, self.slow = me, weights, slow
        self.tree = {"value": np.zeros(1 << 18, np.int64), "scalar": np.zeros((), np.float32)}
        if slow:
            layout, copy = weights._layout, weights._layout.copy

            def slowly(into, tree):
                half = len(into["value"]) // 2
                into["value"][:half] = tree["value"][:half]
                time.sleep(0.01)
                copy(into, tree)

            layout.copy = slowly

    async def step(self):
        before = self.weights.version
        value = 1000 * (self.me.incarnation + 1) + self.me.stats.get("learner_steps")
        self.tree["value"][:], self.tree["scalar"][...] = value, before + 1
        version = self.weights.publish(self.tree)
        assert version == before + 1
        self.me.stats.add("learner_steps")
        self.me.stats.set("weights_version", version)
        await any_of(timeout=0)


class Reader:
    """Fails on the first torn value, and when a version decreases or means two values."""

    def __init__(self, me, weights):
        self.me, self.weights, self.version, self.value = me, weights, 0, None
        self.into = BIG.empty()

    async def step(self):
        await self.weights.newer_than(0)  # not the last one: the same version may be read again
        version = self.weights.pull(self.into)
        value = int(self.into["value"][0])
        assert (self.into["value"] == value).all(), "torn"
        assert self.into["scalar"] == version
        assert version >= self.version, "the version decreased"
        assert version > self.version or value == self.value, "one version, two values"
        assert version >= self.me.stats.get("weights_version"), "the version decreased across a restart"
        self.version, self.value = version, value
        self.me.stats.set("weights_version", version)
        self.me.stats.add("samples_consumed")
        await any_of(timeout=0)


def program_of(readers=2, slow=False):
    program = Program("t")
    weights = program.broadcast("weights", BIG)
    program.add("publisher", Publisher, weights=weights.publisher, slow=slow)
    program.add("reader", Reader, weights=weights.reader, replicas=readers)
    return program


@pytest.mark.parametrize("kind", RUNTIMES)
def test_values_are_whole(kind, tmp_path):
    """Values read while they are written are whole."""
    watch = drive(program_of(), kind, tmp_path,
                  Watch(lambda c: c.total("samples_consumed") > 200 and c.total("learner_steps") > 200))
    assert watch.reason == "until"
    assert watch.wires["weights"]["version"] >= 200


class Lapped:
    """Pulls with a copy so slow that the publisher comes round: every such read must be noticed and repeated."""

    def __init__(self, me, weights):
        self.me, self.weights, self.into = me, weights, BIG.empty()
        layout, copy = weights._layout, weights._layout.copy
        pauses = iter([0.2] * 3)

        def slowly(into, tree):
            half = len(into["value"]) // 2
            into["value"][:half] = tree["value"][:half]
            time.sleep(next(pauses, 0.0))
            into["value"][half:] = tree["value"][half:]
            into["scalar"][...] = tree["scalar"]

        layout.copy = slowly
        del copy

    async def step(self):
        await self.weights.newer_than(0)
        version = self.weights.pull(self.into)
        assert (self.into["value"] == self.into["value"][0]).all(), "torn"
        assert self.into["scalar"] == version
        self.me.finish("read")


def test_lapped_reader(tmp_path):
    """A reader that is lapped reads again and counts it."""
    program = Program("t")
    weights = program.broadcast("weights", BIG)
    program.add("publisher", Publisher, weights=weights.publisher)
    program.add("reader", Lapped, weights=weights.reader)
    watch = drive(program, "local", tmp_path)
    assert watch.reason == "read"
    assert watch.wires["weights"]["retries"] >= 1


@pytest.mark.parametrize("victims", [("publisher-0",), ("reader-0",), ("publisher-0", "reader-1")])
def test_kill_9_while_publishing(victims, tmp_path):
    """Kill -9 while publishing leaves the old value whole."""
    killer = Killer(victims, times=4, progress="learner_steps", every=4)
    versions = []

    def act(control):
        versions.append(control.wires()["weights"]["version"])
        killer(control)

    watch = drive(program_of(slow=True), "local", tmp_path, Watch(killer.done, act))
    assert watch.reason == "until"
    assert versions == sorted(versions)
    assert sum(row["restarts"] for row in watch.final.values()) == 4
    # Each version is published once; those that a kill cut off were published by the successor.
    assert abs(watch.wires["weights"]["version"] - watch.final["publisher-0"]["learner_steps"]) <= killer.kills + 1


class Metronome:
    def __init__(self, me, weights):
        self.me, self.weights = me, weights

    async def step(self):
        await any_of(timeout=0.02)
        self.weights.publish({"value": np.zeros(1 << 18, np.int64), "scalar": np.zeros((), np.float32)})


class Listener:
    def __init__(self, me, weights):
        self.me, self.weights, self.version, self.into = me, weights, 0, BIG.empty()

    async def step(self):
        await self.weights.newer_than(self.version)
        self.version = self.weights.pull(self.into)
        self.me.stats.observe("publish_to_use_seconds", self.weights.age_seconds)


def test_newer_than_wakes_at_once(tmp_path):
    program = Program("t")
    weights = program.broadcast("weights", BIG)
    program.add("publisher", Metronome, weights=weights.publisher)
    program.add("reader", Listener, weights=weights.reader)
    watch = drive(program, "local", tmp_path, Watch(lambda c: up(c) and c.total("publish_to_use_seconds/count") >= 40))
    row = watch.final["reader-0"]
    buckets = [row[name] for name in sorted((n for n in row if n.startswith("publish_to_use_seconds/bucket")),
                                            key=lambda n: int(n.rsplit("bucket", 1)[1]))]
    median = np.searchsorted(np.cumsum(buckets), sum(buckets) / 2)
    assert 1e-4 * 10 ** (median / 6) < 0.02  # woken by the pipe; a heartbeat would take up to half a second
