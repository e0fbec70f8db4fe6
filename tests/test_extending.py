"""Every block of docs/extending.md runs: files are written to a folder, commands are run there, shortened."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"```(?:python|toml) (\S+)\n(.*?)```", TEXT, re.S))
COMMANDS = [line.strip() for line in TEXT.splitlines() if line.startswith("    shoal ")]
SHORT = ["--max-env-steps", "600", "--console.mode", "none", "--no-tensorboard", "--eval.episodes", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extending")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def run(arguments, folder):
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, cwd=folder, check=False)
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, folder):
    arguments = shlex.split(command)[1:]
    if arguments[0] == "train":  # by the way, on both runtimes
        runtime = "local" if "my_preset" in command else "inline"
        arguments += [*SHORT, "--runtime", runtime, *([] if "actors" in command or "preset" in command else ["--actors", "1"])]
    run([sys.executable, "-m", "shoal.cli", *arguments], folder)


def test_python(folder):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    quick = code.replace("max_env_steps=2000", "max_env_steps=300, runtime='inline', actors=1")
    assert quick != code
    run([sys.executable, "-c", quick], folder)


def test_lengths():
    assert len(FILES["my_algorithm.py"].splitlines()) <= 120 and len(FILES["my_architecture.py"].splitlines()) <= 60
