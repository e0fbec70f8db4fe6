"""A start that is refused, or stopped by hand before anything runs, leaves everything as it was; so does a resume."""

import importlib
import json
import os
import signal
import time

import pytest

from shoal import cli, runtime
from shoal.errors import ConfigError
from shoal.runtime.inline import InlineSupervisor

WORDS = ["train", "a2c", "CartPole-v1", "--max-env-steps", "200", "--actors", "1", "--eval.no-enabled", "--console.mode", "plain",
         "--no-tensorboard", "--net.hidden", "8"]
INLINE = ["--runtime", "inline"]
NOWHERE = ["--runtime", "ray", "--ray.address", "127.0.0.1:1"]


def refuse(*arguments, **more):
    raise ConfigError("the cluster has no room")


def press(*arguments, **more):
    """Ctrl-C while the runtime waits for something; it does not look at the session meanwhile."""
    os.kill(os.getpid(), signal.SIGINT)
    wait()


def wait():
    for _ in range(100):
        time.sleep(0.05)
    raise ConfigError("waited to the end")


def test_corrected_command(tmp_path, capfd):
    """The corrected command may have the same directory."""
    pytest.importorskip("ray")
    run = ["--run-dir", str(tmp_path / "some" / "run")]
    assert cli.main([*WORDS, *NOWHERE, *run]) == 2
    said = capfd.readouterr().err
    assert "cannot join --ray.address 127.0.0.1:1" in said and len(said.splitlines()) == 1  # Ray itself prints nothing
    assert not list(tmp_path.iterdir())
    assert cli.main([*WORDS, *INLINE, *run]) == 0


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("start", [refuse, press])
def test_nothing_is_left_that_was_made(start, there, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runtime, "run", start)
    monkeypatch.chdir(tmp_path)
    if there:
        (tmp_path / "run").mkdir()
    assert cli.main([*WORDS, *INLINE, *(["--run-dir", "run"] if there else [])]) == (2 if start is refuse else 130)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["run"] * there
    if start is press:
        assert "stopped by hand before the run began; nothing was written" in capsys.readouterr().out


FRAGILE = """
import os, signal, time

whole = False
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
    whole = True
except BaseException:
    pass
"""


def test_ctrl_c_during_an_import(tmp_path, tmp_path_factory, monkeypatch):
    """As of a module in C, which prints what is raised while it is being imported, and goes on."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "fragile_module.py").write_text(FRAGILE)
    monkeypatch.syspath_prepend(folder)
    imported = []

    def slow(*arguments, **more):
        imported.append(importlib.import_module("fragile_module"))
        wait()

    monkeypatch.setattr(runtime, "run", slow)
    assert cli.main([*WORDS, *INLINE, "--run-dir", str(tmp_path / "run")]) == 130
    assert imported[0].whole and not list(tmp_path.iterdir())


def test_cursor_after_the_table(tmp_path, monkeypatch, capsys):
    """A table that was shown gives the cursor back."""
    monkeypatch.setattr(runtime, "run", refuse)
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    assert cli.main([*WORDS, *INLINE, "--run-dir", str(tmp_path / "run"), "--console.mode", "live"]) == 2
    shown = capsys.readouterr().out
    assert "\x1b[?25l" in shown and shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


@pytest.mark.parametrize("start", [refuse, press])
def test_refused_resume_changes_nothing(start, tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert cli.main([*WORDS, *INLINE, "--run-dir", str(run)]) == 0
    before = json.loads((run / "config.json").read_text())
    again = ["resume", str(run), "--max-env-steps", "400"]
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "run", start)
        assert cli.main([*again, *NOWHERE]) == (2 if start is refuse else 130)
    assert json.loads((run / "config.json").read_text()) == before
    assert cli.main(again) == 0
    assert json.loads((run / "config.json").read_text())["resumed"] == 1


def test_stopped_while_roles_start(tmp_path, monkeypatch, capsys):
    """A run that is stopped while roles start does not claim to be saved."""
    run, spawn = tmp_path / "run", InlineSupervisor._spawn

    def pressed(self, node, index):
        if not self.instances:
            os.kill(os.getpid(), signal.SIGINT)
        spawn(self, node, index)

    with monkeypatch.context() as patch:
        patch.setattr(InlineSupervisor, "_spawn", pressed)
        assert cli.main([*WORDS, *INLINE, "--run-dir", str(run)]) == 130
    said = capsys.readouterr().out
    assert "stopped by hand: 0 env steps" in said and "saved   nothing" in said
    assert not any(words in said for words in ("older one", "previous one", "checkpoint failed", "shoal play", "shoal resume"))
    assert json.loads((run / "summary.json").read_text())["stopped_by"] == "interrupt"
    assert cli.main([*WORDS, *INLINE, "--run-dir", str(run)]) == 2
    said = capsys.readouterr().err
    assert "ended before its first checkpoint" in said and "shoal resume" not in said


@pytest.mark.parametrize(("words", "said"), [
    (["--ray.address", "auto"], "--ray.address auto needs --runtime ray, but this run has --runtime local; give --runtime ray"),
    (["--runtime", "inline", "--ray.wait-seconds", "5"], "--ray.wait-seconds 5.0 needs --runtime ray"),
    (["--runtime", "ray", "--ray.address", "ray://10.0.0.1:10001"], "not through a client: give --ray.address auto or HOST:PORT"),
    (["--runtime", "ray", "--ray.address", "head"], "--ray.address is head; it must be auto or HOST:PORT")])
def test_cluster_options_in_vain(words, said, tmp_path, capsys):
    """Options of a cluster that no run would use are refused."""
    assert cli.main([*WORDS, *words, "--run-dir", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())
