"""What cannot be started is refused before anything is, with a number that can."""

import re

import pytest

from shoal import cli
from shoal.errors import ConfigError
from shoal.experiment.auto_layout import laid_out
from shoal.experiment.machine_checks import RAY_PLACE_BYTES, SURE, drawn
from shoal.experiment.prepare import Prepared, prepare
from shoal.experiment.run import plan_of
from shoal.runtime import start_checks
from shoal.runtime.start_checks import Need, needs, shortage
from shoal.slots import LocalAllocator

BOUNDED = {"architecture.max_staleness": 4}


@pytest.fixture
def machine(monkeypatch):
    """A machine of a known size, and no cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("shoal.experiment.machine_checks.LEARNERS_PER_CORE", 10**9)
    monkeypatch.setattr(start_checks, "most_files", lambda: 20_000)
    monkeypatch.setattr(start_checks, "free_processes", lambda: 5_000)
    monkeypatch.setattr(start_checks, "most_memory", lambda: 24 * 10**9)


def prepared(**values):
    return prepare(plan_of("impala", "CartPole-v1", None, None, {"actors": 2, "eval.enabled": False, **values}))


def test_the_count_is_what_is_really_made():
    program = prepared().program()
    counted = needs(program, "local")
    allocator = LocalAllocator()
    program.build(allocator)
    made = len(allocator.fds)
    allocator.close()
    program.release()
    places = len(program.places)
    assert counted.files == made + start_checks.LINE_FILES * places + start_checks.SPARE_FILES
    assert counted.processes == places + start_checks.SPARE_PROCESSES


def refused(values, words) -> int:
    with pytest.raises(ConfigError, match=words) as caught:
        drawn(prepared(**values))
    return int(re.search(words, str(caught.value))[1])


@pytest.mark.parametrize(("values", "words", "knob"), [
    ({"actors": 64, "learners": 200}, "--actors 64 .*open files.*; give --actors (\\d+) or fewer", "actors"),
    ({"architecture.batch_slots": 10**7}, "--architecture.batch-slots 10000000 .*GB of memory.*; give --architecture.batch-slots "
     "(\\d+) or fewer", "architecture.batch_slots"),
    ({"architecture.buffer_slots": 10**8, **BOUNDED}, "--architecture.buffer-slots 100000000 .*GB of memory.*; give "
     "--architecture.buffer-slots (\\d+) or fewer", "architecture.buffer_slots"),
    ({"architecture.envs_per_actor": 10**9}, "--architecture.envs-per-actor 1000000000 .*GB of memory.*; give "
     "--architecture.envs-per-actor (\\d+) or fewer", "architecture.envs_per_actor")])
def test_absurd_numbers(values, words, knob, machine):
    """Absurd numbers are refused with one that would work."""
    most = refused(values, words)
    drawn(prepared(**{**values, knob: most}))
    with pytest.raises(ConfigError):
        drawn(prepared(**{**values, knob: most + 1}))


@pytest.mark.parametrize(("values", "words", "knob"), [
    ({"actors": 10_000}, "--actors 10000 .*open files.*ulimit -Hn.*; give --actors (\\d+) or fewer", "actors"),
    ({"actors": 2000}, "--actors 2000 .*at least .* GB of memory.*; give --actors (\\d+) or fewer", "actors"),
    ({"actors": 1, "learners": 3000}, "--learners 3000 .*open files.*; give --learners (\\d+) or fewer", "learners")])
def test_recommended_processes(values, words, knob, machine):
    """No more processes are recommended than are sure to start."""
    assert refused(values, words) == SURE
    drawn(prepared(**{**values, knob: SURE}))


@pytest.mark.parametrize("runtime", ["local", "inline", "ray"])
@pytest.mark.parametrize("knob", ["actors", "learners", "autoscale.most"])
def test_huge_number(knob, runtime, machine, monkeypatch):
    """A huge number is refused before anything is drawn."""
    sizes = []
    draw = Prepared.program

    def watched(self, resumed=0):
        sizes.append(self.plan.actor_count + self.plan.experiment.learners)
        return draw(self, resumed)

    monkeypatch.setattr(Prepared, "program", watched)
    values = {"actors": "auto"} if knob == "autoscale.most" else {}
    words = f"--{knob} 1000000000 is too much .*; give --{knob} (\\d+) or fewer"
    most = refused({**values, "runtime": runtime, knob: 10**9}, words)
    larger = runtime == "ray" and knob != "autoscale.most"  # processes; a number that nothing moves to yet makes none
    assert 10 < most < SURE if larger else most == SURE
    assert max(sizes) <= SURE + 2


@pytest.mark.parametrize("knob", ["actors", "learners"])
def test_cluster_started_here(knob, machine):
    """A cluster that is started here has no more room than this machine."""
    values = {"runtime": "ray", knob: 2000}
    most = refused(values, f"--{knob} 2000 is too much .* GB of memory.*; give --{knob} (\\d+) or fewer")
    program = drawn(prepared(**{**values, knob: most}))
    assert 100 < len(program.places) * RAY_PLACE_BYTES // 10**8 <= 240
    refused({**values, knob: most + 1}, r"is too much .* (\d+) or fewer")


def test_cluster_that_is_joined(machine):
    """A cluster that is joined is not measured by this machine."""
    drawn(prepared(runtime="ray", actors=500, **{"ray.address": "10.0.0.1:6379"}))


def test_batches_and_buffers(machine):
    """3 batches of 10 unrolls for each of 2 learners, and their buffers of 20."""
    program = prepared(learners=2, **{"architecture.batch_slots": 10, "architecture.buffer_slots": 20}, **BOUNDED).program()
    slot = program.wires["unrolls"].layout.nbytes
    staged = (3 * 10 + 20) * slot
    assert program.nodes["learner"].private_bytes == staged and needs(program, "inline").nbytes > 2 * staged


def test_auto_maximum_is_counted(machine):
    values = {"actors": "auto", "autoscale.start": 2, "autoscale.most": 50_000, "eval.enabled": False}
    plan = laid_out(plan_of("impala", "CartPole-v1", None, None, values), lambda line: None)
    with pytest.raises(ConfigError, match=rf"--autoscale.most 50000 is too much .*; give --autoscale.most {SURE} or fewer"):
        drawn(prepare(plan))


def test_inline_needs_no_processes(machine):
    drawn(prepared(runtime="inline", actors=2000))
    with pytest.raises(ConfigError, match="GB of memory"):
        drawn(prepared(runtime="inline", **{"architecture.envs_per_actor": 10**9}))


@pytest.mark.parametrize("runtime", ["inline", "local"])
def test_environments_count(runtime, machine):
    """Items of a replay table are sent in messages of a fixed size."""
    plan = plan_of("dqn", "CartPole-v1", None, None, {"runtime": runtime, "architecture.envs_per_actor": 2**31})
    words = "--architecture.envs-per-actor 2147483648 is too much for this machine.*GB of memory"
    with pytest.raises(ConfigError, match=words):
        drawn(prepare(plan))


@pytest.mark.parametrize(("preset", "env", "name"), [
    ("curl_async", "shoal/PixelCatch-v0", "batch_size"), ("r2d2", "shoal/TMaze-v0", "batch_size"),
    ("r2d2", "shoal/TMaze-v0", "prefetch")])
def test_batches_of_replay_count(preset, env, name, machine):
    plan = plan_of(preset, env, None, None, {f"replay.{name}": 10**8})
    with pytest.raises(ConfigError, match=rf"--replay.{name.replace('_', '-')} 100000000 is too much.*give .* \d+ or fewer"):
        drawn(prepare(plan))


def test_each_limit_has_its_words(machine):
    assert shortage(Need(100, 10, 10**6)) == ""
    assert "needs 30,000 open files, and a process may have 20,000" in shortage(Need(30_000, 10, 10**6))
    assert "needs 6,000 processes, and there is room for 5,000" in shortage(Need(100, 6_000, 10**6))
    assert "needs at least 25.0 GB of memory, and there are 24.0 GB" in shortage(Need(100, 10, 25 * 10**9))


def test_this_machine_has_room_for_a_few():
    assert start_checks.most_files() >= 64 and start_checks.free_processes() > 0 and start_checks.most_memory() > 10**8


def test_command_writes_nothing(tmp_path, capsys):
    """The command says it before anything is written."""
    assert cli.main(["train", "impala", "CartPole-v1", "--actors", "100000", "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shoal: --actors 100000 is too much for this machine: it needs ") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("preset", "values", "knob"), [
    ("impala", {}, "algorithm.unroll"), ("a3c", {}, "algorithm.unroll"), ("gala", {}, "algorithm.unroll"),
    ("a3c", {"architecture.mode": "master"}, "algorithm.unroll"),
    ("anakin", {"device": "cpu"}, "algorithm.unroll"), ("anakin", {"device": "cpu"}, "architecture.envs_per_actor")])
def test_unrolls_that_roles_fill_count(preset, values, knob, machine):
    """In a stream or in a role's own memory."""
    words = f"--{knob.replace('_', '-')} 1000000000 is too much .*GB of memory.*; give --{knob.replace('_', '-')} (\\d+) or fewer"
    with pytest.raises(ConfigError, match=words) as caught:
        drawn(prepare(plan_of(preset, "CartPole-v1", None, None, {**values, knob: 10**9})))
    most = int(re.search(words, str(caught.value))[1])
    drawn(prepare(plan_of(preset, "CartPole-v1", None, None, {**values, knob: most})))


@pytest.mark.parametrize(("preset", "name"), [("ga3c", "predictors"), ("ga3c", "trainers"), ("gorila", "shards")])
def test_other_processes_are_counted(machine, preset, name):
    """Other processes are counted before they are drawn."""
    plan = plan_of(preset, "CartPole-v1", None, None, {f"architecture.{name}": 10**8})
    with pytest.raises(ConfigError, match=rf"--architecture.{name} 100000000 is too .*; give --architecture.{name} \d+ or fewer"):
        drawn(prepare(plan))


# ------------------------------------------------------------------ replay tables
def replaying(preset="apex", env="CartPole-v1", **values):
    return prepare(plan_of(preset, env, None, None, {"actors": 2, "eval.enabled": False, "replay.min_size": 100, **values}))


@pytest.mark.parametrize("values", [{}, {"replay.shards": 3}, {"runtime": "inline"}, {"runtime": "ray"},
                                    {"replay.checkpoint": True}])
def test_table_that_does_not_fit(values, machine):
    """A table that would not fit is refused with the capacity that does."""
    words = (r"--replay.capacity 1000000000 is too much for this machine: a full table, with all else, needs at least .* GB of "
             r"memory, and there are 24.0 GB; give --replay.capacity (\d+) or fewer$")
    with pytest.raises(ConfigError, match=words) as caught:
        drawn(replaying(**{**values, "replay.capacity": 10**9}))
    most = int(re.search(words, str(caught.value))[1])
    assert 10**7 < most < 10**8
    drawn(replaying(**{**values, "replay.capacity": most}))
    drawn(replaying(**{**values, "replay.capacity": 10**9, "max_env_steps": 10**6}))  # it will never be full
    with pytest.raises(ConfigError, match=f"give --replay.capacity {most} or fewer"):
        drawn(replaying(**{**values, "replay.capacity": most + 1}))


def test_every_bundle_s_own_table_is_counted(machine):
    def most(actors, table):
        values = {"actors": actors, "replay.capacity": 10**9, "architecture.table": table, "replay.insert_batch": 50}
        with pytest.raises(ConfigError, match=r"--replay.capacity") as caught:
            drawn(replaying("gorila", **values))
        return int(re.search(r"give --replay.capacity (\d+)", str(caught.value))[1])

    assert most(4, "local") < 0.3 * most(4, "global")


def test_tables_of_a_joined_cluster(machine):
    """The tables of a cluster that is joined are not measured by this machine."""
    drawn(replaying(runtime="ray", **{"replay.capacity": 10**9, "ray.address": "10.0.0.1:6379"}))


@pytest.mark.atari
def test_uncompressed_images(machine):
    """Images that are not compressed are refused with both ways out."""
    pytest.importorskip("ale_py")
    drawn(replaying(env="ALE/Pong-v5"))  # as it is shipped
    with pytest.raises(ConfigError, match=r"--replay.capacity 10000000 is too much .* at least 7\d.\d GB .*; give "
                                          r"--replay.capacity \d{7} or fewer or --replay.compression auto$"):
        drawn(replaying(env="ALE/Pong-v5", **{"replay.compression": "none", "replay.capacity": 10**7}))


def test_free_is_at_most_all(tmp_path, monkeypatch):
    assert 10**7 < start_checks.free_memory() <= start_checks.most_memory()
    files = {"memory.max": "5000000", "memory.current": "4000000", "memory.stat": "anon 3000000\ninactive_file 500000"}
    for name, value in files.items():
        (tmp_path / name).write_text(value)
    monkeypatch.setattr(start_checks, "_groups", lambda controller: [str(tmp_path)])
    assert start_checks.free_memory() == 1_500_000, "files that are only kept for later are free"
    (tmp_path / "memory.max").write_text("max")
    assert start_checks.free_memory() > 10**7
