"""What cannot be started is refused before anything is, with a number that can."""

import re

import pytest

from shoal import cli
from shoal.errors import ConfigError
from shoal.experiment.layout import laid_out
from shoal.experiment.prepare import prepare
from shoal.experiment.room import check_room
from shoal.experiment.run import plan_of
from shoal.runtime import room
from shoal.runtime.room import Need, needs, shortage
from shoal.slots import Local


@pytest.fixture
def machine(monkeypatch):
    """A machine of a known size."""
    monkeypatch.setattr(room, "most_files", lambda: 20_000)
    monkeypatch.setattr(room, "free_processes", lambda: 5_000)
    monkeypatch.setattr(room, "most_memory", lambda: 24 * 10**9)


def drawn(**values):
    prepared = prepare(plan_of("impala", "CartPole-v1", None, None, {"actors": 2, "eval.enabled": False, **values}))
    return prepared, prepared.program()


def test_the_count_is_what_is_really_made():
    _, program = drawn()
    counted = needs(program, "local")
    medium = Local()
    program.build(medium)
    made = len(medium.fds)
    medium.close()
    program.release()
    places = len(program.places)
    assert counted.files == made + room.LINE_FILES * places + room.SPARE_FILES
    assert counted.processes == places + room.SPARE_PROCESSES


@pytest.mark.parametrize(("values", "words", "knob"), [
    ({"actors": 10_000}, "--actors 10000 .*open files.*ulimit -Hn.*; give --actors (\\d+) or fewer", "actors"),
    ({"actors": 2000}, "--actors 2000 .*at least .* GB of memory.*; give --actors (\\d+) or fewer", "actors"),
    ({"actors": 64, "learners": 200}, "--actors 64 .*open files.*; give --actors (\\d+) or fewer", "actors"),
    ({"actors": 1, "learners": 3000}, "--learners 3000 .*open files.*; give --learners (\\d+) or fewer", "learners"),
    ({"architecture.envs_per_actor": 10**9}, "--architecture.envs-per-actor 1000000000 .*GB of memory.*; give "
     "--architecture.envs-per-actor (\\d+) or fewer", "architecture.envs_per_actor")])
def test_absurd_numbers_are_refused_with_one_that_would_work(values, words, knob, machine):
    prepared, program = drawn(**values)
    with pytest.raises(ConfigError, match=words) as caught:
        check_room(prepared, program)
    most = int(re.search(words, str(caught.value))[1])
    check_room(*drawn(**{**values, knob: most}))
    with pytest.raises(ConfigError):
        check_room(*drawn(**{**values, knob: most + 1}))


def test_what_auto_may_come_to_is_counted_too(machine):
    values = {"actors": "auto", "autoscale.start": 2, "autoscale.most": 50_000, "eval.enabled": False}
    plan = laid_out(plan_of("impala", "CartPole-v1", None, None, values), lambda line: None)
    prepared = prepare(plan)
    with pytest.raises(ConfigError, match=r"--autoscale.most 50000 is too much .*; give --autoscale.most (\d{4}) or fewer"):
        check_room(prepared, prepared.program())


def test_inline_has_no_processes_to_run_out_of(machine):
    check_room(*drawn(runtime="inline", actors=2000))
    with pytest.raises(ConfigError, match="GB of memory"):
        check_room(*drawn(runtime="inline", **{"architecture.envs_per_actor": 10**9}))


def test_each_limit_has_its_words(machine):
    assert shortage(Need(100, 10, 10**6)) == ""
    assert "needs 30,000 open files, and a process may have 20,000" in shortage(Need(30_000, 10, 10**6))
    assert "needs 6,000 processes, and there is room for 5,000" in shortage(Need(100, 6_000, 10**6))
    assert "needs at least 25.0 GB of memory, and there are 24.0 GB" in shortage(Need(100, 10, 25 * 10**9))


def test_this_machine_has_room_for_a_few():
    assert room.most_files() >= 64 and room.free_processes() > 0 and room.most_memory() > 10**8


def test_the_command_says_it_before_anything_is_written(tmp_path, capsys):
    assert cli.main(["train", "impala", "CartPole-v1", "--actors", "100000", "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shoal: --actors 100000 is too much for this machine: it needs ") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())
