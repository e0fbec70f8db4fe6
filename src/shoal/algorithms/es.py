"""Evolution strategies (Salimans et al. 2017, 1703.03864): a policy is improved by what perturbed copies of it score.

    iteration k      eps_0 .. eps_n from (seed, k)      slices of a table of noise; nobody sends them
    every worker     plays its share of theta + sigma eps_j and theta - sigma eps_j, whole episodes
    all together     returns [N]  ->  centred ranks  ->  g = sum (u+ - u-) eps / N  ->  Adam on  -g + l2 theta

                     paper and its code                          here
    members          one at a time on each core                  many in one batched forward pass, in chunks of fixed size
    noise            a table per machine, drawn by each worker   the table; draws from (seed, iteration), known to all
    observations     statistics of 1 % of all episodes           of one chunk of members in every iteration, in turns
                     clipped at 5 deviations                     at 10, as everywhere in shoal
    Box actions      linear, clipped by the environment          tanh within their bounds; linear where there are none
    time limits      cut off at an adaptive limit                the same, with --algorithm.episode-limit
    convolutions     normalised with a reference batch           the same, with --algorithm.reference-batch
    evaluation       0.3 % of all jobs play theta                the Evaluator plays theta
    environments     seeds not said                              each member's episodes have seeds of their own, + and - too

No gradient of a loss exists. What a worker computes follows from the seed, the iteration and the chunk, so any number of workers
gives the bits of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from shoal.acting import Progress
from shoal.algorithms.common.metrics import GRAD_NORM, LEARNING_RATE
from shoal.algorithms.common.plan import AlgorithmPlan, weights_layout
from shoal.algorithms.evolution.learn import EvolutionLearn
from shoal.algorithms.evolution.model import EvolutionModel, EvolutionPolicy, PerturbedMembers
from shoal.algorithms.evolution.noise import NoiseTable
from shoal.algorithms.records.moments import observation_moment_fields
from shoal.algorithms.records.spaces import observation_fields
from shoal.algorithms.records.step_view import StepViewer
from shoal.errors import ConfigError
from shoal.learning import Algorithm, Tolerance
from shoal.ops.evolution import Shaping
from shoal.options import Options, number
from shoal.population import ScoreRecord
from shoal.slots import Field, Layout
from shoal.telemetry.metrics import Metric

if TYPE_CHECKING:
    from shoal.envs import EnvSpec
    from shoal.nets import NetConfig

__all__ = ["ES", "Config", "Scores"]

LONGEST_EPISODE = 10_000  # of environments that do not say where theirs end

METRICS = (
    Metric("population_mean", "gauge", "reward", "Mean return of the perturbed policies of the last iteration."),
    Metric("population_best", "gauge", "reward", "Best of them."),
    Metric("population_std", "gauge", "reward", "Their standard deviation; 0 leaves nothing to learn from."),
    Metric("param_norm", "gauge", "", "Norm of the parameters; perturbations are --algorithm.sigma in every direction."),
    Metric("longest_episode", "gauge", "env steps", "Where episodes of the next iteration are cut off."),
)


@dataclass(frozen=True)
class Config(Options):
    """Evolution strategies."""

    section = "algorithm"

    population: int = number(64, at_least=2, at_most=1_000_000)
    """Perturbed policies in an iteration, N."""
    episodes: int = number(1, at_least=1, at_most=10_000)
    """Episodes of each of them; its score is their mean return."""
    sigma: float = number(0.02, above=0, live=True)
    """Standard deviation of the perturbations."""
    mirrored: bool = True
    """Play every perturbation together with its opposite."""
    shaping: Shaping = "ranks"
    """What counts in place of returns: their centred ranks, the normalised returns, or the raw ones."""
    lr: float = number(0.01, above=0, live=True)
    """Learning rate."""
    lr_final: float | None = number(None, at_least=0, live=True)
    """Learning rate at the end of the env_steps budget; none keeps it constant."""
    optimiser: Literal["adam", "sgd"] = "adam"
    """adam or sgd."""
    optimiser_epsilon: float = number(1e-8, above=0)
    """Epsilon of adam."""
    momentum: float = number(0.0, at_least=0, below=1)
    """Of sgd: share of the last direction that is kept."""
    weight_decay: float = number(0.005, at_least=0, live=True)
    """How strongly parameters are pulled towards 0, so that sigma stays a perturbation of note (l2coeff)."""
    normalise_observations: bool = True
    """Scale floating-point observations by their running mean and deviation; pixels are scaled anyway."""
    action_noise: float = number(0.0, at_least=0)
    """Deviation of the noise on Box actions, in units of half their range."""
    episode_limit: int | None = number(None, at_least=1)
    """Cut episodes off after this many decisions at first; none leaves them to the environment."""
    limit_share: float = number(0.5, above=0, at_most=1)
    """Raise the limit when this share of members reached it."""
    limit_growth: float = number(1.5, above=1)
    """What the limit is then multiplied by."""
    reference_batch: int | None = number(None, at_least=2, at_most=100_000)
    """Virtual batch normalisation of convolutional policies: random play's observations whose statistics every member's layers are
    normalised with; none leaves them as they are."""
    noise_size: int = number(10_000_000, at_least=1, at_most=1_000_000_000)
    """Normal numbers in the table that perturbations are slices of; one table per machine, 4 bytes each."""

    def validate(self) -> None:
        super().validate()
        if self.mirrored and self.population % 2:
            raise ConfigError(f"--algorithm.population {self.population} is odd, and --algorithm.mirrored plays pairs; give "
                              f"{self.population + 1}, or --algorithm.no-mirrored")
        if self.momentum and self.optimiser != "sgd":
            raise ConfigError(f"--algorithm.momentum {self.momentum:g} is of sgd, but --algorithm.optimiser is {self.optimiser}; "
                              "give --algorithm.optimiser sgd, or leave it out")


@dataclass(frozen=True)
class Scores(ScoreRecord):
    """What the workers of a population tell each other of an iteration: a return and a number of decisions for every member."""

    seats: int
    members: int
    episodes: int
    mask_size: int = 0
    observation_moments: int = 0
    """How many numbers of an observation are normalised; 0 for none."""
    previous: bool = False

    @property
    def layout(self) -> Layout:
        one = Field((self.members,), "float64")
        return Layout({"score": one, "decisions": one, **observation_moment_fields(self.observation_moments)})

    def viewer(self, seats: int) -> StepViewer:
        return StepViewer()


class ES(Algorithm):
    """See the module."""

    name, config_class, tolerates = "es", Config, Tolerance.NOTHING
    evolves = True
    metrics = (METRICS[0], METRICS[1], GRAD_NORM, LEARNING_RATE, *METRICS[2:])

    def __init__(self, config: Config, spec: EnvSpec, net: NetConfig, seats: int) -> None:
        config.validate()
        if spec.seats_per_env != 1:
            raise ConfigError(f"es plays one policy in each environment, but {spec.name} has {spec.seats_per_env} agents; use ppo "
                              "or impala, which share one policy among them")
        self.config, self.plan = config, AlgorithmPlan.of(spec, net, seats, config.normalise_observations)

    @cached_property
    def record(self) -> Scores:
        return Scores(self.plan.seats, self.config.population, self.config.episodes, self.plan.mask_size, self.plan.norm_size)

    def model(self, seed: int = 0) -> EvolutionModel:
        return EvolutionModel(self.plan, seed, self.config.reference_batch or 0)

    def policy(self) -> EvolutionPolicy:
        return EvolutionPolicy(self.model())

    def members(self, seed: int, rows: int) -> PerturbedMembers:
        model = self.model()
        return PerturbedMembers(self.config, model, rows, self._table(model), seed)

    def learn(self, seed: int) -> EvolutionLearn:
        model = self.model(seed)
        longest = self.config.episode_limit or self.plan.spec.max_episode_steps or LONGEST_EPISODE
        return EvolutionLearn(self.config, model, self._table(model), seed, longest, self._reference.empty())

    @property
    def _reference(self) -> Layout:
        """Of the reference batch, where there is one."""
        size, space = self.config.reference_batch, self.plan.spec.observation_space
        return Layout({} if size is None else {"reference": observation_fields(space, size)})

    def _table(self, model: EvolutionModel) -> NoiseTable:
        return NoiseTable(self.config.noise_size, model.params.numel())

    def explore(self, index: int, count: int, seats: int, progress: Progress) -> np.ndarray:
        return np.full(seats, self.config.action_noise, np.float32)

    def published_layout(self) -> Layout:
        layout = weights_layout(self.model().params.numel(), self.plan.norm_size)
        return Layout({**layout.fields, **self._reference.fields})
