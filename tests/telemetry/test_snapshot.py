"""Rates, shares and the recent return are differences between readings, and nothing else."""

import math

import pytest

from shoal.telemetry.snapshot import Reading, Window, group_of
from tests.telemetry.fakes import WIRES, Pages, second


def run(seconds: int, window: Window | None = None, **kwargs: float) -> tuple[Window, Pages]:
    pages, window = Pages("actor-0", "actor-1", "learner-0"), window or Window()
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


def test_the_books_of_all_streams_are_one_line():
    window, pages = run(2, busy=0.5)
    wires = {"a": {"slots": 4.0, "occupied": 1.0, "written": 9.0, "consumed": 6.0, "dropped": 2.0, "conserved": 1.0},
             "b": {"slots": 2.0, "occupied": 0.0, "written": 3.0, "consumed": 3.0, "dropped": 0.0, "conserved": 1.0},
             "c": {"version": 7.0, "conserved": 1.0}}
    window.push(Reading(3.0, pages.read(), wires))
    assert window.snapshot()["slots"] == {"written": 12, "consumed": 9, "dropped": 2, "held": 1, "conserved": True}
    wires["b"]["conserved"] = 0.0
    assert not window.snapshot()["slots"]["conserved"]


def test_bytes_are_counted_per_decision_since_the_first_one():
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


def test_recent_return_is_that_of_about_the_last_hundred_episodes():
    window, pages = run(1, busy=0.5)
    for t in range(2, 40):
        for _ in range(20):
            pages["actor-0"].observe("episode_return", float(t))
            pages["actor-1"].observe("episode_return", float(t))
        window.push(Reading(float(t), pages.read(), WIRES))
    assert window.snapshot()["train_return"] == pytest.approx((39 + 38 + 37) / 3)


def test_nothing_observed_is_nan_not_zero():
    pages, window = Pages("actor-0"), Window()
    window.push(Reading(0.0, pages.read(), WIRES))
    shot = window.snapshot()
    for name in ("train_return", "eval_return", "learner_idle", "env_steps_per_second", "samples_per_insert"):
        assert math.isnan(shot[name]), name


def test_an_evaluation_of_zero_is_a_return_of_zero():
    pages, window = Pages("evaluator-0"), Window()
    pages["evaluator-0"].set("eval_episodes", 20)
    window.push(Reading(0.0, pages.read(), WIRES))
    assert window.snapshot()["eval_return"] == 0.0


def test_occupancy_is_weighted_by_time():
    window = Window()
    window.push(Reading(0.0, {}, WIRES))
    for now, occupied in ((0.0, 0.0), (3.0, 4.0), (4.0, 0.0)):
        window.sample_occupancy(now, {"unrolls": {"slots": 4.0, "occupied": occupied}})
    assert window.snapshot(whole_run=True)["wires"]["unrolls"]["occupancy"] == pytest.approx(0.75)


def test_replicas_that_do_not_run_do_not_dilute_shares():
    pages, window = Pages("actor-0", "actor-1", "actor-2", "learner-0"), Window()
    pages["actor-2"].set("alive", 0)
    second(pages, busy=0.5)
    window.push(Reading(0.0, pages.read(), WIRES))
    second(pages, busy=0.5)
    window.push(Reading(1.0, pages.read(), WIRES))
    assert window.snapshot()["roles"]["actor"]["busy"] == pytest.approx(1.0)
