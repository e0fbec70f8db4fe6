"""Relabelling between named tables: QT-Opt's graph, who counts and who does not, the share of new data, logs, kills."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import shoal
from shoal import algorithms, cli, envs
from shoal.acting import Progress
from shoal.algorithms import qtopt
from shoal.envs.experts import explore_grasps
from shoal.errors import ConfigError
from shoal.nets import NetConfig
from shoal.offline import DemoWriter, open_demos
from shoal.offline.joined_recordings import recordings_in
from shoal.roles.learner import Learner
from shoal.roles.log_reader import LogReader
from shoal.roles.parts import EnvSource, Parts
from shoal.roles.recording_env import check_log
from shoal.roles.relabel import Relabel, ShareRamp
from shoal.roles.replay import Replay
from shoal.roles.replay_config import ReplayConfig
from shoal.roles.replay_wires import replay_wires, samples_wire
from shoal.runtime import Program
from shoal.runtime.instance import RoleContext
from shoal.slots import InlineAllocator, leaves
from shoal.telemetry.outputs import read_lines
from tests.architectures.graphs import COUNTS, NeverBackwards, Weights, WorksAgain, counted, draw, go
from tests.architectures.replay_table import Consumer, FakeParts, Producer, done
from tests.offline.recordings import recorded
from tests.runtime.harness import Files, Killer, Saver

GRASP = "shoal/PointGrasp-v0"
NET = NetConfig(hidden=(16, 16), activation="relu")
ALGORITHM = qtopt.Config(cem_samples=8, cem_elites=2, lag_updates=20, lag_snapshot_updates=5)
SMALL = ReplayConfig(capacity=400, min_size=50, batch_size=16, insert_batch=10, samples_per_insert=4.0, exponent=0.0)
TABLES = {"updater_batch": 20, "train_capacity": 200, "train_min_size": 40, "train_samples_per_insert": 4.0}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return str(recorded(tmp_path_factory.mktemp("logs") / "grasps", GRASP, 40, expert=explore_grasps))


def drawn(logs=None, offline=False, updaters=1, actors=1, **options):
    program, _ = draw(ALGORITHM, "qtopt", GRASP, actors=actors, net=NET, replay=SMALL, demos=logs, offline=offline,
                      updaters=updaters, **{**TABLES, **options})
    return program


def stopped_after(program, updates):
    node = program.nodes["learner"]
    node.role = counted(node.role, updates, COUNTS[Learner])
    return program


def ran(program, folder):
    """Inline, with time enough to compile kernels on a busy machine."""
    return go(program, "inline", folder, Weights(seconds=120))


# ---------------------------------------------------------------------------------------------- the graph
def test_offline_a_recording_is_all_there_is(logs, tmp_path):
    program = stopped_after(drawn(logs, offline=True), 60)
    assert set(program.nodes) == {"log_reader", "replay_offline", "updater", "replay_train", "learner"}
    watch = ran(program, tmp_path)
    page = watch.final
    assert watch.reason == "counted" and np.isfinite(watch.published["params"]).all()
    assert Progress.of(watch.published["progress"]).env_steps == 0, "recorded steps are not env_steps"
    relabelled, drawn_raw = page["updater-0"]["relabelled"], page["replay_offline-0"]["replay_offline_samples"]
    assert page["replay_train-0"]["replay_train_inserts"] <= relabelled <= drawn_raw <= relabelled + 2 * 20
    assert page["replay_train-0"]["replay_train_samples"] >= 60 * SMALL.batch_size
    assert page["log_reader-0"]["log_episodes"] > 0 and page["learner-0"]["label_lag/count"] > 0


class Spy(Relabel):
    """Keeps what it has put into the second table."""

    seen: list = []  # noqa: RUF012  of this test's one instance

    def _join(self, asked, replies):
        items, keys = super()._join(asked, replies)
        Spy.seen.append((items["weights_version"].copy(), keys.copy(), self.progress.learner_steps))
        return items, keys


def test_online_draws_from_both_tables(logs, tmp_path):
    """Online, both tables are drawn from, and env_steps reach the learner."""
    program = stopped_after(drawn(logs, online_start=0.2, online_final=0.6, online_updates=100, online_after=0), 300)
    program.nodes["updater"].role, Spy.seen = Spy, []
    watch = ran(program, tmp_path)
    own = {late: np.concatenate([versions >= 0 for versions, _, step in Spy.seen if (step >= 100) is late])
           for late in (False, True)}
    spread = 5 * np.sqrt(0.24 / len(own[True]))
    assert abs(own[True].mean() - 0.6) < spread, "the share is one of draws, after the ramp"
    assert 0.2 < own[False].mean() < 0.6
    learned = Progress.of(watch.published["progress"]).env_steps
    acted = watch.final["actor-0"]["env_steps"]
    assert 0 < learned <= acted and learned >= acted - 200, "all but what is still on its way"


def test_without_a_recording(tmp_path):
    """Without a recording updaters draw from the actors alone."""
    program = stopped_after(drawn(updaters=2), 40)
    assert "replay_offline" not in program.nodes and program.nodes["updater"].most == 2
    watch = ran(program, tmp_path)
    assert watch.reason == "counted" and Progress.of(watch.published["progress"]).env_steps > 0


def test_same_seed_gives_the_same_weights(logs, tmp_path):
    one, other = (ran(stopped_after(drawn(logs), 40), tmp_path / str(k)) for k in range(2))
    assert one.hash == other.hash


def test_share_rises_from_where_actors_began():
    ramp = ShareRamp(0.01, 0.5, 3000, after=5000)
    shares = [ramp.at(Progress(0, updates)) for updates in (0, 5000, 6500, 8000, 20000)]
    assert shares == pytest.approx([0.01, 0.01, 0.255, 0.5, 0.5])


def test_keys_of_relabelled_items(logs, tmp_path):
    """Relabelled items carry the key of the item they were made of."""
    kept = {}

    class Keeper(Replay):
        def _store(self, data, *given):
            for key, reward in zip(data["items"]["key"].tolist(), data["items"]["action"].tolist(), strict=True):
                assert kept.setdefault(key, reward) == reward, "a key stands for two items"
            return super()._store(data, *given)

    program = stopped_after(drawn(logs, offline=True), 30)
    program.nodes["replay_train"].role = Keeper
    ran(program, tmp_path)
    assert len(kept) > 50 and all(key >> 40 for key in kept), "keys of a life of the first table"


# ---------------------------------------------------------------------------------------------- who counts
def test_uncounted_reader():
    """A reader that does not count takes neither env_steps nor its share of the limiter."""
    config = ReplayConfig(capacity=100, min_size=10, batch_size=4, insert_batch=10, samples_per_insert=1.0, tolerance=14)
    program, parts = Program("t", store=Files()), FakeParts(config, 1)
    inserts, samples = replay_wires(program, parts)
    beside = samples_wire(program, parts, False, counted=False)
    program.add("replay", Replay, parts=parts, inserts=inserts.server, samples=samples.server, uncounted=beside.server)
    program.add("producer", Producer, parts=parts, inserts=inserts.client)
    for name, wire in (("consumer", samples), ("other", beside)):
        program.add(name, Consumer, parts=parts, samples=wire.client)
    program.build(InlineAllocator())
    node = program.nodes["replay"]
    ends = {name: port.wire.attach("server", 0, 0) for name, port in node.ports.items()}
    role = Replay(RoleContext(program, "replay", 0, 0, print), **{**node.arguments, **ends})
    actor, learner, other = (wire.attach("client", 0, 0) for wire in (inserts, samples, beside))

    def ask(client):
        draft = done(client.slot())
        draft.data["count"][0], draft.data["wanted"][0], draft.data["trim"][0] = 0, 4, False
        return draft.send()

    def serve():
        with pytest.raises(StopIteration):
            role.step().send(None)

    early = ask(other)
    serve()
    assert not early.answered().ready(), "nobody draws before the table is filled"
    draft = done(actor.slot())
    draft.data["items"]["id"][:], draft.data["priority"][:], draft.data["decisions"][0] = np.arange(1, 11), 1.0, 10
    draft.send()
    serve()
    pending = early
    for _ in range(20):  # 80 draws, where the learner may make a few
        reply = done(pending.result())
        pending = ask(other)
        serve()
        assert reply["fresh"][0] == 0 and np.isin(reply["key"], role.table.keys()).all()
    assert role.limiter.samples == 0 and role.limiter.reserved == 0
    pending = ask(learner)
    serve()
    assert done(pending.result())["fresh"][0] == 10 and role.limiter.samples == 4
    assert role.me.stats.get("uncounted_samples") == 84 and role.me.stats.get("replay_samples") == 4


# ---------------------------------------------------------------------------------------------- logs
def stream_of(logs, seed, inserts=30, epochs=1):
    source = EnvSource(GRASP)
    parts = Parts(algorithms.make(ALGORITHM, envs.describe(GRASP), NET, 4), source, 4, seed=seed, replay=SMALL)
    reader = LogReader(SimpleNamespace(index=0, incarnation=0, stats=SimpleNamespace(add=lambda *_: None)), parts, logs,
                       SimpleNamespace(depth=2))
    digest = hashlib.sha256()
    for _ in range(inserts):
        items, _ = next(reader.items)
        for path, leaf in leaves(items):
            if path != ("time",):
                digest.update(np.ascontiguousarray(leaf).tobytes())
    assert reader.epoch[0] >= epochs
    return digest.hexdigest()


def test_same_logs_and_seed(logs):
    """The same logs and seed give the same stream."""
    assert stream_of(logs, 1) == stream_of(logs, 1) != stream_of(logs, 2)


def test_transitions_stay_in_their_episode(logs):
    """Transitions of a log never reach into another episode."""
    source = EnvSource(GRASP)
    parts = Parts(algorithms.make(ALGORITHM, envs.describe(GRASP), NET, 4), source, 4, replay=SMALL)
    reader = LogReader(SimpleNamespace(index=0, incarnation=0, stats=SimpleNamespace(add=lambda *_: None)), parts, logs,
                       SimpleNamespace(depth=2))
    for _ in range(20):
        items, _ = next(reader.items)
        goes_on = items["discount"] > 0
        now, following = items["observation"][goes_on], items["next_observation"][goes_on]
        assert np.array_equal(now[:, 2:4], following[:, 2:4]), "the object stays where it is within an episode"
        assert np.allclose(following[:, 4], now[:, 4] + 0.1)


# ---------------------------------------------------------------------------------------------- collectors that write logs
def test_log_of_a_killed_collector(tmp_path):
    """What a killed collector has logged can be read and its successor adds to it."""
    logs, killer, known = tmp_path / "collected", Killer(("actor-0",), 1, progress="recorded_episodes", every=40), []

    def act(control):
        if killer.kills and not known:
            known.append(open_demos(logs).info.episodes)
        if killer.kills or recordings_in(logs):  # it has written a file
            killer(control)

    watch = go(drawn(record=str(logs)), "local", tmp_path, Weights(killer.done, act, seconds=240))
    assert watch.reason == "until" and killer.kills == 1
    demos = open_demos(logs)
    whole = list(demos.episodes())
    assert len(whole) == demos.info.episodes > known[0] > 0
    assert [made["incarnation"] for made in demos.info.made] == [0, 1]
    for number in (0, known[0], len(whole) - 1):
        assert np.array_equal(demos.episode(number).observation, whole[number].observation)
    assert len(stream_of(str(logs), 1, epochs=0)) == 64, "a log reader plays it, however long it is"
    with pytest.raises(ConfigError, match="holds recordings of shoal/PointGrasp-v0, not of Pendulum-v1; give another folder"):
        check_log(str(logs), EnvSource("Pendulum-v1"))


# ---------------------------------------------------------------------------------------------- kills
OWN = {"updater-0": "relabelled", "replay_train-0": "replay_train_inserts", "log_reader-0": "log_episodes",
       "replay_offline-0": "replay_offline_samples", "replay_online-0": "replay_online_inserts", "actor-0": "env_steps",
       "learner-0": "learner_steps"}
VICTIMS = tuple(OWN)


@pytest.mark.parametrize("victims", [VICTIMS[:3], pytest.param(VICTIMS * 2, marks=pytest.mark.slow)], ids=["some", "all"])
def test_training_goes_on_after_kills(victims, logs, tmp_path):
    """Training goes on after a kill, whoever was killed works again, and no counter runs backwards."""
    killer, save = Killer(victims, times=len(victims), progress="learner_steps", every=40), Saver(tmp_path, every=50)
    again = WorksAgain(killer, OWN)
    counts = NeverBackwards("env_steps", "learner_steps", "relabelled", "log_episodes", "replay_train_inserts",
                            "replay_online_inserts", "replay_offline_samples")

    def act(control):
        counts(control)
        save(control)
        again(control)

    watch = go(drawn(logs, updaters=2), "local", tmp_path, Weights(again.done, act, seconds=240))
    assert watch.reason == "until" and killer.kills == len(victims), (watch.reason, killer.kills, counts.highest)
    assert not [event for event in watch.events if event["kind"] == "error"]
    assert sum(page["restarts"] for page in watch.final.values()) >= len(victims)


# ---------------------------------------------------------------------------------------------- the command line
QUICK = ["--console.mode", "none", "--no-tensorboard", "--runtime", "inline", "--eval.episodes", "2",
         "--algorithm.cem-samples", "8",
         "--architecture.updater-batch", "20", "--architecture.train-min-size", "100", "--replay.min-size", "100",
         "--replay.batch-size", "16", "--net.hidden", "16", "16"]


def check_best(run, before):
    """What is loaded is the best of all versions, those from before and after going online."""
    rows = [row for row in read_lines(run / "metrics.jsonl") if row["kind"] == "snapshot" and row["eval_return"] is not None]
    after, summary = shoal.load(run).choice, json.loads((run / "summary.json").read_text())
    assert rows[-1]["eval_version"] > before.version and after.name == summary["policy"] == "best"
    assert after.version == summary["policy_version"] and after.eval_return == pytest.approx(summary["eval_return"])
    assert after.eval_return >= max(before.eval_return, *(row["eval_return"] - 1e-6 for row in rows))


def test_record_learn_offline_then_go_online(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "record", "scripted", GRASP, "--episodes", "30", "--out", "logs"]) == 0
    assert cli.main(["train", "qtopt", GRASP, "--demos", "logs", "--offline", "--run-dir", "run", "--max-learner-steps", "30",
                     *QUICK]) == 0
    assert cli.main(["resume", "run", "--online"]) == 2
    assert "give a larger --max-learner-steps" in capsys.readouterr().err
    before = shoal.load("run").choice
    assert cli.main(["resume", "run", "--online", "--max-learner-steps", "90", "--console.mode", "none"]) == 0
    check_best(tmp_path / "run", before)
    run = json.loads((tmp_path / "run" / "config.json").read_text())
    assert run["offline"] is False and 30 <= run["architecture"]["online_after"] < 40 and run["demos"] == str(tmp_path / "logs")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["env_steps"] > 0
    assert cli.main(["resume", "run", "--online", "--max-learner-steps", "200"]) == 2
    assert "is online already" in capsys.readouterr().err
    assert cli.main(["eval", "run", "--episodes", "3"]) == 0


@pytest.mark.parametrize(("words", "sentence"), [
    (["train", "--algorithm", "dqn", "--architecture", "qtopt", "shoal/Catch-v0"], "dqn has nothing to compute there"),
    (["train", "qtopt", "CartPole-v1"], "it searches among continuous actions"),
    (["train", "qtopt", GRASP, "--replay.shards", "2"], "--replay.shards 2 with --architecture qtopt does not fit"),
    (["train", "qtopt", GRASP, "--demos", "cue"], "does not fit shoal/PointGrasp-v0"),
    (["train", "qtopt", GRASP, "--offline"], "give --demos PATH"),
    (["train", "--algorithm", "qtopt", "--architecture", "parameter_server", GRASP], "take its target nets instead"),
    (["data", "record", "scripted", "Acrobot-v1"], "Acrobot-v1 has no registered expert"),
    (["data", "record", "skripted", GRASP], "did you mean scripted"),
])
def test_what_does_not_fit(words, sentence, tmp_path, monkeypatch, capsys):
    """What does not fit is refused with one sentence."""
    monkeypatch.chdir(tmp_path)
    if "cue" in words:
        recorded(tmp_path / "cue", "shoal/CueLure-v0", 4)
    assert cli.main([*words, *(["--console.mode", "none"] if words[0] == "train" else [])]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1
    assert not os.path.exists("runs"), "nothing was written"


def torn(logs, name):
    os.truncate(logs / name, 100)


def foreign(logs, name):
    """A file of another recording under its name."""
    shutil.copy(recorded(logs.parent / "other", GRASP, 20, seed=5) / name, logs / name)


@pytest.mark.parametrize(("spoil", "sentence"), [(torn, "has 100 of"), (foreign, "; copy the recording again")])
def test_spoilt_shard(spoil, sentence, tmp_path, monkeypatch, capsys):
    """A shard that is torn, or another recording's, is found before anything starts."""
    monkeypatch.chdir(tmp_path)
    logs = recorded(tmp_path / "logs", GRASP, 20, expert=explore_grasps)
    with DemoWriter.create(logs, open_demos(logs).info, {"source": "more"}, append=True) as writer:
        writer.add(next(open_demos(logs).episodes()))
    words = ["train", "qtopt", GRASP, "--demos", "logs", "--offline", "--run-dir", "run", "--max-learner-steps", "5", *QUICK]
    spoil(logs, "episodes-000000.safetensors")
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1 and not os.path.exists("run")
