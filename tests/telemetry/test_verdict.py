"""One sentence for each situation, and it changes when the situation does."""

import pytest

from shoal.telemetry.snapshot import Reading, ReadingWindow
from shoal.telemetry.verdict import verdict
from tests.telemetry.fakes import WIRES, Pages, second


def judged(wires: dict | None = None, runtime: str = "local", cores: int = 8, seconds: float = 5.0,
           **kwargs: float) -> str:
    pages, window = Pages("actor-0", "actor-1", "learner-0"), ReadingWindow()
    window.push(Reading(0.0, pages.read(), wires or WIRES))
    for t in range(1, 6):
        second(pages, **kwargs)
        window.push(Reading(float(t), pages.read(), wires or WIRES))
    return verdict(window.snapshot(), seconds, runtime, cores)


def test_learner_bound():
    """Learner bound names the share and the knob."""
    text = judged(busy=0.98, blocked=0.63)
    assert text.startswith("learner-bound") and "63 %" in text and "--actors" in text


def test_actor_bound_with_cores_to_spare():
    """Actor bound with cores to spare wants more actors."""
    text = judged(busy=0.3)
    assert text.startswith("actor-bound") and "70 %" in text and "more --actors" in text


def test_actor_bound_without_cores_does_not():
    text = judged(busy=0.3, cores=2)
    assert text.startswith("actor-bound") and "all 2 cores are busy" in text and "more --actors" not in text


def test_evaluations_on_a_scarce_core():
    """Evaluations that eat a scarce core are named."""
    pages, window = Pages("actor-0", "actor-1", "learner-0", "evaluator-0"), ReadingWindow()
    for t in range(6):
        second(pages, busy=0.3, blocked=0.3)
        pages["evaluator-0"].add("busy_seconds", 0.8)
        pages["evaluator-0"].add("phase_seconds/evaluate", 0.8)
        window.push(Reading(float(t), pages.read(), WIRES))
    text = verdict(window.snapshot(), 5.0, "local", 2)
    assert "80 % of one with evaluations" in text and "--eval.every-env-steps" in text


@pytest.mark.parametrize(("relabelling", "bound"), [(0.9, True), (0.1, False)])
def test_relabel_bound(relabelling, bound):
    """A learner that waits for items to be recomputed is relabel-bound."""
    pages, window = Pages("actor-0", "actor-1", "learner-0", "updater-0"), ReadingWindow()
    for t in range(6):
        second(pages, busy=0.3)
        pages["updater-0"].add("relabelled", 256)
        pages["updater-0"].add("busy_seconds", relabelling)
        pages["updater-0"].add("phase_seconds/inference", relabelling)
        window.push(Reading(float(t), pages.read(), WIRES))
    text = verdict(window.snapshot(), 5.0, "local", 8)
    assert text.startswith("relabel-bound") is bound and ("--architecture.updaters" in text) is bound


def test_actors_wait_for_weights():
    """Weight bound when actors wait for weights that nobody makes."""
    assert judged(busy=0.3, weights=0.6).startswith("weight-bound")


def test_taking_turns_is_not_weight_bound():
    assert judged(busy=0.3, weights=0.6, lag=0.0).startswith("actor-bound")


@pytest.mark.parametrize(("publishing", "lag"), [(0.6, 1.0), (0.6, 0.0), (0.3, 1.0)])
def test_learner_that_mostly_publishes(publishing, lag):
    """A learner that publishes more than it learns is weight bound."""
    pages, window = Pages("actor-0", "actor-1", "learner-0"), ReadingWindow()
    for t in range(6):
        second(pages, busy=0.9, weights=0.7, lag=lag)
        pages["learner-0"].add("phase_seconds/publish", publishing)
        window.push(Reading(float(t), pages.read(), WIRES))
    text = verdict(window.snapshot(), 5.0, "local", 8)
    assert text.startswith("weight-bound" if publishing > 0.5 else "learner-bound"), text


def published(idle: float, cores: int, used: float | None) -> str:
    """A learner that publishes for longer than it learns, and the cores that the kernel says are in use."""
    pages, window = Pages("actor-0", "actor-1", "learner-0"), ReadingWindow()
    for t in range(6):
        second(pages, busy=1 - idle, blocked=0.1)
        pages["learner-0"].add("phase_seconds/publish", 0.8 * (1 - idle))
        window.push(Reading(float(t), pages.read(), WIRES))
    shot = window.snapshot() if used is None else {**window.snapshot(), "cores_busy": used}
    return verdict(shot, 5.0, "local", cores)


@pytest.mark.parametrize(("idle", "word"), [(0.3, "actor-bound"), (0.1, "balanced")])
def test_publishing_on_full_cores(idle, word):
    """The kernel gives the learner's core to those it wakes up: the time is theirs."""
    text = published(idle, cores=2, used=1.95)
    assert text.startswith(word) and "all 2 cores are busy" in text and "publishing took" in text
    assert published(idle, cores=2, used=1.0).startswith("weight-bound")  # roles that sleep are busy, their cores are not
    assert published(idle, cores=8, used=None).startswith("weight-bound")


def test_environments_that_sleep():
    """Environments that sleep leave cores for more actors."""
    pages, window = Pages("actor-0", "actor-1", "learner-0"), ReadingWindow()
    for t in range(6):
        second(pages, busy=0.3)
        window.push(Reading(float(t), pages.read(), WIRES))
    text = verdict({**window.snapshot(), "cores_busy": 0.4}, 5.0, "local", 2)
    assert text.startswith("actor-bound") and "more --actors" in text


def test_cores_of_other_programs():
    """Cores that other programs have taken leave none for more actors."""
    pages, window = Pages("actor-0", "actor-1", "learner-0"), ReadingWindow()
    for t in range(6):
        second(pages, busy=0.05, blocked=0.9)
        window.push(Reading(float(t), pages.read(), WIRES))
    text = verdict({**window.snapshot(), "cores_busy": 1.95}, 5.0, "local", 2)
    assert text.startswith("actor-bound") and "all 2 cores are busy" in text and "more --actors" not in text


def test_actors_that_mostly_pull():
    """Actors that spend their time pulling are weight bound."""
    pages, window = Pages("actor-0", "actor-1", "learner-0"), ReadingWindow()
    for t in range(6):
        second(pages, busy=0.3)
        for name in ("actor-0", "actor-1"):
            pages[name].add("phase_seconds/pull", 0.6)
        window.push(Reading(float(t), pages.read(), WIRES))
    assert "60 %" in (text := verdict(window.snapshot(), 5.0, "local", 8)) and text.startswith("weight-bound")


def test_inference_bound():
    wires = {"unrolls": WIRES["unrolls"], "weights": {"asked": 0.0}}  # what actors wait on is a call
    assert judged(wires, busy=0.3, weights=0.6).startswith("inference-bound")


def test_actors_held_back_by_replay():
    """Actors that a replay table holds back are not waiting for inference."""
    pages, window = Pages("actor-0", "actor-1", "learner-0", "replay-0"), ReadingWindow()
    wires = {"unrolls": {"asked": 0.0}, "weights": WIRES["weights"]}
    for t in range(6):
        second(pages, busy=0.95, blocked=0.6)
        pages["replay-0"].add("replay_inserts", 100)
        window.push(Reading(float(t), pages.read(), wires))
    text = verdict(window.snapshot(), 5.0, "local", 8)
    assert text.startswith("learner-bound: actors were held back by replay 60 %") and "--replay.samples-per-insert" in text


def test_saturated_table_on_full_cores():
    """A table that is saturated on cores that are full needs less work."""
    pages, window = Pages("actor-0", "actor-1", "learner-0", "replay-0"), ReadingWindow()
    for t in range(6):
        second(pages, busy=0.3, blocked=0.1)
        for name, share in (("replay_inserts", 100), ("phase_seconds/gather", 0.9), ("busy_seconds", 0.95)):
            pages["replay-0"].add(name, share)
        window.push(Reading(float(t), pages.read(), {"unrolls": {"asked": 0.0}, "weights": WIRES["weights"]}))
    text = verdict({**window.snapshot(), "cores_busy": 8.0}, 5.0, "local", 8)
    assert text.startswith("replay-bound: the replay table worked 95 %") and "--replay.shards" not in text
    assert "--replay.shards" in verdict({**window.snapshot(), "cores_busy": 4.0}, 5.0, "local", 8)


def test_balanced():
    assert judged(busy=0.9, blocked=0.1).startswith("balanced")


@pytest.mark.parametrize("seconds", [0.0, 2.9])
def test_no_verdict_at_first(seconds):
    assert judged(busy=0.9, seconds=seconds) == "warming up"


def test_inline_says_who_had_the_thread():
    text = judged(busy=0.4, runtime="inline")
    assert text.startswith("one thread") and "learner 40 %" in text and "--runtime local" in text
