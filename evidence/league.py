"""Many policies, of issue 19: the league against self-play, kills in a league, players that learn equally fast."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evidence.faults import kill_when
from evidence.lines import Line, shoal
from shoal.experiment.league_record import LeagueRecord, exploitability_over_time
from shoal.experiment.run import load
from shoal.experiment.rundir import RunDir

__all__ = ["LINES", "finished"]

SEEDS = (21, 22, 23, 24, 25)
MATRIX_SEEDS = (41, 42, 43, 44, 45)  # values were tuned on seeds 11 to 13; seeds 21 to 25 and 31 to 35 were run with other values
ROCK, CYCLE = "shoal/RockPaperScissors-v0", "shoal/FiveCycle-v0"
# The same for both schemes. Batches of 1,024 decisions, a falling rate, and values with a torso of their own: noise alone moves a
# policy away from the equilibrium, and errors of the value did so through the layers that it shared with the policy.
RATES = ("--algorithm.entropy", "0", "--algorithm.optimiser", "sgd", "--algorithm.lr", "0.36", "--algorithm.lr-final", "0.06",
         "--anneal-env-steps", "900000", "--algorithm.grad-norm", "0", "--algorithm.unroll", "4", "--net.hidden", "16",
         "--net.separate-value", "--architecture.batch-slots", "1", "--runtime", "inline", "--eval.every-env-steps", "10000",
         "--eval.episodes", "2", "--eval.last-env-steps", "10", "--no-tensorboard", "--console.mode", "none")
# Twice the life of a snapshot halves their number: results against each are twice as many when PFSP looks at them.
LEAGUE = ("--architecture.envs-per-actor", "512", "--league.league-exploiters", "0", "--league.least-steps", "40960",
          "--league.most-steps", "40960", "--league.hard-power", "6", "--league.snapshot-share", "0.65",
          "--league.verification-share", "0.3")
KUHN = ("--league.league-exploiters", "0", "--runtime", "inline", "--eval.episodes", "2", "--eval.last-env-steps", "10",
        "--no-tensorboard", "--console.mode", "none")
SELF_PLAY = ("--policies", "self-play", "--architecture.envs-per-actor", "128")
# The command with a snapshot of the metrics for every evaluation: self-play makes dozens of them between two of the usual ones.
OFTEN = "import sys; from shoal.experiment import session; session.SNAPSHOT_SECONDS = session.GLANCE_SECONDS = 0.02; " \
        "from shoal.cli import main; sys.exit(main(sys.argv[1:]))"
EVALUATIONS = 80  # of about 88 that a run makes; with fewer of them known the last third says little


@contextmanager
def finished(*words: str, seed: int, often: bool = False) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """A run that has ended: the command that gave it, its directory and its summary. `often`: its metrics have every evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = ["train", *words, "--seed", str(seed)]
        whole = [*command, "--run-dir", str(run)]
        done = subprocess.run([sys.executable, "-c", OFTEN, *whole], capture_output=True, text=True, timeout=3600, check=False) \
            if often else shoal(*whole, timeout=3600)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        yield "shoal " + " ".join(command), run, json.loads((run / "summary.json").read_text())


def exploitability(words: tuple[str, ...], env_steps: int, seed: int, env: str = ROCK) -> dict[str, Any]:
    """Of the current policy, at every evaluation, and its mean over the last third of them."""
    words = ("league", env, *RATES, *words, "--max-env-steps", str(env_steps))
    with finished(*words, seed=seed, often=True) as (command, run, _):
        values = [value for _, value in exploitability_over_time(RunDir.open(run))]
    if len(values) < EVALUATIONS:
        raise RuntimeError(f"the metrics show {len(values)} evaluations, and {EVALUATIONS} are needed")
    last = values[-max(1, len(values) // 3):]
    return {"command": command, "mean": round(sum(last) / len(last), 4), "evaluations": len(values),
            "values": [round(value, 3) for value in values[:: max(1, len(values) // 30)]]}


def rock(seed: int) -> dict[str, Any]:
    """Each main policy makes about 880 updates: a league's env steps are those of both players and of their opponents."""
    league, alone = exploitability(LEAGUE, 3_200_000, seed), exploitability(SELF_PLAY, 900_000, seed)
    return {"met": league["mean"] <= 0.05 and alone["mean"] >= 0.3, "league": league, "self-play": alone}


def cycle(seed: int) -> dict[str, Any]:
    league, alone = exploitability(LEAGUE, 3_200_000, seed, CYCLE), exploitability(SELF_PLAY, 900_000, seed, CYCLE)
    return {"met": league["mean"] < alone["mean"], "league": league, "self-play": alone}


def kuhn(seed: int) -> dict[str, Any]:
    """The pool of a league on Kuhn poker: the exploitability of the Nash mixture over its snapshots."""
    with finished("league", "shoal/Kuhn-v0", *KUHN, "--max-seconds", "120", seed=seed) as (command, run, summary):
        record = LeagueRecord(RunDir.open(run))
        nash, current = record.pool_nash(load(run)), record.exploitability
    assert nash is not None
    return {"met": nash.exploitability <= 0.1, "command": command, "pool_nash": round(nash.exploitability, 4),
            "snapshots": len(record.snapshots), "current": [round(value, 3) for _, value in current][-20:],
            "seconds": summary["seconds"], "env_steps": summary["env_steps"]}


def balance(seed: int) -> dict[str, Any]:
    """Learner steps of four players after five minutes."""
    words = ("league", "shoal/TicTacToe-v0", "--max-seconds", "300", "--console.mode", "none")
    with finished(*words, seed=seed) as (command, _, summary):
        steps = {name: policy["learner_steps"] for name, policy in summary["policies"].items()}
    return {"met": len(steps) == 4 and max(steps.values()) <= 1.1 * min(steps.values()), "command": command, "learner_steps": steps,
            **{key: summary[key] for key in ("env_steps", "seconds", "env_steps_per_second")}}


def kills(seed: int) -> dict[str, Any]:
    """Coordinator (the vault is its), a learner and half of the actors are killed; then the run is resumed."""
    victims = ("coordinator 0", "main.learner 0", "actor 1", "actor 2", "coordinator 0")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = ["train", "league", "shoal/TicTacToe-v0", "--actors", "4", "--league.least-steps", "1000", "--league.most-steps",
                   "2000", "--max-env-steps", "800000", "--checkpoint.every-seconds", "1", "--console.mode", "none", "--seed",
                   str(seed)]
        process = subprocess.Popen([str(Path(sys.executable).parent / "shoal"), *command, "--run-dir", str(run)],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        done = [kill for kill in (kill_when(process, victim, run / "metrics.jsonl", 100_000 * (k + 1))
                                  for k, victim in enumerate(victims)) if kill]
        _, errors = process.communicate(timeout=1800)
        if process.returncode:
            raise RuntimeError(errors[-2000:])
        before, summary = _table(run), json.loads((run / "summary.json").read_text())
        resumed = shoal("resume", str(run), "--max-env-steps", "900000", "--console.mode", "none", timeout=1800)
        after = _table(run)
    met = len(done) == len(victims) and not resumed.returncode and after["reports"] > before["reports"] \
        and all(table["reports"] == table["games"] and not table["missing"] for table in (before, after))
    return {"met": met, "command": "shoal " + " ".join(command), "kills": done, "restarts": summary["restarts"], "before": before,
            "after": after}


def _table(run: Path) -> dict[str, Any]:
    """Games and reports of the payoff table, and snapshots that it knows and the vault does not have."""
    record = LeagueRecord(RunDir.open(run))
    return {"games": record.table.played, "reports": record.table.reports, "snapshots": len(record.snapshots),
            "missing": sorted(set(record.snapshots) - set(record.vault.names()))}


LINES = [
    Line("mechanism-league-rps", 19, "rock-paper-scissors, entropy 0, the same rates: exploitability of the current main policy, "
         "mean over the last third of evaluations, is at most 0.05 in a league and at least 0.3 in self-play", rock, MATRIX_SEEDS),
    Line("mechanism-league-cycle", 19, "five actions in a cycle, entropy 0, the same rates: exploitability of the current main "
         "policy, mean over the last third of evaluations, is lower in a league than in self-play", cycle, MATRIX_SEEDS),
    Line("mechanism-league-kuhn", 19, "Kuhn poker within 5 minutes: the exploitability of the Nash mixture over the snapshots is "
         "at most 0.1", kuhn, SEEDS),
    Line("speed-league-balance", 19, "learner_steps of the 4 players of a league on tic-tac-toe are within 10 % of each other "
         "after 5 minutes", balance, seeds=(1,)),
    Line("stress-league-kills", 19, "coordinator, a learner and half of the actors of a league are killed: the payoff table has as "
         "many games as reports, no snapshot is lost, and resume goes on", kills, seeds=(0,)),
]
