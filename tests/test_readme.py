"""Every command of the README is run, shortened where it would train for long; its Python too."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
SHORT = ["--max-env-steps", "4000", "--checkpoint.every-seconds", "1"]


def commands():
    """Lines of indented blocks that begin with `shoal`; several on one line are split; comments are cut."""
    lines = [line.strip().split("#")[0].strip() for line in TEXT.splitlines() if line.startswith("    shoal ")]
    return [command.strip() for line in lines for command in line.split(";") if command.strip()]


def shoal(arguments, folder):
    program = str(Path(sys.executable).parent / "shoal")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600, cwd=folder, check=False)
    assert done.returncode == 0, f"shoal {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    shoal(["train", "impala", "CartPole-v1", "--run-dir", str(folder / "run"), *SHORT], folder)
    return folder / "run"


@pytest.mark.parametrize("command", [c for c in commands() if "replay" not in c])
def test_command(command, run, tmp_path):
    arguments = [str(run) if part == "RUN" else part for part in shlex.split(command)[1:]]
    if arguments[0] == "plot":
        pytest.importorskip("matplotlib")
    if arguments[0] == "train":
        arguments += [*SHORT, "--run-dir", str(tmp_path / "run")]
    if arguments[0] == "resume":
        arguments += ["--max-env-steps", str(json.loads((run / "summary.json").read_text())["env_steps"] + 2000)]
    shoal(arguments, run.parent)


def test_the_commands_are_there():
    wanted = {"train", "watch", "plot", "show", "list", "eval", "play", "resume", "runs", "doctor"}
    assert wanted <= {c.split()[1] for c in commands()}
    assert "make train" in TEXT and "make test" in TEXT


def test_python(tmp_path, monkeypatch):
    import gymnasium as gym

    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(import shoal\n.*?)```", TEXT, re.S)
    shortened = code.replace("until_return=475", "until_return=475, max_env_steps=4000")
    assert shortened != code
    names = {"observation": gym.make("CartPole-v1").reset(seed=0)[0]}
    exec(shortened, names)
    assert names["action"] in (0, 1)
