"""`--actors auto`: the candidates keep the batch, and the fastest one is what the run gets."""

import json

import pytest

import shoal
from shoal import cli
from shoal.architectures import actor_learner
from shoal.coordination import calibration
from shoal.coordination.calibration import ActorLayout, Trial, candidates
from shoal.errors import ConfigError, ShoalError
from shoal.experiment import auto_layout as layouts
from shoal.experiment.calibration_cache import cache_file
from shoal.experiment.run import plan_of
from shoal.runtime import Faults
from shoal.telemetry.outputs import read_lines


@pytest.mark.parametrize(("rows", "cores"), [(1024, 1), (1024, 2), (16, 16), (7, 2), (96, 3)])
def test_candidates(rows, cores):
    """Every candidate has the rows of the batch and the cores of the machine."""
    found = candidates(rows, cores)
    assert len(set(found)) == len(found)
    for layout in found:
        assert layout.actors * layout.envs_per_actor == rows
        assert layout.learners * layout.learner_threads <= cores and layout.actors % layout.learners == 0
    assert ActorLayout(1, rows, True, 1) in found  # everything in one process
    assert (ActorLayout(cores, rows // cores, True, 1, cores) in found) == (rows % cores == 0)  # one like it on every core


@pytest.mark.parametrize("winner", [ActorLayout(1, 16, True, 2), ActorLayout(2, 8, True, 1, 2), ActorLayout(2, 8, False, 1)])
def test_fastest_keeps_the_batch(winner, monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda *_: [Trial(winner, 2.0), Trial(ActorLayout(1, 16, True, 1), 1.0)])
    monkeypatch.setattr("shoal.coordination.calibrate", calibration.calibrate)
    plan = plan_of("impala", "CartPole-v1", None, None, {"actors": "auto", "architecture.envs_per_actor": 8})
    experiment = layouts.laid_out(plan, lambda line: None).experiment
    architecture = experiment.architecture
    assert experiment.learners * architecture.batch_slots * architecture.envs_per_actor == 16
    chosen = ActorLayout(experiment.actors, architecture.envs_per_actor, architecture.one_place, experiment.learner_threads,
                    experiment.learners)
    assert chosen == winner


def test_real_calibration(tmp_path, monkeypatch, capsys):
    """A real calibration tries them all and the run uses one."""
    monkeypatch.setattr(calibration, "TRIAL_SECONDS", 0.1)
    run = shoal.train("ppo", "shoal/Catch-v0", actors="auto", max_env_steps=500, run_dir=str(tmp_path / "run"),
                      **{"algorithm.unroll": 16, "eval.enabled": False, "console.mode": "plain", "tensorboard": False})
    said = capsys.readouterr().out
    plan = run.prepared.plan.experiment
    rows = plan.actors * plan.architecture.envs_per_actor
    assert said.count("env steps/s\n") >= len(candidates(rows, 1)) and "failed" not in said
    architecture = plan.architecture
    chosen = ActorLayout(plan.actors, architecture.envs_per_actor, architecture.one_place, plan.learner_threads, plan.learners)
    assert f"chosen: {chosen}, by trying (--actors auto)" in said and f"· {chosen} · seed" in said
    layout = json.loads((tmp_path / "run" / "summary.json").read_text())["layout"]
    assert layout["chosen"] == next(iter(layout["tried"])) == str(chosen) and layout["how"] == "by trying"
    assert list(layout["tried"].values()) == sorted(layout["tried"].values(), reverse=True)
    (event,) = [row for row in read_lines(tmp_path / "run" / "metrics.jsonl") if row.get("event") == "layout"]
    assert str(chosen) in event["text"]
    again = shoal.resume(run.directory, max_env_steps=run.summary["env_steps"] + 1, runtime="inline")
    assert again.summary["layout"] == layout
    assert "layout" not in {row.get("event") for row in read_lines(run.directory / "metrics.jsonl")[-3:]}


class Trials:
    """Runs of layouts that are only numbers: by the number of actors, None for one that fails."""

    def __init__(self, monkeypatch, rates):
        self.rates, self.faults = rates, []
        monkeypatch.setattr(calibration, "run", self)

    def __call__(self, program, session, kind, folder, faults=None, *_):
        self.faults.append(faults)
        rate = self.rates[program.actors]
        if rate is None:
            raise ShoalError("it broke")
        session.rate = rate
        return "measured" if rate else "slow"

    def found(self, **more):
        said = []
        trials = calibration.calibrate([ActorLayout(n, 8 // n, False, 1) for n in self.rates], lambda layout: layout, said.append,
                                       fork_server=object(), **more)
        return [trial.layout.actors for trial in trials], "\n".join(said)


def test_trials_have_the_faults_of_the_run(monkeypatch):
    trials, faults = Trials(monkeypatch, {1: 5.0, 2: 1.0}), Faults(start_seconds=1000.0)
    assert trials.found(faults=faults)[0] == [1, 2] and trials.faults == [faults] * 2
    seen = []
    monkeypatch.setattr("shoal.coordination.calibrate", lambda layouts, draw, say, faults, *_: seen.append(faults) or [])
    layouts.laid_out(plan_of("impala", "CartPole-v1", None, None, {"actors": "auto", "faults.start_seconds": 77.0}), print)
    assert seen == [Faults(start_seconds=77.0)]


def test_a_rate_of_nothing_is_no_measurement(monkeypatch):
    found, said = Trials(monkeypatch, {1: 0.0, 2: 3.0, 4: None}).found()
    assert found == [2] and "1 actor of 8 environments in processes of their own: not measured" in said and "it broke" in said
    assert "0 env steps/s" not in said
    assert Trials(monkeypatch, {1: 0.0, 2: None}).found()[0] == []
    with pytest.raises(ShoalError, match="no layout could be run"):
        Trials(monkeypatch, {1: None, 2: None}).found()


def test_nothing_can_be_measured(monkeypatch):
    """Where nothing can be measured the number of cores decides, and the run says so."""
    monkeypatch.setattr("shoal.coordination.calibrate", lambda *_: [])
    said = []
    plan = layouts.laid_out(plan_of("impala", "CartPole-v1", None, None, {"actors": "auto"}), said.append)
    assert plan.experiment.actors == plan_of("impala", "CartPole-v1", None, None, {}).actor_count
    assert plan.found.how == "by the number of cores" and plan.found.tried == {}
    assert any("no layout could be measured" in line for line in said)


@pytest.mark.parametrize(("layout", "words"), [
    (ActorLayout(1, 16, True, 2), "1 actor of 16 environments in the learner's process, learner with 2 threads"),
    (ActorLayout(2, 8, True, 1, 2), "2 processes, each with a learner and 1 actor of 8 environments"),
    (ActorLayout(4, 8, False, 1, 2), "4 actors of 8 environments in processes of their own, 2 learners"),
    (ActorLayout(2, 8, False, 1, inline=True), "2 actors of 8 environments in one thread"),
    (ActorLayout(0, 1024, False, 2), "no actors: the learner itself acts in 1024 environments, learner with 2 threads")])
def test_a_layout_in_words(layout, words):
    assert str(layout) == words


@pytest.mark.parametrize(("preset", "runtime", "words"), [
    ("anakin", "local", "no actors: the learner itself acts in 1024 environments, as the architecture has it"),
    ("impala", "inline", "in one thread, by the number of cores")])
def test_layout_without_trials(preset, runtime, words):
    """Where nothing is tried the run says which layout it has."""
    plan = plan_of(preset, "CartPole-v1", None, None, {"actors": "auto", "runtime": runtime})
    found = layouts.laid_out(plan, lambda line: None).found
    assert f"{found.chosen}, {found.how}".endswith(words)


def test_what_was_asked_for_stays(monkeypatch):
    tried = []
    monkeypatch.setattr("shoal.coordination.calibrate", lambda layouts, *_: tried.extend(layouts) or [Trial(layouts[0], 1.0)])
    plan = plan_of("impala", "CartPole-v1", None, None, {"actors": "auto", "architecture.one_place": True, "learners": 2})
    monkeypatch.setattr(layouts.os, "sched_getaffinity", lambda _: {0, 1})
    experiment = layouts.laid_out(plan, lambda line: None).experiment
    assert tried and all(layout.one_place and layout.actors >= 2 for layout in tried)
    assert (experiment.learners, experiment.architecture.one_place) == (2, True)
    monkeypatch.setattr(layouts.os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(ConfigError, match=r"no layout to choose from with .*, 2 learners and 1 cores; give --actors 2"):
        layouts.laid_out(plan, lambda line: None)


def test_ctrl_c_in_a_trial_ends_the_command(monkeypatch):
    ran = []

    def interrupted(program, session, *_, **__):
        ran.append(program)
        return "interrupt"

    monkeypatch.setattr(calibration, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibration.calibrate(candidates(8, 2), lambda layout: layout, print, fork_server=object())
    assert len(ran) == 1


@pytest.mark.parametrize("reuse", [0.0, -1.0, float("nan"), float("inf")])
def test_senseless_reuse(reuse):
    """A senseless number for reuse is refused."""
    with pytest.raises(ConfigError, match="reuse is"):
        actor_learner.Config(reuse=reuse, buffer_slots=8).validate()


# ---------------------------------------------------------------------------------------------- what is kept
@pytest.fixture
def measured(monkeypatch, tmp_path):
    """An empty cache, and trials that are counted instead of run."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    calls = []

    def calibrate(layouts, *_):
        calls.append(layouts)
        return [Trial(layout, 100.0 - at) for at, layout in enumerate(layouts)]

    monkeypatch.setattr("shoal.coordination.calibrate", calibrate)
    return calls


def test_calibration_is_kept(measured, capsys):
    """What was calibrated is not tried again and holds for the same values only."""
    assert cli.main(["calibrate", "CartPole-v1", "impala"]) == 0
    said = capsys.readouterr().out
    assert len(measured) == 1 and "kept in" in said and "--actors auto" in said
    plan = layouts.laid_out(plan_of("impala", "CartPole-v1", None, None, {"actors": "auto", "seed": 5, "until_return": 9.0}), print)
    assert len(measured) == 1 and "shoal calibrate" in plan.found.how and plan.found.chosen in said
    for other in ({"net.hidden": (8,)}, {"cores": 1}, {"algorithm.unroll": 7}):
        layouts.laid_out(plan_of("impala", "CartPole-v1", None, None, {"actors": "auto", **other}), print)
    layouts.laid_out(plan_of("impala", "Acrobot-v1", None, None, {"actors": "auto"}), print)
    assert len(measured) == 5
    assert cli.main(["calibrate", "CartPole-v1"]) == 0
    assert len(measured) == 6, "asked to measure, it measures"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 3}'])
def test_a_damaged_cache_is_measured_anew(text, measured):
    cli.main(["calibrate", "CartPole-v1", "impala"])
    entry = json.loads(cache_file().read_text())
    cache_file().write_text(text or json.dumps({key: {"date": "x", "tried": [{"actors": 1}]} for key in entry}))
    layouts.laid_out(plan_of("impala", "CartPole-v1", None, None, {"actors": "auto"}), print)
    assert len(measured) == 2


@pytest.mark.parametrize(("words", "said"), [
    ([], "which environment"), (["CartPole-v1", "apex"], "nothing to calibrate for apex: --algorithm dqn learns from a replay"),
    (["CartPole-v1", "a3c"], "nothing to calibrate for a3c"), (["CartPole-v1", "impala", "--runtime", "inline"], "one thread")])
def test_what_cannot_be_calibrated_is_said(words, said, measured, capsys):
    assert cli.main(["calibrate", *words]) == 2 and not measured
    assert said in capsys.readouterr().err
