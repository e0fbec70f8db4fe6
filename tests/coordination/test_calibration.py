"""`--actors auto`: the candidates keep the batch, and the fastest one is what the run gets."""

import pytest

import shoal
from shoal.architectures import actor_learner
from shoal.coordination import calibration
from shoal.coordination.calibration import Layout, Trial, candidates
from shoal.errors import ConfigError
from shoal.experiment import layout as layouts
from shoal.experiment.run import plan_of


@pytest.mark.parametrize(("rows", "cores"), [(1024, 1), (1024, 2), (16, 16), (7, 2), (96, 3)])
def test_every_candidate_has_the_rows_of_the_batch_and_the_cores_of_the_machine(rows, cores):
    found = candidates(rows, cores)
    assert len(set(found)) == len(found)
    for layout in found:
        assert layout.actors * layout.envs_per_actor == rows
        assert layout.learners * layout.learner_threads <= cores and layout.actors % layout.learners == 0
    assert Layout(1, rows, True, 1) in found  # everything in one process
    assert (Layout(cores, rows // cores, True, 1, cores) in found) == (rows % cores == 0)  # one like it on every core


@pytest.mark.parametrize("winner", [Layout(1, 16, True, 2), Layout(2, 8, True, 1, 2), Layout(2, 8, False, 1)])
def test_the_fastest_is_taken_and_the_batch_stays(winner, monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda *_: [Trial(winner, 2.0), Trial(Layout(1, 16, True, 1), 1.0)])
    monkeypatch.setattr("shoal.coordination.calibrate", calibration.calibrate)
    plan = plan_of("impala", "CartPole-v1", None, None, {"actors": "auto", "architecture.envs_per_actor": 8})
    experiment = layouts.laid_out(plan, lambda line: None).experiment
    architecture = experiment.architecture
    assert experiment.learners * architecture.batch_slots * architecture.envs_per_actor == 16
    chosen = Layout(experiment.actors, architecture.envs_per_actor, architecture.one_place, experiment.learner_threads,
                    experiment.learners)
    assert chosen == winner


def test_a_real_calibration_tries_them_all_and_the_run_uses_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibration, "TRIAL_SECONDS", 0.1)
    run = shoal.train("ppo", "shoal/Catch-v0", actors="auto", max_env_steps=500, run_dir=str(tmp_path / "run"),
                      **{"eval.enabled": False, "console.mode": "plain", "tensorboard": False})
    said = capsys.readouterr().out
    plan = run.prepared.plan.experiment
    rows = plan.actors * plan.architecture.envs_per_actor
    assert said.count("env steps/s\n") >= len(candidates(rows, 1)) and "failed" not in said
    chosen = Layout(plan.actors, plan.architecture.envs_per_actor, plan.architecture.one_place, plan.learner_threads, plan.learners)
    assert f"chosen: {chosen}" in said


def test_what_was_asked_for_stays(monkeypatch):
    tried = []
    monkeypatch.setattr("shoal.coordination.calibrate", lambda layouts, *_: tried.extend(layouts) or [Trial(layouts[0], 1.0)])
    plan = plan_of("impala", "CartPole-v1", None, None, {"actors": "auto", "architecture.one_place": True, "learners": 2})
    monkeypatch.setattr(layouts.os, "sched_getaffinity", lambda _: {0, 1})
    experiment = layouts.laid_out(plan, lambda line: None).experiment
    assert tried and all(layout.one_place and layout.actors >= 2 for layout in tried)
    assert (experiment.learners, experiment.architecture.one_place) == (2, True)
    monkeypatch.setattr(layouts.os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(ConfigError, match="2 learners on 1 cores: there is nothing to choose from; give --actors 2"):
        layouts.laid_out(plan, lambda line: None)


def test_ctrl_c_in_a_trial_ends_the_command(monkeypatch):
    ran = []

    def interrupted(program, session, *_, **__):
        ran.append(program)
        return "interrupt"

    monkeypatch.setattr(calibration, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibration.calibrate(candidates(8, 2), lambda layout: layout, print, nursery=object())
    assert len(ran) == 1


@pytest.mark.parametrize("reuse", [0.0, -1.0, float("nan"), float("inf")])
def test_a_reuse_that_is_no_number_of_times_is_refused(reuse):
    with pytest.raises(ConfigError, match="reuse is"):
        actor_learner.Config(reuse=reuse, buffer_slots=8).validate()
