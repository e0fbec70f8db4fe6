"""Many policies, of issue 19: the league against self-play, and kills in a league."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from evidence.faults import kill_when
from evidence.lines import Line, shoal
from shoal.experiment.league_record import LeagueRecord
from shoal.experiment.rundir import RunDir

__all__ = ["LINES"]

SEEDS = (21, 22, 23, 24, 25)  # values were tuned on seeds 11 to 13
ROCK, CYCLE = "shoal/RockPaperScissors-v0", "shoal/FiveCycle-v0"
# The same for both schemes. Batches of 1,024 decisions: with less, noise alone moves a policy away from the equilibrium.
RATES = ("--algorithm.entropy", "0", "--algorithm.optimiser", "sgd", "--algorithm.lr", "0.2", "--algorithm.grad-norm", "0",
         "--algorithm.unroll", "4", "--net.hidden", "16", "--architecture.batch-slots", "1", "--runtime", "inline",
         "--eval.every-env-steps", "10000", "--eval.episodes", "2", "--eval.last-env-steps", "10", "--no-tensorboard",
         "--console.mode", "none")
LEAGUE = ("--architecture.envs-per-actor", "512", "--league.league-exploiters", "0", "--league.least-steps", "102400",
          "--league.most-steps", "102400", "--league.hard-power", "6")
SELF_PLAY = ("--policies", "self-play", "--architecture.envs-per-actor", "128")


def exploitability(words: tuple[str, ...], env_steps: int, seed: int) -> dict[str, Any]:
    """Of the current policy, at every evaluation that a snapshot shows, and its mean over the last third of them."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = ["train", "league", ROCK, *RATES, *words, "--max-env-steps", str(env_steps), "--seed", str(seed)]
        done = shoal(*command, "--run-dir", str(run), timeout=3600)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found: dict[float, float] = {}
        for line in (run / "metrics.jsonl").read_text().splitlines():
            shot = json.loads(line)
            if shot["kind"] == "snapshot" and shot.get("exploitability") is not None:
                found.setdefault(shot["eval_version"], shot["exploitability"])
    values = list(found.values())
    last = values[-max(1, len(values) // 3):]
    return {"command": "shoal " + " ".join(command), "mean": round(sum(last) / len(last), 4), "evaluations": len(values),
            "values": [round(value, 3) for value in values[:: max(1, len(values) // 30)]]}


def against_self_play(seed: int) -> dict[str, Any]:
    """The same rates and batches for both. The main agent has about a third of this league's env steps."""
    league, alone = exploitability(LEAGUE, 600_000, seed), exploitability(SELF_PLAY, 300_000, seed)
    return {"met": league["mean"] <= 0.05 and alone["mean"] >= 0.3, "league": league, "self-play": alone}


def kills(seed: int) -> dict[str, Any]:
    """Coordinator, a learner and an actor are killed; then the run is resumed."""
    victims = ("coordinator 0", "main.learner 0", "actor 1", "coordinator 0", "actor 0")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = ["train", "league", "shoal/TicTacToe-v0", "--actors", "2", "--league.least-steps", "1000", "--league.most-steps",
                   "2000", "--max-env-steps", "80000", "--checkpoint.every-seconds", "1", "--console.mode", "none", "--seed",
                   str(seed)]
        process = subprocess.Popen([str(Path(sys.executable).parent / "shoal"), *command, "--run-dir", str(run)],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        done = [kill for kill in (kill_when(process, victim, run / "metrics.jsonl", 10_000 * (k + 1))
                                  for k, victim in enumerate(victims)) if kill]
        _, errors = process.communicate(timeout=1800)
        if process.returncode:
            raise RuntimeError(errors[-2000:])
        before, summary = _table(run), json.loads((run / "summary.json").read_text())
        resumed = shoal("resume", str(run), "--max-env-steps", "100000", "--console.mode", "none", timeout=1800)
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
         "mean over the last third of evaluations, is at most 0.05 in a league and at least 0.3 in self-play",
         against_self_play, SEEDS),
    Line("stress-league-kills", 19, "coordinator, a learner and both actors of a league are killed: the payoff table has as many "
         "games as reports, no snapshot is lost, and resume goes on", kills, seeds=(0,)),
]
