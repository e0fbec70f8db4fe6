"""`--actors auto`: the candidates keep the batch, and the fastest one is what the run gets."""

import pytest

import shoal
from shoal.coordination import calibration
from shoal.coordination.calibration import Layout, Trial, candidates
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
