"""dqn through actors, replay and learner: exact where it can be exact, and whole after kills."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import shoal
from shoal import cli
from shoal.algorithms import dqn, r2d2
from shoal.experiment.checkpoints import TensorFiles
from shoal.nets import NetConfig
from shoal.roles.learner import Learner
from shoal.roles.replay import Replay, items_layout
from shoal.roles.replay_config import ReplayConfig
from shoal.slots import map_tree
from tests.architectures.graphs import Weights, draw, go, train
from tests.runtime.harness import Files, Killer, Saver

APEX = dqn.Config(n_step=3, dueling=True, loss="squared", exploration="ladder", epsilon=0.4, target_period_updates=10)
PLAIN = dqn.Config(double=False, epsilon_steps=500, target_period_updates=10)
RAINBOW = dqn.Config(n_step=3, dueling=True, atoms=11, noisy_sigma=0.5, epsilon=0.0, epsilon_final=0.0, target_period_updates=10)
TURNS = ReplayConfig(capacity=400, min_size=64, batch_size=16, insert_batch=4, samples_per_insert=4.0, exponent=0.0)
RATIO = ReplayConfig(capacity=400, min_size=64, batch_size=16, insert_batch=10, samples_per_insert=4.0, trim_updates=5)
CATCH, TMAZE = "shoal/Catch-v0", "shoal/TMaze-v0"
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16, prev_action_reward=True)
R2D2 = r2d2.Config(burn_in=2, length=4, stride=2, lr=1e-3, target_period_updates=10)


@pytest.mark.parametrize(("architecture", "algorithm", "replay"), [
    ("synchronous", PLAIN, TURNS), ("actor_learner", APEX, RATIO), ("actor_learner", R2D2, RATIO),
    ("central_inference", R2D2, RATIO), ("actor_learner", RAINBOW, RATIO), ("central_inference", RAINBOW, RATIO)])
def test_the_same_seed_gives_the_same_bits(architecture, algorithm, replay, tmp_path):
    env, net = (TMAZE, LSTM) if algorithm is R2D2 else (CATCH, None)
    options = {"actors": 2, "updates": 30, "replay": replay, "net": net}
    first, again = (train(tmp_path, algorithm, architecture, env, "inline", **options) for _ in range(2))
    other = train(tmp_path, algorithm, architecture, env, "inline", seed=8, **options)
    assert first.reason == "counted" and first.hash == again.hash != other.hash


def test_in_turns_bits_of_one_thread(tmp_path):
    """In turns, processes compute the bits of one thread."""
    inline, local = (train(tmp_path, PLAIN, "synchronous", CATCH, kind, updates=40, replay=TURNS) for kind in ("inline", "local"))
    assert inline.reason == local.reason == "counted" and inline.hash == local.hash


def test_in_turns_newest_weights(tmp_path):
    """An item is finished one act after it was begun, so the newest ones are one publication old, or none at an episode's end."""
    seen = []

    class Looking(Replay):
        def _store(self, data, *given):
            seen.append((self.limiter.samples // TURNS.batch_size, data["items"]["weights_version"].copy()))
            return super()._store(data, *given)

    program, _ = draw(PLAIN, "synchronous", CATCH, replay=TURNS)
    program.nodes["replay"].role = Looking
    go(program, "inline", tmp_path, Weights(lambda c: c.total("learner_steps") >= 60))
    ends = [(updates, versions.max()) for updates, versions in seen if updates]
    assert len(ends) > 40 and all(updates <= newest <= updates + 1 for updates, newest in ends)


@pytest.mark.parametrize(("kind", "architecture", "algorithm"), [
    ("inline", "actor_learner", APEX), ("local", "actor_learner", R2D2), ("inline", "central_inference", R2D2),
    ("inline", "central_inference", APEX)])
def test_actor_and_learner_agree(kind, architecture, algorithm, tmp_path,
                                                                                        monkeypatch):
    """They see the same observations, actions and rewards (and, with memory, the same stored state) with the same net, so their
    q-values at every step and their errors agree to 1e-5: a wrong row, action, state, discount or bootstrap would show."""
    env, net = (TMAZE, LSTM) if algorithm is R2D2 else (CATCH, None)
    burn_in = R2D2.burn_in

    class Comparing(Replay):
        first: dict[int, float] = {}  # noqa: RUF012

        def _heed(self, data):
            count = int(data["count"][0])
            for key, new in zip(data["key"][:count].tolist(), data["priority"][:count].tolist(), strict=True):
                old = self.first.get(key)
                assert old is not None and abs(old - new) < 1e-5, f"{old} by the actor, {new} by the learner"
            self.me.stats.add("samples_masked", count)
            super()._heed(data)

        def _store(self, data, *given):
            before = set(self.table.keys().tolist())
            items = super()._store(data, *given)
            new = [key for key in self.table.keys().tolist() if key not in before]
            self.first.update(zip(new, data["priority"].tolist(), strict=True))
            return items

    class Looking(Learner):
        async def _update(self, batch):
            with torch.no_grad():
                if algorithm is R2D2:
                    q = r2d2.WindowErrors(R2D2).unroll(self.learn.model, map_tree(torch.from_numpy, batch)).q[:-1].transpose(0, 1)
                    gap = (q - torch.from_numpy(batch["q"][:, burn_in:-1]))[torch.from_numpy(batch["valid"][:, burn_in:])]
                else:
                    gap = self.learn.model.net(torch.from_numpy(batch["observation"])) - torch.from_numpy(batch["q"])
            assert float(gap.abs().max()) < 1e-5, f"{float(gap.abs().max())} between the actor's q-values and the learner's"
            self.me.stats.add("samples_masked", gap.numel())
            return await super()._update(batch)

    replay = ReplayConfig(capacity=2000, min_size=64, batch_size=16, insert_batch=10, samples_per_insert=4.0)
    record = dqn.DQN.record.func
    monkeypatch.setattr(dqn.DQN, "record", property(
        lambda self: replace(record(self), extras={"q": ((int(self.plan.spec.action_space.n),), "float32")})))
    frozen = replace(algorithm, lr=1e-30, **({"diagnose": True} if algorithm is R2D2 else {}))
    program, _ = draw(frozen, architecture, env, replay=replay, actors=2, net=net)
    program.nodes["replay"].role, program.nodes["learner"].role = Comparing, Looking
    watch = go(program, kind, tmp_path, Weights(lambda c: c.total("learner_steps") >= 50))
    assert watch.reason == "until" and watch.final["replay-0"]["samples_masked"] >= 600
    assert watch.final["learner-0"]["samples_masked"] >= 1000


def test_priorities_of_the_last_batch(tmp_path):
    """Priorities that the learner sends are those of its last batch."""
    learned, drawn, heard = [], [], []

    class Listening(Learner):
        async def _update(self, batch):
            steps = await super()._update(batch)
            learned.append((batch["observation"].copy(), self.learn.priorities.copy()))
            return steps

    class Hearing(Replay):
        def _heed(self, data):
            if count := int(data["count"][0]):
                heard.append((data["key"][:count].copy(), data["priority"][:count].copy()))
            super()._heed(data)

        def _sample(self, request):
            super()._sample(request)
            drawn.append((request.answer["key"].copy(), request.answer["items"].copy()))

    program, parts = draw(APEX, "actor_learner", CATCH, replay=RATIO)
    program.nodes["learner"].role, program.nodes["replay"].role = Listening, Hearing
    go(program, "inline", tmp_path, Weights(lambda c: c.total("learner_steps") >= 50))
    assert len(heard) >= 45
    layout = items_layout(parts.algorithm.record.layout, RATIO.batch_size)
    for (keys, block), (seen, errors), (their_keys, values) in zip(drawn, learned, heard, strict=False):
        np.testing.assert_array_equal(layout.views(block)["observation"], seen)
        np.testing.assert_array_equal(keys, their_keys)
        np.testing.assert_array_equal(errors, values)


@pytest.mark.parametrize(("architecture", "algorithm", "replay"), [
    pytest.param("synchronous", PLAIN, TURNS, marks=pytest.mark.slow), ("actor_learner", APEX, RATIO)])
def test_kill_9_of_each_role(architecture, algorithm, replay, tmp_path):
    """The run goes on after kill -9 of replay, actor and learner."""
    program, _ = draw(algorithm, architecture, CATCH, actors=2, replay=replace(replay, checkpoint=True))
    program.store = Files()
    killer = Killer(("replay-0", "actor-0", "learner-0"), times=3, progress="learner_steps", every=30)
    save = Saver(tmp_path, every=20)

    def act(control):
        save(control)
        killer(control)

    watch = go(program, "local", tmp_path, Weights(killer.done, act, seconds=90))
    assert watch.reason == "until" and killer.kills == 3
    assert np.isfinite(watch.published["params"]).all()
    assert watch.published["progress"][0] <= sum(page["env_steps"] for page in watch.final.values()), "steps were counted twice"


@pytest.mark.parametrize(("words", "sentence"), [
    (["--algorithm", "dqn", "--architecture", "gossip"], "dqn learns from a replay table, and gossip has none"),
    (["--algorithm", "dqn", "--architecture", "synchronous", "--replay.samples-per-insert", "None"], "take turns by it"),
    (["--algorithm", "dqn", "--architecture", "actor_learner", "--architecture.buffer-slots", "8"], "learns from a replay table"),
    (["--algorithm", "dqn", "--architecture", "synchronous", "--learners", "2"], "one learner take turns"),
    (["--algorithm", "dqn", "--architecture", "actor_learner", "--architecture.one-place", "--learners", "2"], "is one process"),
    (["--algorithm", "ppo", "--architecture", "synchronous", "--replay.capacity", "5000"], "has no replay table"),
    (["--algorithm", "dqn", "--architecture", "actor_learner", "--replay.tolerance", "5"], "could block both sides"),
])
def test_senseless_options(words, sentence, capsys):
    """What makes no sense is refused before anything starts."""
    assert cli.main(["show", *words, CATCH, "--actors", "2"]) == 2
    assert sentence in capsys.readouterr().err


def test_the_list_shows_where_replay_is(capsys):
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out.partition("algorithms, the architectures")[2]
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["dqn"][1:8] == ["rep", "rep", "-", "-", "rep", "-", "rep"]


QUICK = ["--runtime", "inline", "--console.mode", "none", "--no-tensorboard", "--eval.episodes", "5", "--replay.min-size", "100"]


@pytest.mark.parametrize("preset", ["dqn", "double_dqn", "dqn_2013", "rainbow", "apex", "r2d2", "seed_r2d2", "gorila"])
def test_every_preset(preset, tmp_path, monkeypatch):
    """Every preset runs, resumes with its table and is evaluated."""
    monkeypatch.chdir(tmp_path)
    env = TMAZE if "r2d2" in preset else CATCH
    assert cli.main(["train", preset, env, "--run-dir", "run", "--max-env-steps", "600", "--replay.checkpoint", *QUICK]) == 0
    assert list((tmp_path / "run" / "checkpoints").glob("*/replay-0.safetensors"))
    assert cli.main(["resume", "run", "--max-env-steps", "1000", "--console.mode", "none"]) == 0
    assert cli.main(["eval", "run", "--episodes", "5"]) == 0


def test_saved_table_is_not_read_to_evaluate(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "dqn", CATCH, "--run-dir", "run", "--max-env-steps", "600", "--replay.checkpoint", *QUICK]) == 0
    table = max((tmp_path / "run" / "checkpoints").glob("*/replay-0.safetensors"))
    with table.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"x" * 100)
    loaded = []
    load = TensorFiles.load
    monkeypatch.setattr(TensorFiles, "load", lambda self, path: loaded.append(path.name) or load(self, path))
    assert cli.main(["eval", "run", "--episodes", "5"]) == 0
    assert loaded and not any(name.startswith("replay") for name in loaded) and not caplog.records
    assert shoal.load("run")._checkpoint.name == table.parent.name
    assert cli.main(["resume", "run", "--max-env-steps", "1000", "--console.mode", "none"]) == 0
    assert any("damaged" in record.getMessage() for record in caplog.records), "who goes on with it looks at it"
