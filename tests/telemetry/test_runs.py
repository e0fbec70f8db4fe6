"""What real runs report: metrics of every role that a program has, and of none that it has not."""

import shoal
from shoal.architectures.actor_learner import ActorLearner
from shoal.telemetry.metrics import Metric
from shoal.telemetry.outputs import read_lines

QUICK = {"runtime": "inline", "actors": 1, "console.mode": "none", "tensorboard": False, "eval.enabled": False, "net.hidden": (4,),
         "architecture.envs_per_actor": 2}
REPLAY = {"replay_size", "replay_bytes", "replay_checkpoint_bytes", "insert_blocked_seconds", "sample_blocked_seconds"}


def last(run: shoal.Run) -> dict:
    return [row for row in read_lines(run.directory / "metrics.jsonl") if row["kind"] == "snapshot"][-1]


def test_only_replay_reports_a_table(tmp_path):
    """A run with replay reports its table and others do not."""
    dqn = shoal.train("dqn", "CartPole-v1", run_dir=str(tmp_path / "dqn"), max_env_steps=400, **QUICK)
    shown = last(dqn)
    assert shown.keys() >= REPLAY and 0 < shown["replay_size"] <= shown["replay_inserts"] and "demo_size" not in shown
    on = last(shoal.resume(dqn.directory, max_env_steps=800))
    assert on["sample_blocked_seconds"] >= shown["sample_blocked_seconds"], "a counter goes on where the first part ended"
    ppo = last(shoal.train("ppo", "CartPole-v1", run_dir=str(tmp_path / "ppo"), max_env_steps=400, **QUICK))
    assert not ppo.keys() & (REPLAY | {"demo_size", "gradient_age", "role_metrics"})
    assert ppo["losses"].keys() >= {"policy_loss", "entropy"} and shown["losses"].keys() >= {"q_mean", "td_error"}
    assert not ppo["losses"].keys() & {"q_mean", "q_max", "td_error"} and not shown["losses"].keys() & {"policy_loss", "entropy"}


def test_losses_of_a_worker(tmp_path):
    """Losses of a worker that does not count updates itself."""
    run = shoal.train(algorithm="a2c", architecture="async_gradients", env="CartPole-v1", run_dir=str(tmp_path / "run"),
                      max_learner_steps=20, **QUICK, **{"architecture.mode": "master"})
    shown = last(run)
    assert shown["learner_steps"] >= 20 and shown["losses"]["entropy"] > 0 and shown["losses"]["loss"] != 0


class Looker:
    """A role that only measures."""

    def __init__(self, me):
        self.me = me

    async def step(self):
        self.me.stats.set("looked", 7.0)
        self.me.stats.observe("width", 3.0)


class Looked(ActorLearner):
    name = "looked"

    def draw(self, program, parts, config):
        super().draw(program, parts, config)
        program.metrics += (Metric("looked", "gauge", "", "A gauge."), Metric("width", "mean", "", "A mean."))
        program.add("looker", Looker)


def test_gauges_and_means_of_a_role(tmp_path):
    """Gauges and means of a role have a key of their own."""
    run = shoal.train(algorithm="a2c", architecture=Looked, env="CartPole-v1", run_dir=str(tmp_path / "run"), max_env_steps=400,
                      **QUICK)
    shown = last(run)
    assert shown["role_metrics"] == {"looked": 7.0, "width": 3.0} and not shown["losses"].keys() & {"looked", "width"}
