"""What a step costs is measured where it decides anything, and once; made-up machines, real environments."""

from __future__ import annotations

import pytest

from shoal.errors import ConfigError
from shoal.experiment.parse import parse_train
from shoal.experiment.prepare import plan_to_json
from shoal.experiment.run import plan_of
from shoal.experiment.sizing import Machine, sizing_lines
from shoal.experiment.step_cost import _kept, costs_file
from tests.experiment.slow_envs import MADE, Broken, Hanging, Quick, Slow

SLOW, QUICK, BROKEN, HANGING = (f"tests.experiment.slow_envs:{one.__name__}" for one in (Slow, Quick, Broken, Hanging))
LAPTOP, MIDDLE, LARGE = Machine(2), Machine(8), Machine(16, 1)


@pytest.fixture
def on(monkeypatch, tmp_path):
    """Call it to be on another machine, with a cache of its own; returns how many environments have been made since."""
    made = tmp_path / "made"
    monkeypatch.setenv(MADE, str(made))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))

    def there(machine: Machine):
        made.write_bytes(b"")
        _kept.cache_clear()  # as in another process
        monkeypatch.setattr("shoal.experiment.sizing.machine_here", lambda: machine)
        monkeypatch.setattr("shoal.experiment.sizing.os.sched_getaffinity", lambda pid: set(range(machine.cores)))
        return lambda: len(made.read_bytes())
    return there


def same_but_env(*plans):
    return [{**plan_to_json(plan), "env": None} for plan in plans]


def test_slow_environment_takes_the_machine(on):
    """It has an actor for each core that is free; a quick one has the numbers of a small machine, and so has a small machine."""
    on(LAPTOP)
    small = parse_train(["impala", SLOW])
    on(MIDDLE)
    slow, quick = parse_train(["impala", SLOW]), parse_train(["impala", QUICK])
    assert slow.experiment.actors == 6 > quick.experiment.actors == small.experiment.actors
    assert slow.experiment.algorithm == small.experiment.algorithm and slow.slots_per_batch == small.slots_per_batch
    assert same_but_env(quick) == same_but_env(small)
    text = " ".join(sizing_lines(slow))
    assert "6 actors" in text and "a step of Slow takes " in text and "--actors N" in text
    assert list(sizing_lines(quick)) == []


@pytest.mark.parametrize("preset", ["ppo", "a2c"])
def test_rows_are_dealt_out(on, preset):
    """Workers that take turns with the trainer have the same rows in all, on more cores."""
    on(LAPTOP)
    small = plan_of(preset, Slow, None, None, {}).experiment
    on(MIDDLE)
    spread = plan_of(preset, Slow, None, None, {}).experiment
    rows = [one.actors * one.architecture.envs_per_actor for one in (small, spread)]
    assert rows[0] == rows[1] and spread.actors > small.actors and spread.learner_threads == 1


def test_vectors_stay_on_the_cpu(on):
    """A GPU and threads are for images."""
    on(LARGE)
    vectors, images = (plan_of("impala", SLOW, None, None, {"envs.kwargs": (f"images={images}",)}) for images in (False, True))
    assert vectors.sizing.machine == Machine(16) and images.sizing.machine == LARGE
    assert vectors.experiment.actors == images.experiment.actors == 14
    on(Machine(16))
    threads = [plan_of("impala", SLOW, None, None, {"envs.kwargs": (f"images={images}",)}).experiment.learner_threads
               for images in (False, True)]
    assert threads == [1, 4]


def test_measured_once(on):
    """The next start reads what was measured; other arguments are another environment."""
    made = on(MIDDLE)
    first = parse_train(["impala", SLOW])
    assert made() == 1 and costs_file().exists()
    made = on(MIDDLE)
    assert parse_train(["impala", SLOW]).experiment == first.experiment and made() == 0
    assert parse_train(["impala", SLOW, "--envs.kwargs", "ms=3"]).sizing.step_seconds > 2.9e-3 and made() == 1
    costs_file().write_text('{"damaged')
    made = on(MIDDLE)
    assert parse_train(["impala", SLOW]).experiment == first.experiment and made() == 1


def test_environment_that_hangs(on):
    on(MIDDLE)
    with pytest.raises(ConfigError, match="took longer than 0"):
        parse_train(["impala", HANGING, "--faults.start-seconds", "0.2"])


@pytest.mark.parametrize("words", [("impala", SLOW, "--runtime", "inline"), ("impala", SLOW, "--cores", "4"), ("sac", SLOW),
                                   ("gala", SLOW), ("impala", "CartPole-v1"), ("impala", "shoal/Catch-v0")])
def test_not_measured_where_it_decides_nothing(on, words, monkeypatch):
    def never(*given):
        raise AssertionError("it was measured")

    monkeypatch.setattr("shoal.experiment.sizing.step_cost", never)
    made = on(MIDDLE)
    parse_train(list(words))
    assert made() == 0


def test_what_is_given_wins(on):
    on(MIDDLE)
    assert parse_train(["impala", SLOW, "--actors", "3"]).experiment.actors == 3
    assert plan_of("impala", Slow, None, None, {"actors": 3}).experiment.actors == 3


def test_environment_that_fails(on):
    """Sizing leaves it to those who make it next to say why."""
    on(MIDDLE)
    assert parse_train(["impala", BROKEN]).sizing.machine is None
    made = on(MIDDLE)
    assert plan_of("impala", lambda: Slow(), None, None, {}).experiment.actors == 6  # no name to be kept under
    assert made() == 1 and not costs_file().exists()
