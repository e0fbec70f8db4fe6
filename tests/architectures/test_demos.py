"""Demonstrations beside a table and alone: drawn as often as they should be, cut as an actor cuts, each table its priorities."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shoal import cli, envs
from shoal.acting import Progress
from shoal.algorithms import dqn, r2d2
from shoal.nets import NetConfig
from shoal.offline import DemoWriter, open_demos
from shoal.offline.recording import RecordingOptions, record, recording_info
from shoal.replay.table import fields as k
from shoal.roles.demonstrations import Demonstrations
from shoal.roles.episode_playback import items_of
from shoal.roles.parts import EnvSource, EvalPlan, Parts
from shoal.roles.replay import KEY_SHIFT, Replay
from shoal.roles.replay_config import ReplayConfig
from shoal.slots import leaves
from tests.algorithms.toys import Toy
from tests.architectures.graphs import Weights, draw, go
from tests.offline.recordings import cue, recorded
from tests.runtime.harness import Killer

CUE, LURE = "shoal/CueLure-v0", "shoal/LureChain-v0"
LSTM = NetConfig(hidden=(16,), recurrent="lstm", lstm_size=16, prev_action_reward=True)
R2D2 = r2d2.Config(burn_in=2, length=4, stride=2, lr=1e-3, target_period_updates=10)
SMALL = ReplayConfig(capacity=100, min_size=40, batch_size=16, insert_batch=10, samples_per_insert=4.0, demo_ratio=0.25)


def parts_of(path, replay=SMALL, algorithm=R2D2, env=CUE, net=LSTM):
    source = EnvSource(env)
    return Parts(_algorithm(algorithm, source.describe(), net), source, 4, demos=str(path), replay=replay)


def _algorithm(config, spec, net, seats=4):
    from shoal import algorithms

    return algorithms.make(config, spec, net or NetConfig(), seats)


def fake_me(seed=0):
    stats = SimpleNamespace(add=lambda *_: None, set=lambda *_: None)
    return SimpleNamespace(stats=stats, beat=lambda: None, fail=pytest.fail, note=lambda text: None,
                           rng=lambda salt: np.random.default_rng((seed, *salt.encode())))


# ---------------------------------------------------------------------------------------------- how often
def test_T32_each_element_on_its_own(tmp_path):
    """10,000 batches of 64 with rho 1/256: the counts are binomial (batch-level mixing would have a variance of 15.9)."""
    demos = Demonstrations(fake_me(), parts_of(cue(tmp_path / "x", 4), replace(SMALL, demo_ratio=None)))
    counts = np.array([demos.share(64) for _ in range(10_000)])
    p = 1 / 256
    binomial = np.array([64 * p * (1 - p) ** 63 * (64 - 1) / 2 * p / (1 - p), 64 * p * (1 - p) ** 63, (1 - p) ** 64])[::-1]
    found = np.array([(counts == 0).sum(), (counts == 1).sum(), (counts >= 2).sum()])
    expected = 10_000 * np.array([binomial[0], binomial[1], 1 - binomial[0] - binomial[1]])
    assert ((found - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 degrees of freedom, 0.1 %
    assert abs(counts.mean() - 0.25) < 0.02 and abs(counts.var() - 0.24902) < 0.02


class Watching(Replay):
    """Looks at both tables whenever priorities come, and at every batch that goes out."""

    seen: dict[str, int] = {}  # noqa: RUF012

    def _both(self):
        return {name: dict(zip(table.keys().tolist(), table.state.values[table.slots(), k.PRIORITY].tolist(), strict=True))
                for name, table in (("own", self.table), ("demos", self.demos.table))}

    def _heed(self, data):
        before, count = self._both(), int(data["count"][0])
        sent = dict(zip(data["key"][:count].tolist(), data["priority"][:count].tolist(), strict=True))
        trimmed = bool(data["trim"][0])
        super()._heed(data)
        after = self._both()
        assert after["demos"].keys() == before["demos"].keys(), "a demonstration was removed"
        assert trimmed or after["own"].keys() == before["own"].keys()
        for name, table in after.items():
            for key, priority in table.items():
                assert priority == (sent[key] if key in sent else before[name][key]), f"{name}: {key}"
                self.seen[name] = self.seen.get(name, 0) + (key in sent)
        assert not after["own"].keys() & after["demos"].keys()

    def _sample(self, request):
        super()._sample(request)
        answer = request.answer
        shown = answer["key"] < 1 << KEY_SHIFT
        items = self.demos.layout.views(answer["items"])
        assert ((items["weights_version"] < 0) == shown).all(), "an element is not of the table that its key says"
        assert (answer["table_size"] == np.where(shown, self.demos.table.size, self.table.size)).all()
        for name, table, rows in (("demos", self.demos.table, shown), ("own", self.table, ~shown)):
            of = dict(zip(table.keys().tolist(), table.slots().tolist(), strict=True))
            slots = [of[key] for key in answer["key"][rows].tolist()]
            weights = table.state.values[slots, k.PRIORITY] ** self.config.exponent
            whole = (table.state.values[table.slots(), k.PRIORITY] ** self.config.exponent).sum()
            np.testing.assert_allclose(answer["probability"][rows], weights / whole, rtol=1e-6)
            self.seen[f"{name} drawn"] = self.seen.get(f"{name} drawn", 0) + len(slots)


def test_both_tables_are_drawn_from(tmp_path):
    """Both tables are drawn from and each keeps its own priorities."""
    program, parts = draw(R2D2, "actor_learner", CUE, net=LSTM, replay=SMALL)
    program = redrawn(program, parts, cue(tmp_path / "x", 20))
    Watching.seen = {}
    program.nodes["replay"].role = Watching
    watch = go(program, "inline", tmp_path, Weights(lambda c: c.total("learner_steps") >= 150, seconds=60))
    page, seen = watch.final["replay-0"], Watching.seen
    assert watch.reason == "until" and page["replay_inserts"] > 2 * SMALL.capacity
    assert seen["demos"] > 100 and seen["own"] > 300
    share = seen["demos drawn"] / (seen["demos drawn"] + seen["own drawn"])
    assert abs(share - 0.25) < 0.05  # 2,400 elements: more than five standard deviations
    assert page["demo_samples"] == seen["demos drawn"] and page["replay_samples"] == seen["own drawn"]
    assert page["demo_size"] == 20 * 6  # windows of 4 every 2 steps of 13


def redrawn(program, parts, path, **changes):
    """The same graph with demonstrations."""
    for node in program.nodes.values():
        node.arguments["parts"] = replace(parts, demos=str(path), **changes)
    return program


# ---------------------------------------------------------------------------------------------- what they are cut into
class Spied:
    """An environment whose steps an actor's own recorder sees as well."""

    def __init__(self, env, recorder, policy, explore, seed):
        self.env, self.recorder, self.policy, self.explore = env, recorder, policy, explore
        self.rng = torch.Generator().manual_seed(seed)
        self.state = policy.initial_state(env.num_seats)

    def __getattr__(self, name):
        return getattr(self.env, name)

    def actor(self, step, previous):
        self.before = self.state
        action, self.state, self.extras = self.policy.act(self.recorder.view(step), self.before, self.explore, self.rng)
        return action

    def step(self, action):
        now = self.env.step(action)
        self.recorder.write(action, self.before, self.extras, now, 3)
        return now


CASES = {
    "windows": (R2D2, LSTM, "shoal/CartPolePOMDP-v0", {}),
    "windows, cut short": (R2D2, LSTM, "shoal/CartPolePOMDP-v0", {"max_episode_steps": 7}),
    "windows, executed": (replace(R2D2, diagnose=True), LSTM, "shoal/TMaze-v0", {}),
    "windows, masks": (R2D2, LSTM, lambda: Toy(masked=True, observations="dict"), {}),
    "transitions": (dqn.Config(n_step=3, reward_clip=0.5), None, LURE, {}),
    "transitions, masks": (dqn.Config(n_step=2, rescale=True), None, lambda: Toy(masked=True), {}),
}


@pytest.mark.parametrize("seats", [1, 5])
@pytest.mark.parametrize("case", CASES)
def test_cut_as_the_actor_cuts(case, seats, tmp_path):
    """Demonstrations are cut as the actor cuts bit for bit."""
    config, net, name, kwargs = CASES[case]
    env = envs.make(name, 1, **kwargs)
    algorithm = _algorithm(config, envs.describe(name, **kwargs), net, 1)
    policy = algorithm.policy()
    policy.load(algorithm.learn(4).published(Progress()))
    spied = Spied(env, algorithm.record.recorder(1), policy, np.array([0.7], np.float32), 1)
    first = env.reset(2)
    spied.recorder.begin(first)
    with DemoWriter.create(tmp_path / "x", recording_info(env, first, kwargs), {}) as writer:
        record(spied, first, spied.actor, writer, RecordingOptions(12), print, lambda: False)
    count = spied.recorder.ready
    made, priority = algorithm.record.layout.joined(count).empty(), np.zeros(count)
    spied.recorder.take(made, priority)
    found = list(items_of(algorithm, algorithm.record, open_demos(tmp_path / "x").episodes(), 4, 7, seats, 3))
    assert sum(len(values) for _, values in found) == count >= 12
    joined = {path: np.concatenate([dict(leaves(items))[path] for items, _ in found]) for path, _ in leaves(made)}
    values = np.concatenate([values for _, values in found])
    if seats == 1:  # the same order, and the same arithmetic
        for path, leaf in leaves(made):
            assert path == ("time",) or leaf.tobytes() == joined[path].tobytes(), path
        assert values.tobytes() == priority.tobytes()
    else:  # other neighbours in the same matrix: states and q-values may differ in their last bits
        close = {path: leaf for path, leaf in leaves(made) if path[0] in ("state", "states", "q")}
        exact = [path for path, _ in leaves(made) if path not in close and path != ("time",)]
        rows = [[b"".join((of[path][i] + of[path].dtype.type(0)).tobytes() for path in exact) for i in range(count)]  # -0 is 0
                for of in (dict(leaves(made)), joined)]
        assert sorted(rows[0]) == sorted(rows[1])
        order = [np.argsort(np.array(one, object), kind="stable") for one in rows]
        if len(set(rows[0])) == count:
            np.testing.assert_allclose(values[order[1]], priority[order[0]], rtol=1e-4, atol=1e-5)
            for path, leaf in close.items():
                np.testing.assert_allclose(joined[path][order[1]], leaf[order[0]], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------- saving, killing
def test_priorities_are_saved(tmp_path):
    """Priorities of demonstrations are saved and found again."""
    path = cue(tmp_path / "x", 6)
    one, other = (Demonstrations(fake_me(seed), parts_of(path)) for seed in (0, 1))
    keys = one.table.keys()
    one.update(keys, np.arange(1.0, len(keys) + 1))
    other.load(one.state())
    np.testing.assert_array_equal(other.state()["demo_priorities"], np.arange(1.0, len(keys) + 1))
    cue(tmp_path / "y", 5)
    notes = []
    changed = Demonstrations(SimpleNamespace(**{**vars(fake_me()), "note": notes.append}), parts_of(tmp_path / "y"))
    changed.load(one.state())
    assert "begin anew" in notes[0]


@pytest.mark.parametrize("offline", [False, True])
def test_kill_9_of_the_table(offline, tmp_path):
    """The learner goes on after kill -9 of the table."""
    path = cue(tmp_path / "x", 20)
    program, parts = draw(R2D2, "actor_learner", CUE, net=LSTM, replay=SMALL, eval=EvalPlan(episodes=2))
    if offline:
        from shoal.architectures.offline import draw_offline
        from shoal.runtime import Program

        program = Program("test", seed=1, metrics=parts.algorithm.metrics)
        draw_offline(program, replace(parts, demos=str(path), offline=True))
    else:
        redrawn(program, parts, path)
    table = "demonstrations-0" if offline else "replay-0"
    killer = Killer((table, "learner-0"), times=2, progress="learner_steps", every=40)
    watch = go(program, "local", tmp_path, Weights(killer.done, killer, seconds=90))
    assert watch.reason == "until" and killer.kills == 2 and watch.final[table]["demo_samples"] > 100


# ---------------------------------------------------------------------------------------------- the command line
QUICK = ["--runtime", "inline", "--console.mode", "none", "--no-tensorboard", "--eval.episodes", "20", "--seed", "3"]


def summary(run="run"):
    return json.loads((Path(run) / "summary.json").read_text())


def test_r2d3_is_resumed_with_both_tables(tmp_path, monkeypatch, capsys):
    """R2D3 runs, resumes with both tables and is evaluated."""
    monkeypatch.chdir(tmp_path)
    cue(Path("demos"))
    assert cli.main(["train", "r2d3", CUE, "--demos", "demos", "--run-dir", "run", "--max-env-steps", "600", "--replay.checkpoint",
                     "--replay.min-size", "50", *QUICK]) == 0
    assert summary()["checkpoint_bytes"]["replay"] > 10_000
    assert "MB of it replay tables" in capsys.readouterr().out, "the saved size is shown"
    newest = sorted(Path("run/checkpoints").iterdir())[-1]
    from safetensors.numpy import load_file

    saved = load_file(newest / "replay-0.safetensors")
    assert len(saved["demo_priorities"]) == 20 and len(saved["chunks"]) > 10_000  # a window holds the whole corridor
    assert cli.main(["resume", "run", "--max-env-steps", "900", "--console.mode", "none"]) == 0
    assert summary()["env_steps"] >= 900 and cli.main(["eval", "run", "--episodes", "5"]) == 0


def test_offline_dqn_learns(tmp_path, monkeypatch):
    """Random episodes earn 0.16 on average; without a single step of its own the learner finds the best way, 1.0."""
    monkeypatch.chdir(tmp_path)
    recorded(Path("demos"), LURE, 200, rows=8, seed=1)
    assert open_demos("demos").info.returns.mean < 0.3
    more = ["--replay.batch-size", "32", "--algorithm.zero-head", "--eval.every-learner-steps", "100"]
    assert cli.main(["train", "dqn", LURE, "--demos", "demos", "--offline", "--run-dir", "run", "--max-learner-steps", "400",
                     *more, *QUICK]) == 0
    found = summary()
    assert found["stopped_by"] == "learner_steps" and 400 <= found["learner_steps"] <= 402 and found["env_steps"] == 0
    assert found["eval_return"] == pytest.approx(1.0) and found["seconds"] > 0
    shots = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert max(shot.get("evaluations", 0) for shot in shots) >= 4
    assert cli.main(["resume", "run", "--max-learner-steps", "500", "--console.mode", "none"]) == 0
    assert 500 <= summary()["learner_steps"] <= 502 and cli.main(["eval", "run", "--episodes", "5"]) == 0
    assert len({path.name for path in Path("run/checkpoints").iterdir()}) > 1


def test_offline_r2d2_learns_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorded(Path("demos"), "shoal/TMaze-v0", 100, rows=8, seed=1, length=2)
    assert abs(open_demos("demos").info.returns.mean) < 0.5
    words = ["train", "r2d2", "shoal/TMaze-v0", "--envs.kwargs", "length=2", "--demos", "demos", "--offline", "--run-dir", "run",
             "--net.lstm-size", "32", "--max-learner-steps", "300", "--until-return", "0.95", "--eval.every-learner-steps", "50"]
    assert cli.main([*words, *QUICK]) == 0
    assert summary()["eval_return"] >= 0.95 and summary()["stopped_by"] == "return"


@pytest.mark.parametrize(("words", "sentence"), [
    (["r2d3", CUE], "draws demonstrations, and there are none"),
    (["r2d3", CUE, "--demos", "gone"], "gone: it does not exist"),
    (["dqn", CUE, "--offline"], "give --demos PATH"),
    (["ppo", CUE, "--demos", "demos"], "ppo, which learns only from what its own policy has just done"),
    (["ppo", CUE, "--demos", "demos", "--offline"], "use --algorithm dqn or r2d2"),
    (["dqn", CUE, "--demos", "demos", "--offline", "--max-env-steps", "5"], "give --max-learner-steps or --max-seconds"),
    (["dqn", CUE, "--demos", "demos", "--offline", "--no-eval.enabled"], "--offline needs evaluations to show what is learned"),
    (["dqn", CUE, "--demos", "demos", "--replay.demo-ratio", "1"], "below 1"),
    (["dqn", "shoal/LureChain-v0", "--demos", "demos"], "its observations differ from the environment"),
    (["dqn", "shoal/TMaze-v0", "--demos", "demos"], "was recorded in shoal/CueLure-v0"),
    (["dqn", CUE, "--envs.kwargs", "length=5", "--demos", "demos"], "this run is in shoal/CueLure-v0 (length=5)"),
    (["dqn", "shoal/Catch-v0", "--demos", "empty"], "neither demos.json"),
    (["gorila", CUE, "--demos", "demos"], "whose replay tables hold only what its own actors do")])
def test_senseless_options(words, sentence, tmp_path, monkeypatch, capsys):
    """What makes no sense is refused before anything starts."""
    monkeypatch.chdir(tmp_path)
    cue(Path("demos"), 2)
    Path("empty").mkdir()
    if words[0] == "gorila":
        words = ["--algorithm", "dqn", "--architecture", "parameter_server", *words[1:]]
    assert cli.main(["train", *words, "--run-dir", "run", *QUICK]) == 2
    assert sentence in capsys.readouterr().err and not Path("run").exists()


def test_foreign_demonstrations(tmp_path, monkeypatch):
    """Demonstrations of another environment are taken with --foreign-demos."""
    monkeypatch.chdir(tmp_path)
    cue(Path("demos"), 2)
    assert cli.main(["train", "r2d2", "shoal/TMaze-v0", "--demos", "demos", "--foreign-demos", "--offline", "--max-learner-steps",
                     "3", "--run-dir", "run", *QUICK]) == 0


def test_acting_needs_no_demonstrations(tmp_path, monkeypatch, capsys):
    """What a run has learned from is not needed to act."""
    monkeypatch.chdir(tmp_path)
    cue(Path("demos"), 4)
    assert cli.main(["train", "dqn", CUE, "--demos", "demos", "--offline", "--max-learner-steps", "5",
                     "--run-dir", "run", *QUICK]) == 0
    Path("demos").rename("elsewhere")
    assert cli.main(["eval", "run", "--episodes", "2"]) == 0, capsys.readouterr().err
