"""The verdict sentence of real runs on the local runtime, whose parts are made slow by sleeping."""

import time

import pytest

from evidence.sleepers import NET, SILENT, Sleeper, learns, slow, thinks
from shoal.algorithms import dqn, vtrace
from shoal.roles.parts import EnvSource
from shoal.roles.replay_config import ReplayConfig
from shoal.telemetry.snapshot import Reading, ReadingWindow
from shoal.telemetry.verdict import verdict
from tests.architectures.graphs import Weights, draw, go

SETTLED, LOOK_SECONDS, MEASURE_SECONDS, AGREEING = 3, 0.15, 0.8, 3


class Judge(Weights):
    """Judges the time since the third update, again and again, until the sentence begins as expected a few times in a row."""

    def __init__(self, expected):
        super().__init__(seconds=60)
        self.expected, self.window, self.since, self.said, self.next = expected, ReadingWindow(), 0.0, [], 0.0

    def tick(self, control):
        super().tick(control)
        now = time.monotonic()
        if control.total("learner_steps") < SETTLED or now < self.next:
            return
        self.since, self.next = self.since or now, now + LOOK_SECONDS
        wires = control.wires()
        self.window.sample_occupancy(now, wires)
        self.window.push(Reading(now, control.snapshot(), wires))
        if now - self.since >= MEASURE_SECONDS:
            self.said.append(verdict({**self.window.snapshot(), **control.surroundings()}, seconds=60.0))
            if all(text.startswith(self.expected) for text in self.said[-AGREEING:]) and len(self.said) >= AGREEING:
                control.stop("agreed")


def publishes(role):
    return role.weights, "publish"


def pulls(role):
    return role.weights, "pull"


def stores(role):
    return role, "_store"


def draws(role):
    return role, "_gather"


CASES = {  # architecture, seconds of an environment's step, steps of an unroll, who sleeps where and how long, in words
    "actor-bound": ("actor_learner", 0.02, 5, {}, "the learner idled"),
    "learner-bound": ("actor_learner", 0.0, 5, {"learner": (learns, 0.06)}, "blocked on a full queue"),
    "inference-bound": ("central_inference", 0.0, 5, {"inference": (thinks, 0.03)}, "the inference server worked"),
    "inference-bound, two groups": ("central_inference", 0.01, 5, {"inference": (thinks, 0.03)}, "the inference server worked"),
    "weight-bound": ("actor_learner", 0.0, 5, {"learner": (publishes, 0.06)}, "publishing weights"),
    "weight-bound, pulling": ("actor_learner", 0.0, 5, {"actor": (pulls, 0.06)}, "pulling weights"),
    "balanced": ("actor_learner", 0.1, 2, {"learner": (learns, 0.19)}, "held up"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_bottleneck_gets_its_sentence(case, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.runtime.core_use.STAT", tmp_path / "none")  # what else runs on this machine is not judged here
    architecture, env_seconds, unroll, sleeps, words = CASES[case]
    env = EnvSource(Sleeper, kwargs={"seconds": env_seconds})
    program, _ = draw(vtrace.Config(unroll=unroll), architecture, env, actors=2, net=NET, eval=SILENT, envs_per_actor=1,
                      batch_slots=2)
    for name, (where, seconds) in sleeps.items():
        program.nodes[name].role = slow(program.nodes[name].role, seconds, where)
    judge = Judge(case.partition(",")[0])
    go(program, "local", tmp_path, judge)
    assert judge.reason == "agreed", judge.said[-5:]
    assert words in judge.said[-1]


@pytest.mark.parametrize("where", [stores, draws], ids=["inserts", "samples"])
def test_saturated_replay_table(where, tmp_path, monkeypatch):
    """A replay table that can do no more is named."""
    monkeypatch.setattr("shoal.runtime.core_use.STAT", tmp_path / "none")
    kept = ReplayConfig(capacity=500, min_size=10, batch_size=4, insert_batch=2, samples_per_insert=2.0, prefetch=4)
    program, _ = draw(dqn.Config(), "actor_learner", EnvSource(Sleeper), actors=2, net=NET, eval=SILENT, envs_per_actor=1,
                      replay=kept)
    program.nodes["replay"].role = slow(program.nodes["replay"].role, 0.05, where)
    judge = Judge("replay-bound")
    go(program, "local", tmp_path, judge)
    assert judge.reason == "agreed", judge.said[-5:]
    assert "the replay table worked" in judge.said[-1] and "--replay.shards" in judge.said[-1] and "--actors" not in judge.said[-1]
