"""The wheel is whole: it holds every file of the package and nothing else; unpacked, it trains from an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes

import pytest

from tests.tree import ROOT

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
COMMAND = """
import sys
from importlib.metadata import distribution
(command,) = (entry for entry in distribution("shoal").entry_points if entry.name == "shoal")
sys.argv[0] = "shoal"
sys.exit(command.load()())
"""


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a build folder in the tree would add files that have been deleted since."""
    folder = tmp_path_factory.mktemp("wheel")
    copy, out = folder / "copy", folder / "out"
    for name in ("src/shoal", "benchmarks", "evidence"):  # what only developers run must stay out
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-c", BUILD, out, cwd=copy)
    (found,) = out.glob("shoal-*.whl")
    with zipfile.ZipFile(found) as archive:
        yield archive


def test_files_and_metadata(wheel):
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    assert packed == {str(path.relative_to(source)) for path in source.glob("shoal/**/*")
                      if path.is_file() and "__pycache__" not in path.parts}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(wheel.read(name))
    assert (metadata["Name"], metadata["Version"]) == (project["name"], project["version"])
    needed = {re.split(r"[><=;\[ ]", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert needed == {re.split("[><=]", line)[0] for line in project["dependencies"]}
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())


@pytest.fixture(scope="module")
def shoal(wheel, tmp_path_factory):
    """Runs the wheel's own command in an empty folder; its dependencies are those of this interpreter."""
    site, home = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("home")
    wheel.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = run(sys.executable, "-c", "import shoal; print(shoal.__file__)", cwd=home, env=environment).strip()
    assert where.startswith(str(site))
    return home, lambda *words: run(sys.executable, "-c", COMMAND, *words, cwd=home, env=environment)


def test_it_trains_from_an_empty_folder(shoal):
    home, command = shoal
    quick = ("--max-env-steps", "300", "--actors", "1", "--eval.episodes", "2", "--envs.backend", "loop")  # compiles no environment
    said = command("train", "a2c", "CartPole-v1", *quick, "--run-dir", home / "run")
    assert (home / "run" / "summary.json").exists() and "shoal resume" in said


SUITE = """
title = "Mine"
[defaults]
env = "CartPole-v1"
max_env_steps = 300
limit = true
seeds = [1]
[[case]]
preset = "a2c"
overrides = { "envs.backend" = "loop", "eval.enabled" = false, actors = 1 }
[[case]]
preset = "a2c"
name = "killed"
kill = ["actor 0"]
[[case]]
peer = "sb3"
max_seconds = 3.0
"""


def test_bench_without_a_checkout(shoal):
    """Without benchmarks/ there is no limit, no report.html, no peer and nobody is killed."""
    home, command = shoal
    (home / "mine.toml").write_text(SUITE)
    said = command("bench", "mine.toml", "--out", home / "bench")
    assert "The composed limit was not measured in this run." in said
    for what in ("peers", "runs whose processes are killed"):
        assert f"{what} are measured from a checkout of shoal: run it in the repository's root" in said
    assert {path.name for path in (home / "bench").iterdir() if path.suffix} == {"results.jsonl", "results.md"}
    assert "too few runs" in command("bench", "compare", home / "bench", home / "bench")
    assert "throughput" in command("bench", "--help")
