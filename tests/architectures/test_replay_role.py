"""The Replay role: every item once, every priority to its own item, the rates kept, and nothing mixed by kills."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from shoal.errors import ConfigError
from shoal.roles.replay_config import ReplayConfig
from shoal.roles.replay_wires import Block
from tests.architectures import replay_table
from tests.architectures.graphs import go
from tests.architectures.replay_table import FIRST, POISON, SMALL, CheckedReplay, Consumer, Producer, program_of, screens
from tests.runtime.harness import RUNTIMES, Killer, Saver, Watch


@pytest.mark.parametrize("kind", RUNTIMES)
def test_items_priorities_and_rate(kind, tmp_path):
    """Items come back whole with their own priorities at the rate that was asked for."""
    watch = go(program_of(SMALL), kind, tmp_path, Watch(lambda c: c.total("learner_steps") >= 1000, seconds=60))
    assert watch.reason == "until"
    page = watch.final["replay-0"]
    inserts, samples = page["replay_inserts"], page["replay_samples"]
    assert abs(samples - 4.0 * (inserts - SMALL.min_size)) <= SMALL.band(2) + 4.0 * SMALL.min_size
    assert page["replay_size"] == SMALL.capacity
    assert page["samples_masked"] > 0, "no priority was ever updated"
    assert page["priority_updates"] + page["priority_updates_late"] >= page["replay_samples"] - 3 * SMALL.batch_size


def test_a_ratio_that_changes(tmp_path):
    """What is set counts from then on, not for what went in before, and a Replay that was killed begins with it."""
    program = program_of(replace(SMALL))
    change = replay_table.RatioChange(program)
    assert go(program, "local", tmp_path, Watch(change.done, change, seconds=90)).reason == "until"
    assert change.ratios[0] > 2 and max(change.ratios[1:]) < 1.7  # 4 and 1, read while both counts move


def test_free_running(tmp_path):
    """Without turns neither side waits for the other."""
    config = ReplayConfig(capacity=200, min_size=50, batch_size=8, insert_batch=10, samples_per_insert=None, trim_updates=20)
    watch = go(program_of(config), "inline", tmp_path, Watch(lambda c: c.total("learner_steps") >= 200, seconds=60))
    page = watch.final["replay-0"]
    assert watch.reason == "until" and page["insert_blocked_seconds"] == 0
    assert page["replay_size"] > config.capacity, "between two trims the table is larger than its capacity"


def test_in_turns(tmp_path):
    """8 samples per insert and 2 items at once are 16 samples: exactly one batch after each insert, from min_size on."""
    config = ReplayConfig(capacity=500, min_size=20, batch_size=16, insert_batch=2, samples_per_insert=8.0)
    seen = []

    def look(control):
        page = control.snapshot()["replay-0"]
        seen.append((page["replay_inserts"], page["replay_samples"]))

    watch = go(program_of(config, producers=1, turns=True), "local", tmp_path,
                  Watch(lambda c: c.total("learner_steps") >= 200, look, seconds=60))
    assert watch.reason == "until"
    for inserts, samples in seen:
        due = max(0, inserts - config.min_size) * 8 + 16 * (inserts >= config.min_size)
        assert due - 32 <= samples <= due + 16, "the pages are read one after the other, hence a batch to either side"


@pytest.mark.parametrize(("checkpoint", "turns"), [pytest.param(False, False, marks=pytest.mark.slow), (True, False),
                                                   pytest.param(True, True, marks=pytest.mark.slow)])
def test_kill_9_of_any_of_them_mixes_nothing(checkpoint, turns, tmp_path):
    config = ReplayConfig(capacity=300, min_size=60, batch_size=16, insert_batch=10, samples_per_insert=4.0, checkpoint=checkpoint)
    killer = Killer(("replay-0", "producer-0", "consumer-0", "replay-0"), times=4, progress="learner_steps", every=40)
    save = Saver(tmp_path, every=15)

    def act(control):
        if checkpoint:
            save(control)
        killer(control)

    watch = go(program_of(config, turns=turns), "local", tmp_path, Watch(killer.done, act, seconds=90))
    assert watch.reason == "until" and killer.kills == 4
    assert sum(page["restarts"] for page in watch.final.values()) >= 4
    assert not [event for event in watch.events if event["kind"] == "error"], "a check failed in a role"


def dies(me, life: int) -> bool:
    return me.index == 0 and me.incarnation == life


class MortalProducer(Producer):
    """Dies once with a request written and not sent, once with it sent and not answered."""

    async def step(self):
        if self.me.incarnation < 2 and self.next % 10**7 > 30:
            draft = await self.inserts.slot()
            draft.data["items"]["id"][:], draft.data["priority"][:] = POISON, 1e9
            if dies(self.me, 1):
                draft.data["items"]["id"][:] = ids = np.arange(self.next, self.next + self.config.insert_batch)
                draft.data["items"]["nest"]["x"][:], draft.data["priority"][:] = (ids % 1000)[:, None] + [0, 1, 2], ids + FIRST
                draft.data["items"]["screen"][:] = screens(ids)
                draft.send()
            os.kill(os.getpid(), signal.SIGKILL)
        await super().step()


class MortalReplay(CheckedReplay):
    """Dies with items in the table whose sender was not told; then with a batch drawn and not sent."""

    def _answer_added(self):
        if dies(self.me, 0) and self.limiter.samples > 200:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._answer_added()

    def _sample(self, request):
        if dies(self.me, 1) and self.limiter.inserts > 100:
            self.core.try_sample("replay", self.config.batch_size, Block(request.answer["items"]))
            os.kill(os.getpid(), signal.SIGKILL)
        super()._sample(request)


class MortalConsumer(Consumer):
    """Dies with a batch whose priorities nobody has heard; then with them written into a question and not sent."""

    async def step(self):
        await super().step()
        if self.me.incarnation < 2 and len(self.ids) > 50:
            if dies(self.me, 1):
                self.samples._give_back()
                draft = await self.samples._client.slot()
                draft.data["count"][0], draft.data["priority"][:] = len(draft.data["key"]), 1e9
            os.kill(os.getpid(), signal.SIGKILL)


def test_deaths_at_bad_moments(tmp_path):
    """What was written and not sent is never seen; every item in the table is whole, once, with a priority of its own."""
    config = ReplayConfig(capacity=300, min_size=60, batch_size=16, insert_batch=10, samples_per_insert=4.0)
    program = program_of(config)
    for name, role in (("producer", MortalProducer), ("replay", MortalReplay), ("consumer", MortalConsumer)):
        program.nodes[name].role = role
    died, after = {"producer-0": 2, "replay-0": 2, "consumer-0": 2}, []

    def until(control):
        pages = control.snapshot()
        if not after and all(pages[name]["restarts"] == deaths for name, deaths in died.items()):
            after.append(control.total("learner_steps"))
        return after and control.total("learner_steps") > after[0] + 50

    watch = go(program, "local", tmp_path, Watch(until, seconds=90))
    assert watch.reason == "until", {name: page["restarts"] for name, page in watch.final.items()}
    assert not [event for event in watch.events if event["kind"] == "error"], "a check failed in a role"


@pytest.mark.parametrize(("change", "words"), [
    ({"capacity": 10}, "min-size 1000 is above --replay.capacity 10"),
    ({"samples_per_insert": 0.0}, "must be above 0, or none"),
    ({"samples_per_insert": None, "tolerance": 3.0}, "bounds nothing"),
    ({"batch_size": 0}, "--replay.batch-size is 0"),
    ({"exponent": -1.0}, "--replay.exponent is -1.0"),
])
def test_wrong_values_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        ReplayConfig(**change).validate()


def test_tolerance_that_blocks_both_sides():
    """A tolerance that could block both sides is refused."""
    with pytest.raises(ConfigError, match="could block both sides"):
        ReplayConfig(batch_size=64, insert_batch=50, samples_per_insert=8.0, tolerance=100).band(2)
