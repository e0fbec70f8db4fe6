"""The wheel is whole: built, installed into an empty environment, it trains from an empty folder."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_trains_in_an_empty_environment(tmp_path):
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("shoal-*.whl")
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # What shoal depends on is read from where it is installed already; shoal itself is not, only the wheel is.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    run(sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--quiet", "--no-deps", "--no-index", wheel)
    where = run(home / "bin" / "python", "-c", "import shoal; print(shoal.__file__)", cwd=tmp_path).strip()
    assert where.startswith(str(site))
    short = ("--max-env-steps", "3000", "--run-dir", tmp_path / "run")
    said = run(home / "bin" / "shoal", "train", "ppo", "shoal/Catch-v0", *short, cwd=tmp_path)
    assert (tmp_path / "run" / "summary.json").exists() and "shoal resume" in said
