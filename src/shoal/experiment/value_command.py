"""`shoal data evaluate RUN PATH`: what a run's policy is worth, from a recording and without a simulator. docs/offline.md."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.experiment.parse import parse_command
from shoal.experiment.policy_choice import PolicyName
from shoal.experiment.references import check_trust, modules_of
from shoal.options import Options, number
from shoal.telemetry.outputs import say

if TYPE_CHECKING:
    from shoal.offline.policy_evaluation import PolicyValue

__all__ = ["evaluate_command"]

USAGE = "shoal data evaluate RUN PATH"


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """Estimate from a recording what a run's policy is worth where episodes begin."""

    gamma: float = number(0.99, at_least=0, at_most=1)
    """Discount of the value that is estimated."""
    explore: bool = False
    """Evaluate the policy as it explores, instead of greedily."""
    policy: PolicyName = "best"
    """Which policy of the run: the best of all evaluated versions, or the last one."""
    updates: int = number(5_000, at_least=1)
    """Updates of fitted Q."""
    batch_size: int = number(256, at_least=1)
    """Decisions in an update."""
    lr: float = number(1e-3, above=0)
    """Learning rate; it falls towards the end."""
    hidden: tuple[int, ...] = (64, 64)
    """Layer sizes of its nets."""
    bootstraps: int = number(20, at_least=2)
    """Nets that learn from resampled episodes: what the interval of fitted Q comes from."""
    confidence: float = number(0.95, above=0, below=1)
    """Of the intervals."""
    seed: int = number(0, at_least=0, below=2**53)
    """Of everything random."""
    out: str | None = None
    """Write the estimates there too, as JSON."""
    trust: bool = False
    """Import modules that the run names, also from outside the installed environment."""

    def validate(self) -> None:
        super().validate()
        if any(size < 1 for size in self.hidden):
            raise ConfigError(f"--hidden {' '.join(map(str, self.hidden))}: every layer needs at least 1 unit")


def evaluate_command(arguments: list[str]) -> int:
    given, options = parse_command(EvaluateOptions, arguments, 2, USAGE)
    if len(given) != 2:
        raise ConfigError(f"{USAGE}: give a run directory, whose policy is evaluated, and a recording")
    found = _evaluated(Path(given[0]), given[1], options)
    if options.out is not None:
        Path(options.out).write_text(json.dumps({"run": given[0], "recording": given[1], "gamma": options.gamma, **asdict(found)},
                                                indent=1) + "\n", encoding="utf-8")
    return 0


def _evaluated(run: Path, recording: str, options: EvaluateOptions) -> PolicyValue:
    from shoal.acting import Progress
    from shoal.experiment.loaded_run import compute_threads
    from shoal.experiment.run import load
    from shoal.experiment.rundir import run_or_best_seed
    from shoal.offline import check_recording, open_demos
    from shoal.offline.fitted_q import FittedQPlan
    from shoal.offline.logged_steps import LoggedSteps, choices_of
    from shoal.offline.policy_evaluation import evaluate_policy

    rundir = run_or_best_seed(run, say)
    for line in check_trust(modules_of(rundir.config()), options.trust):
        sys.stdout.write(f"{line}\n")
    demos, loaded = open_demos(recording), load(rundir.path, policy=options.policy, trust=options.trust)
    prepared = loaded.prepared
    check_recording(demos.info, recording, prepared.spec, prepared.plan.env.name, prepared.plan.experiment.envs.arguments(),
                    foreign=True)
    policy = prepared.algorithm.policy()
    policy.load(loaded.published)
    progress = Progress.of(loaded.published["progress"])
    explore = float(prepared.algorithm.explore(0, 1, 1, progress)[0]) if options.explore else None
    plan = FittedQPlan(options.gamma, options.updates, options.batch_size, options.lr, hidden=options.hidden, seed=options.seed)
    with compute_threads(1):
        steps = LoggedSteps.of(demos)
        found = evaluate_policy(steps, choices_of(policy, steps, explore, options.seed), plan, options.bootstraps,
                                options.confidence, say)
    _tell(found, rundir.path, recording, options)
    return found


def _tell(found: PolicyValue, run: Path, recording: str, options: EvaluateOptions) -> None:
    how = "exploring" if options.explore else "greedy"
    say(f"{run}, {how}: value where episodes begin, discounted by {options.gamma:g}, from {found.episodes:,} episodes of "
        f"{recording}")
    for one in found.estimates:
        say(f"  {one.name:<20} {one.value:>10.4g}   {options.confidence:.0%}: {one.low:.4g} to {one.high:.4g}")
    say(f"  {'the recorded ones':<20} {found.recorded:>10.4g}")
    if found.effective is not None:
        say(f"  effective sample size {found.effective:,.1f} of {found.episodes:,} episodes")
    for words in found.warnings:
        say(f"warning: {words}")
