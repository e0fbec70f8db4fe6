"""Rates, shares and the recent return are differences between readings, and nothing else."""

import math

import numpy as np
import pytest

from shoal.telemetry.metrics import REGISTRY, Metric, Stats
from shoal.telemetry.snapshot import LATEST, SHOWN_AS, Reading, ReadingWindow, group_of
from tests.telemetry.fakes import WIRES, Pages, second


def run(seconds: int, window: ReadingWindow | None = None, **kwargs: float) -> tuple[ReadingWindow, Pages]:
    pages, window = Pages("actor-0", "actor-1", "learner-0"), window or ReadingWindow()
    window.push(Reading(-9.0, pages.read(), WIRES))  # start-up, before the first environment step, counts for nothing
    second(pages, busy=0.0)
    window.push(Reading(0.0, pages.read(), WIRES))
    for t in range(1, seconds + 1):
        second(pages, **kwargs)
        window.push(Reading(float(t), pages.read(), WIRES))
    return window, pages


def test_instances_are_grouped_by_role():
    assert [group_of(name) for name in ("actor-3", "inference-server-0", "odd")] == ["actor", "inference-server", "odd"]


def test_rates_shares_and_totals():
    shot = run(10, busy=0.75, blocked=0.5)[0].snapshot()
    assert shot["env_steps"] == 11000 and shot["env_steps_per_second"] == pytest.approx(1000)
    assert shot["learner_steps_per_second"] == pytest.approx(10)
    assert shot["learner_idle"] == pytest.approx(0.25)
    assert shot["roles"]["actor"]["waits"]["unrolls"] == pytest.approx(0.5)
    assert shot["roles"]["actor"]["instances"] == 2
    assert shot["roles"]["learner"]["phases"]["learn"] == pytest.approx(0.75)
    assert shot["policy_lag"] == {"mean": 1.0, "p95": 1.0, "max": 1.0}
    assert shot["data_age_seconds"]["mean"] == pytest.approx(0.1)
    assert shot["samples_per_insert"] == pytest.approx(1.0)


def test_busy_share_is_at_most_one():
    """A step counts when it ends; it may have begun before the window."""
    window, pages = run(2, busy=0.5)
    pages["learner-0"].add("busy_seconds", 40.0)
    window.push(Reading(3.0, pages.read(), WIRES))
    assert window.snapshot()["roles"]["learner"]["busy"] == 1.0


def test_books_of_all_streams_are_one_line():
    window, pages = run(2, busy=0.5)
    wires = {"a": {"slots": 4.0, "occupied": 1.0, "written": 9.0, "consumed": 6.0, "dropped": 2.0, "conserved": 1.0},
             "b": {"slots": 2.0, "occupied": 0.0, "written": 3.0, "consumed": 3.0, "dropped": 0.0, "conserved": 1.0},
             "c": {"version": 7.0, "conserved": 1.0}}
    window.push(Reading(3.0, pages.read(), wires))
    assert window.snapshot()["slots"] == {"written": 12, "consumed": 9, "dropped": 2, "held": 1, "conserved": True}
    wires["b"]["conserved"] = 0.0
    assert not window.snapshot()["slots"]["conserved"]


def test_bytes_per_decision():
    """Bytes are counted per decision since the first one."""
    window, pages = run(2, busy=0.5)  # 3000 decisions by now, 1000 of them at the first reading that saw any
    window.push(Reading(3.0, pages.read(), {"unrolls": {"bytes_moved": 5000.0}, "weights": {"bytes_moved": 3000.0}}))
    assert window.snapshot(whole_run=True)["bytes_per_env_step"] == pytest.approx(8000 / 2000)


def test_the_window_slides():
    window, pages = run(30, busy=0.2)
    for t in range(31, 121):
        second(pages, busy=0.9, steps=4000)
        window.push(Reading(float(t), pages.read(), WIRES))
    shot, whole = window.snapshot(), window.snapshot(whole_run=True)
    assert shot["env_steps_per_second"] == pytest.approx(4000) and shot["window_seconds"] == pytest.approx(60)
    assert shot["learner_idle"] == pytest.approx(0.1)
    assert whole["learner_idle"] == pytest.approx((30 * 0.8 + 90 * 0.1) / 120) and whole["window_seconds"] == 120


def test_recent_return():
    """Recent return is that of about the last hundred episodes."""
    window, pages = run(1, busy=0.5)
    for t in range(2, 40):
        for _ in range(20):
            pages["actor-0"].observe("episode_return", float(t))
            pages["actor-1"].observe("episode_return", float(t))
        window.push(Reading(float(t), pages.read(), WIRES))
    assert window.snapshot()["train_return"] == pytest.approx((39 + 38 + 37) / 3)


def test_nothing_observed_is_nan_not_zero():
    pages, window = Pages("actor-0"), ReadingWindow()
    window.push(Reading(0.0, pages.read(), WIRES))
    shot = window.snapshot()
    for name in ("train_return", "eval_return", "learner_idle", "env_steps_per_second", "samples_per_insert"):
        assert math.isnan(shot[name]), name


def test_evaluation_of_zero():
    """An evaluation of zero is a return of zero."""
    pages, window = Pages("evaluator-0"), ReadingWindow()
    pages["evaluator-0"].set("eval_episodes", 20)
    window.push(Reading(0.0, pages.read(), WIRES))
    assert window.snapshot()["eval_return"] == 0.0


def test_occupancy_is_weighted_by_time():
    window = ReadingWindow()
    window.push(Reading(0.0, {}, WIRES))
    for now, occupied in ((0.0, 0.0), (3.0, 4.0), (4.0, 0.0)):
        window.sample_occupancy(now, {"unrolls": {"slots": 4.0, "occupied": occupied}})
    assert window.snapshot(whole_run=True)["wires"]["unrolls"]["occupancy"] == pytest.approx(0.75)


def test_replicas_that_do_not_run():
    """Replicas that do not run do not dilute shares."""
    pages, window = Pages("actor-0", "actor-1", "actor-2", "learner-0"), ReadingWindow()
    pages["actor-2"].set("alive", 0)
    second(pages, busy=0.5)
    window.push(Reading(0.0, pages.read(), WIRES))
    second(pages, busy=0.5)
    window.push(Reading(1.0, pages.read(), WIRES))
    assert window.snapshot()["roles"]["actor"]["busy"] == pytest.approx(1.0)


def test_snapshot_has_what_is_declared():
    """A snapshot has what the program declares and nothing else."""
    declared = [Metric("my_loss", "gauge", "", "A gauge."), Metric("my_mean", "mean", "", "A mean."),
                Metric("my_count", "counter", "", "A counter."), Metric("my_sizes", "histogram", "", "Sizes.", (1, 2, 4))]
    names, window = Stats.names(metrics=declared), ReadingWindow(algorithm_metrics=declared)
    stats = Stats(names, np.zeros(len(names)), declared)
    stats.add("learner_steps")
    stats.set("my_loss", 3.0)
    stats.observe("my_mean", 5.0)
    stats.add("my_count", 7)
    stats.observe("my_sizes", np.array([1, 4]))
    window.push(Reading(0.0, {"learner-0": stats.read()}, WIRES))
    shot = window.snapshot()
    assert shot["losses"] == {"my_loss": 3.0, "my_mean": 5.0}
    assert shot["my_count"] == 7 and shot["my_sizes"] == {"mean": 2.5, "p95": 4.0, "max": 4.0}


def gauges(values: dict[str, dict[str, float]], declared: list[Metric], dead: tuple[str, ...] = ()) -> dict[str, dict[str, float]]:
    """Pages of instances that have set these gauges."""
    names, pages = Stats.names(metrics=declared), {}
    for instance, written in values.items():
        stats = Stats(names, np.zeros(len(names)), declared)
        stats.set("alive", instance not in dead)
        for name, value in written.items():
            stats.set(name, value)
        pages[instance] = stats.read()
    return pages


def test_gauge_of_the_instance_that_set_it():
    """A gauge is read from the instance that set it."""
    depth = Metric("depth", "gauge", "", "A role's.")
    loss = [Metric(name, "gauge", "", "An algorithm's.") for name in ("loss", "clip")]
    window = ReadingWindow(algorithm_metrics=loss, role_metrics=[depth])

    def shot(time: float, dead: tuple[str, ...] = (), **values: dict[str, float]) -> dict:
        pages = {name.replace("_", "-"): written for name, written in values.items()}
        window.push(Reading(time, gauges(pages, [depth, *loss], dead), WIRES))
        return window.snapshot()

    learner, workers = {"learner_steps": 3}, {"worker_0": {"loss": 2.0}, "worker_1": {"loss": 1.0, "clip": 0.5}}
    first = shot(0.0, learner_0=learner, sampler_0={}, sampler_1={})
    assert math.isnan(first["role_metrics"]["depth"]) and math.isnan(first["losses"]["loss"])
    second = shot(1.0, learner_0=learner, sampler_0={}, sampler_1={"depth": 7.0}, **workers)
    assert second["role_metrics"] == {"depth": 7.0} and "depth" not in second["losses"]
    assert second["losses"] == {"loss": 2.0, "clip": 0.0}, "of one instance, though another has a larger clip"
    emptied = shot(2.0, learner_0=learner, sampler_0={"depth": 4.0}, sampler_1={"depth": 0.0}, **workers)
    assert emptied["role_metrics"] == {"depth": 0.0}
    died = shot(3.0, ("sampler-1",), learner_0=learner, sampler_0={"depth": 4.0}, sampler_1={"depth": 0.0}, **workers)
    assert died["role_metrics"] == {"depth": 4.0}
    ended = shot(4.0, ("sampler-0", "sampler-1"), sampler_0={"depth": 4.0}, sampler_1={"depth": 0.0}, learner_0=learner, **workers)
    assert ended["role_metrics"] == {"depth": 4.0}, "a run that has ended shows its last values"


def test_every_metric_is_shown():
    pages, window = Pages("everything-0"), ReadingWindow()
    for metric in REGISTRY:
        for word in metric.words():
            pages["everything-0"].set(word, 2.5)
    window.push(Reading(0.0, pages.read(), WIRES))
    shot = window.snapshot()
    assert {metric.name for metric in REGISTRY} == {name for name in shot if name in {m.name for m in REGISTRY}} | set(SHOWN_AS)
    assert not set(SHOWN_AS) & set(shot) and set(LATEST) <= set(shot)
    assert shot["insert_blocked_seconds"] == 2.5 and shot["gradient_age"]["mean"] == 1.0


def test_replay_table_and_shards():
    """What belongs to a replay table is shown where there is one and shards are added."""
    own = {metric.name for metric in REGISTRY if metric.measured_by}
    assert own >= {"replay_size", "replay_bytes", "replay_checkpoint_bytes", "insert_blocked_seconds", "demo_size", "gradient_age"}
    assert not own & set(run(3, busy=0.5)[0].snapshot())
    pages, window = Pages("replay-0", "replay-1"), ReadingWindow()
    pages["replay-0"].set("replay_size", 100)
    pages["replay-1"].set("replay_size", 50)
    pages["replay-1"].add("sample_blocked_seconds", 0.25)
    window.push(Reading(0.0, pages.read(), WIRES))
    shot = window.snapshot()
    assert (shot["replay_size"], shot["replay_checkpoint_bytes"], shot["sample_blocked_seconds"]) == (150, 0, 0.25)
    assert "demo_size" not in shot and "gradient_age" not in shot


def test_first_rates():
    """The first rates do not count the time of starting up."""
    shot = run(2, busy=0.5)[0].snapshot()  # ten seconds back lies before the first environment step
    assert shot["env_steps_per_second"] == pytest.approx(1000) and shot["learner_steps_per_second"] == pytest.approx(10)
