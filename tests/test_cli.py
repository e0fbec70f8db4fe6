"""The command as a user types it: exit codes, one sentence for each mistake, signals. What trains is a real process."""

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shoal
from shoal import cli
from tests.tree import ROOT, tree_environment

SHOAL = [sys.executable, "-m", "shoal.cli"]
SMALL = ["--console.mode", "plain", "--no-tensorboard", "--net.hidden", "8", "--eval.episodes", "4",
         "--architecture.envs-per-actor", "4", "--actors", "1"]


def command(*words: str, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run([*SHOAL, *words], capture_output=True, text=True, timeout=timeout, cwd=cwd, env=tree_environment())


@pytest.fixture
def inside(capfd, monkeypatch):
    """A command in this process: importing torch costs two seconds."""

    def call(*words: str) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "path", [*sys.path])
        capfd.readouterr()
        try:
            code = cli.main(words)
        except SystemExit as done:  # --help
            code = done.code
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return call


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A short run, by command."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    done = command("train", "a2c", "CartPole-v1", "--runtime", "inline", "--max-env-steps", "300", "--run-dir", str(folder), *SMALL)
    assert done.returncode == 0, done.stderr
    for word in ("env-step budget used up: ", str(folder), f"shoal play {folder}", f"shoal resume {folder}", "train return"):
        assert word in done.stdout
    return folder


STUCK = """
import atexit, sys
from shoal import cli
from shoal.runtime.ray.ray_config import abandoned
atexit.register(print, "ended by Python")
abandoned.set()
sys.argv = ["shoal", "nosuch"]
sys.exit(cli.main())
"""


def test_exit_code_after_a_lost_cluster():
    """Python's own ending may hang or crash in Ray's threads."""
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, env=tree_environment(), timeout=120)
    assert done.returncode == 2 and "there is no command" in done.stderr and "ended by Python" not in done.stdout


# ---------------------------------------------------------------------------------------------- help and imports
def test_help_answers_at_once():
    """In processor time, which does not depend on what else the machine does."""
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*SHOAL, "--help"], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0 and "shoal train PRESET ENV" in done.stdout
    assert min(took) < 0.3, took


def test_help_names_runtimes_and_sections():
    """`shoal --help` names every runtime and every section."""
    import dataclasses

    from shoal.cli import TRAIN
    from shoal.experiment.config import Experiment
    from shoal.runtime import RUNTIMES

    words = TRAIN.partition("--SECTION.FIELD VALUE")[2]
    sections = {field.name for field in dataclasses.fields(Experiment) if dataclasses.is_dataclass(field.default_factory)}
    assert {*sections, "algorithm", "architecture"} == set(words.replace(",", "").split())
    runtimes = next(line for line in TRAIN.splitlines() if "--runtime" in line).split()[1]
    assert set(runtimes.split("|")) == set(RUNTIMES)
    readme = (ROOT / "README.md").read_text().partition("`--runtime` says where a program runs")[2].partition("\n\n")[0]
    assert all(f"`{runtime}`" in readme for runtime in RUNTIMES)


def test_nothing_heavy_is_imported():
    """Nothing heavy is imported before it is needed."""
    program = "import sys, shoal, shoal.cli; shoal.cli.main(['--version']); shoal.ConfigError; " \
              "print({'torch', 'numpy', 'tyro', 'rich', 'gymnasium'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"shoal {shoal.__version__}", "set()"], done.stderr


def test_the_public_face_is_frozen():
    assert shoal.__all__ == ["Callback", "CheckpointError", "ConfigError", "EnvironmentError_", "ProgramError", "ReplayError",
                             "RoleFailed", "Run", "ShoalError", "Study", "WireError", "__version__", "choice", "load", "log",
                             "loguniform", "resume", "train", "trainable", "tune", "uniform"]
    assert dir(shoal) == sorted(shoal.__all__)
    for name in shoal.__all__:
        getattr(shoal, name)
    with pytest.raises(AttributeError):
        shoal.no_such_thing  # noqa: B018


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert version("shoal") == shoal.__version__


def test_every_option_has_its_help(inside):
    done = inside("train", "ppo", "CartPole-v1", "--help")
    assert done.returncode == 0
    for word in ("--algorithm.clip", "--architecture.envs-per-actor", "--net.hidden", "--until-return", "--faults.hang-seconds",
                 "--eval.every-env-steps", "Everything random derives from it"):
        assert word in done.stdout


# ---------------------------------------------------------------------------------------------- mistakes
BAD = {
    "trian": ["'trian'", "shoal train"],
    "train": ["shoal train PRESET ENV"],
    "train impalla CartPole-v1": ["'impalla'", "did you mean impala?"],
    "train impala": ["which environment?", "CartPole-v1"],
    "train impala CartPol-v1": ["'CartPol-v1'", "did you mean CartPole-v1"],
    "train impala CartPole-v1 Pong": ["'Pong'", "one word too many"],
    "train impala CartPole-v1 --algorithm.lrr 3": ["--algorithm.lrr", "did you mean --algorithm.lr?"],
    "train impala CartPole-v1 --lr 3": ["--lr", "did you mean --algorithm.lr?"],
    "train impala CartPole-v1 --actors -1": ["--actors is -1", "at least 1, or auto"],
    "train impala CartPole-v1 --actors two": ["--actors two", "a whole number"],
    "train impala CartPole-v1 --seed": ["--seed", "needs a value"],
    "train impala CartPole-v1 --seed -3": ["--seed is -3", "at least 0"],
    "train impala CartPole-v1 --max-env-steps -5": ["--max-env-steps is -5", "above 0"],
    "train impala CartPole-v1 --max-seconds 0": ["--max-seconds is 0", "above 0"],
    "train impala CartPole-v1 --max-seconds nan": ["--max-seconds is nan", "above 0"],
    "train impala CartPole-v1 --until-return nan": ["--until-return is nan", "finite"],
    "train impala CartPole-v1 --algorithm.lr inf": ["--algorithm.lr is inf", "above 0"],
    "train ppo CartPole-v1 --algorithm.minibatches 7777": ["--algorithm.minibatches 7777", "lower it"],
    "train --algorithm a2c --architecture actor_learner CartPole-v1 --architecture.buffer-slots 64": ["any age", "vtrace"],
    "train impala CartPole-v1 --algorithm.lr -1": ["--algorithm.lr is -1.0", "above 0"],
    "train impala CartPole-v1 --algorithm.c-bar 2": ["--algorithm.rho-bar 1.0", "--algorithm.c-bar 2.0"],
    "train impala CartPole-v1 --net.hidden 3 x": ["--net.hidden 3 x", "a whole number"],
    "train impala CartPole-v1 --runtime mars": ["--runtime mars", "'inline'"],
    "train impala CartPole-v1 --eval.no-enabled --until-return 3": ["--until-return 3", "--eval.enabled"],
    "train impala CartPole-v1 --envs.kwargs pixels": ["pixels", "name=value"],
    "train impala CartPole-v1 --envs.kwargs foo=3": ["foo"],
    "train impala CartPole-v1 --run-dir RUN": ["RUN already has a run", "shoal resume RUN"],
    "train --algorithm ppo CartPole-v1": ["--algorithm ppo", "--architecture"],
    "train --algorithm pppo --architecture synchronous CartPole-v1": ["'pppo'", "did you mean ppo?"],
    "train --algorithm ppo --architecture sync CartPole-v1": ["'sync'", "did you mean synchronous?"],
    "train --algorithm ppo --architecture synchronous impala CartPole-v1": ["not both"],
    "train impala tests.experiment.gyms:Unlearnable-v0": ["Unlearnable-v0", "action space"],
    "resume EMPTY": ["EMPTY", "no run in it", "shoal train"],
    "resume /no/such/folder": ["/no/such/folder", "does not exist"],
    "resume RUN --eval.episodes 3": ["--eval.episodes stays as the run began with it (", "shoal set RUN eval.episodes=VALUE"],
    "resume RUN --lr 3": ["there is no option --lr; see `shoal resume", "--help`"],
    "resume RUN": ["RUN has already done", "larger --max-env-steps"],
    "eval EMPTY": ["EMPTY", "no run in it"],
    "eval": ["give one run directory", "shoal runs"],
    "eval RUN --episodes 0": ["--episodes is 0", "at least 1"],
    "play /no/such/folder": ["/no/such/folder", "does not exist"],
    "play RUN --video film.avi": ["film.avi", ".gif or .mp4"],
    "show impalla": ["'impalla'", "did you mean impala?"],
    "list all": ["all"],
    "runs /no/such/folder": ["/no/such/folder"],
    "doctor --env CartPol-v1": ["'CartPol-v1'", "CartPole-v1"],
    "replay": ["serve"],
    "train ppo CartPole-v1 --net_arch 64": ["--net_arch", "did you mean --net.hidden?"],
    "train ppo CartPole-v1 --seeds none": ["--seeds none", "a whole number"],
    "train ppo CartPole-v1 --seeds 0": ["--seeds is 0", "whole number from 1"],
    "train ppo CartPole-v1 --seeds-at-once 2": ["--seeds-at-once 2", "--seeds N"],
    "train ppo CartPole-v1 --seeds 2 --seeds-at-once 0": ["--seeds-at-once is 0", "whole number from 1"],
    "train --config nosuch.toml": ["--config nosuch.toml", "cannot be read", "shoal show"],
    "train --config": ["--config", "TOML file"],
    "train ppo CartPole-v1 --init-from EMPTY": ["EMPTY", "no run in it"],
    "train sac Pendulum-v1 --init-from RUN": ["--init-from RUN", "does not fit"],
    "train ppo CartPole-v1 --envs.restart-on-error 3": ["--envs.restart-on-error 3", "--envs.backend loop"],
    "train ppo shoal/Catch-v0 --log.info score": ["--log.info score", "compiled"],
    "train es CartPole-v1 --log.episodes": ["--log.episodes", "evolution"],
    "eval RUN --checkpoint 77": ["no checkpoint 77", "there are 0"],
    "watch /no/such/folder": ["/no/such/folder", "does not exist"],
    "watch": ["no runs under runs/"],
    "plot": ["shoal plot", "shoal runs"],
    "plot RUN --out curves.bmp": ["curves.bmp", ".png"],
    "plot RUN --metric nosuch": ["has no nosuch", "--metric"],
    "clean /no/such/folder": ["/no/such/folder", "not a folder"],
}


PROCESSES = {"trian", "train", "train impala CartPol-v1", "resume EMPTY", "play RUN --video film.avi"}
"""Lines that are given to a real process; the others run in this one."""


@pytest.mark.parametrize("line", BAD)
def test_mistakes(line, trained, tmp_path, inside, monkeypatch):
    """Each mistake is one sentence that names the value and the fix."""
    (tmp_path / "empty").mkdir()

    def real(text: str) -> str:
        return text.replace("RUN", str(trained)).replace("EMPTY", str(tmp_path / "empty"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shoal.experiment.run.must_be_compiled", lambda env: False)  # one more line, the first time on a machine
    done = (command if line in PROCESSES else inside)(*(real(word) for word in line.split()))
    said = done.stderr + done.stdout
    assert done.returncode == 2, said
    assert "Traceback" not in said
    for word in BAD[line]:
        assert real(word) in said, said
    if line != "train":  # which shows the help
        assert len(done.stderr.splitlines()) == 1 and not done.stdout, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"], "something was written"


# ---------------------------------------------------------------------------------------------- looking
def test_list_shows_presets_and_the_grid(inside):
    done = inside("list")
    assert done.returncode == 0
    for word in ("impala", "vtrace x actor_learner", "synchronous", "any replay", "yes", "rep"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_help_of_train_is_its_own(inside):
    said = inside("train", "--help").stdout
    assert "--until-return" in said and "--seeds" in said and "--config" in said and "shoal bench" not in said
    assert "the\n                                        simulator is optional" in said, "whole entries"


@pytest.mark.parametrize("words", [("--help",), ("train", "--help"), ("data", "--help"), ("set", "--help")])
def test_help_fits_100_columns(words, inside):
    done = inside(*words)
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 100


def test_show(inside):
    """`shoal show` prints the graph and where values come from."""
    done = inside("show", "impala")
    assert done.returncode == 0
    for word in ("actor", "learner", "evaluator", "unrolls", "weights", "algorithm.lr", "tuned"):
        assert word in done.stdout
    assert inside("show", "--algorithm", "ppo", "--architecture", "synchronous", "Pendulum-v1").returncode == 0


def test_runs_eval_and_play(trained, inside):
    listed = inside("runs", str(trained.parent))
    assert str(trained) in listed.stdout and "env_steps" in listed.stdout
    evaluated = inside("eval", str(trained), "--episodes", "5")
    assert evaluated.returncode == 0 and "over 5 episodes" in evaluated.stdout
    played = inside("play", str(trained))
    assert played.returncode == 0 and "episode 1: return" in played.stdout


def test_doctor(inside):
    assert inside("doctor").returncode == 0
    sick = inside("doctor", "--env", "tests.experiment.gyms:Poison-v0")
    assert sick.returncode == 1 and "nan" in sick.stdout.lower()


# ---------------------------------------------------------------------------------------------- running
def test_resume_by_command(trained, tmp_path):
    import shutil

    folder = shutil.copytree(trained, tmp_path / "run")
    done = command("resume", str(folder), "--max-env-steps", "900", "--console.mode", "none")
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["env_steps"] >= 900 and summary["stopped_by"] == "env_steps"


def test_options_may_come_first(tmp_path):
    done = command("train", "--runtime", "inline", "--max-env-steps=64", "a2c", "CartPole-v1", "--run-dir",
                   str(tmp_path / "run"), *SMALL)
    assert done.returncode == 0, done.stderr


def start(folder: Path, *words: str, stepped: bool = True) -> subprocess.Popen:
    """A local run that would go on for ever, waited for until its environments step, or only until it has a process below it."""
    process = subprocess.Popen([*SHOAL, "train", "impala", "CartPole-v1", "--run-dir", str(folder), *words, *SMALL],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=tree_environment())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (_stepped(folder) if stepped else _descendants(process.pid)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    return process


def _stepped(folder: Path) -> bool:
    rows = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    return any('"env_steps":0,' not in row for row in rows) and any((folder / "checkpoints").glob("0*"))


def test_ctrl_c_saves_and_says_goodbye(tmp_path):
    process = start(tmp_path / "run")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 130, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "interrupt" and "shoal resume" in out and "Traceback" not in err
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    assert 0 < int(newest.name) <= summary["env_steps"]


@pytest.mark.parametrize("moment", ["starting", "running"])
def test_a_second_ctrl_c_kills(moment, tmp_path):
    """Roles and fork server are gone, whatever they were doing."""
    process = start(tmp_path / "run", stepped=moment == "running")
    children = _descendants(process.pid)
    assert len(children) >= (4 if moment == "running" else 1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=180)
    assert process.returncode == 130
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in children):
        time.sleep(0.05)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_killed_and_resumed(tmp_path):
    """A run that was killed half-way is resumed, and no count runs backwards."""
    folder = tmp_path / "run"
    process = start(folder, "--checkpoint.every-seconds", "1")
    time.sleep(2)
    process.kill()
    process.communicate(timeout=180)
    assert json.loads((folder / "summary.json").read_text())["stopped_by"] is None
    before = max(_counted(folder)[-1], *(int(path.name.partition("+")[0]) for path in (folder / "checkpoints").glob("0*")))
    done = command("resume", str(folder), "--max-env-steps", str(before + 2000), "--console.mode", "none")
    assert done.returncode == 0, done.stderr
    counted = _counted(folder)
    assert counted == sorted(counted) and counted[-1] >= before + 2000


def _counted(folder: Path) -> list[int]:
    from shoal.telemetry.outputs import read_lines

    return [row["env_steps"] for row in read_lines(folder / "metrics.jsonl") if row["kind"] == "snapshot"]


def _descendants(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


@pytest.mark.parametrize("runtime", ["inline", "local"])
def test_broken_environment_exits_with_3(runtime, tmp_path):
    """An environment that breaks its contract ends the run with 3."""
    done = command("train", "a2c", "tests.experiment.gyms:Poison-v0", "--runtime", runtime, "--max-seconds", "60", "--run-dir",
                   str(tmp_path / "run"), *SMALL)
    assert done.returncode == 3, done.stderr + done.stdout
    assert "nan" in done.stderr and "Poison-v0" in done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "failure"
    if runtime == "local":
        assert "Traceback" in done.stderr and str(tmp_path / "run" / "logs") in done.stderr
