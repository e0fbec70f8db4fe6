"""Exit codes of what goes wrong at odd places: 2 and a sentence before the run, 3 and a traceback within it."""

import errno
import json
import os

import pytest

from shoal import cli
from shoal.roles.learner import Learner

WORDS = ["train", "a2c", "CartPole-v1", "--runtime", "inline", "--max-env-steps", "400", "--actors", "1", "--eval.no-enabled",
         "--console.mode", "none", "--no-tensorboard", "--net.hidden", "8"]


@pytest.mark.parametrize("failure", [ZeroDivisionError("an odd one"), OSError(errno.EIO, "an odd one"), MemoryError("an odd one")])
def test_odd_error_of_a_role(failure, monkeypatch, tmp_path, capsys):
    """An odd error of a role ends an inline run with 3 and its traceback."""

    def broken(self, batch):
        raise failure

    monkeypatch.setattr(Learner, "_update", broken)
    assert cli.main([*WORDS, "--run-dir", str(tmp_path / "run")]) == 3
    said = capsys.readouterr().err
    assert said.startswith(f"shoal: the run failed: {type(failure).__name__}: ")
    assert "Traceback" in said and "an odd one" in said and "in broken" in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "failure"


def test_odd_error_before_the_run(monkeypatch, tmp_path):
    """An odd error before the run is a bug and stays one."""

    def broken(*_):
        raise ZeroDivisionError("before the run")

    monkeypatch.setattr("shoal.experiment.run.laid_out", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main([*WORDS, "--run-dir", str(tmp_path / "run")])


def test_a_disk_that_refuses_is_one_sentence(monkeypatch, tmp_path, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "film.gif")

    monkeypatch.setattr("shoal.experiment.run_commands.load", full)
    (tmp_path / "config.json").write_text('{"env": {"name": "x"}}')
    assert cli.main(["eval", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "shoal: film.gif: No space left on device; make room, or give another place\n"


@pytest.mark.parametrize("preset", ["a2c", "dqn"])
@pytest.mark.parametrize("size", [10**6, 10**11])
def test_impossible_network(preset, size, tmp_path, capsys):
    """A network that cannot be made is refused with one sentence."""
    assert cli.main([WORDS[0], preset, *WORDS[2:-1], str(size), str(size), "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    words = "the network is too large for this machine: its 1,000,004," if size == 10**6 else "--net.hidden is 100000000000 1000"
    assert said.startswith(f"shoal: {words}") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_more_threads_than_cores(tmp_path, capsys, monkeypatch):
    """More threads than cores are refused before any is started."""

    def never(count):
        raise AssertionError(f"set_num_threads({count})")

    monkeypatch.setattr("torch.set_num_threads", never)
    cores = len(os.sched_getaffinity(0))
    for runtime in ("inline", "local"):
        words = [*WORDS, "--runtime", runtime, "--learner-threads", str(cores + 1), "--run-dir", str(tmp_path / "run")]
        assert cli.main(words) == 2
        assert capsys.readouterr().err == (f"shoal: --learner-threads {cores + 1} is more than this machine's {cores} cores; "
                                           f"give --learner-threads {cores} or fewer\n")
    assert not list(tmp_path.iterdir())


def test_run_of_a_larger_machine(tmp_path, capsys):
    """A run of a larger machine is played here and resumed with fewer threads."""
    run = tmp_path / "run"
    assert cli.main([*WORDS, "--run-dir", str(run)]) == 0
    config = json.loads((run / "config.json").read_text())
    many = len(os.sched_getaffinity(0)) + 1
    (run / "config.json").write_text(json.dumps({**config, "learner_threads": many}))
    assert cli.main(["eval", str(run), "--episodes", "1"]) == 0
    resume = ["resume", str(run), "--max-env-steps", "800", "--console.mode", "none"]
    assert cli.main(resume) == 2 and f"--learner-threads {many} is more than" in capsys.readouterr().err
    assert cli.main([*resume, "--learner-threads", "1"]) == 0


def test_senseless_faults(tmp_path, capsys):
    """Senseless faults are found before the run."""
    assert cli.main([*WORDS, "--faults.exceptions-per-minute", "0", "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "--faults.exceptions-per-minute is 0; it must be at least 1 (the default is 3)" in said
    assert said.count("\n") == 1 and not list(tmp_path.iterdir())
