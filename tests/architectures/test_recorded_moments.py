"""Observations of a recording count once in the learner's statistics, whoever is killed when."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from shoal import cli
from shoal.algorithms.common.normaliser import Normaliser
from shoal.algorithms.records.moments import MOMENTS, MomentRelay, observation_moment_fields
from shoal.experiment.checkpoints import TensorFiles
from shoal.offline import open_shards
from shoal.roles.learner import Learner
from shoal.roles.recorded_moments import COLUMNS, CountedWindows, WindowSums, next_window, reply_fields
from shoal.slots import Layout
from tests.architectures.test_dataset_reader import BATCH, SMALL, TOTAL, a_question, an_answer, drawn, numbered, reader_of
from tests.architectures.test_hard_to_kill import die, go
from tests.runtime.harness import Killer

AHEAD = 3  # batches that the learner has asked for


class Learning:
    """A learner over real readers: asks, takes, counts; all of them are saved, die and begin again at any moment."""

    def __init__(self, make, readers):
        self.make, self.readers = make, readers
        self.lives = -1
        self.roles = [make(index) for index in range(readers)]
        self.saved = [role.state() for role in self.roles]
        self.saving, self.counted_then = None, None
        self.learner_saved = {"windows": np.zeros((readers, COLUMNS), np.int64), **self._normaliser(None)}
        self.kill_learner()

    def _normaliser(self, saved):
        self.state = {}
        self.statistics = Normaliser(self.state, "observations", 1)
        for name, tensor in self.state.items():
            if saved is not None:
                tensor.copy_(saved[name])
        return {name: tensor.clone() for name, tensor in self.state.items()}

    # ------------------------------------------------------------------ events
    def kill_learner(self):
        """The next one begins from the checkpoint; nobody waits for its questions any more."""
        self.lives, self.saving = self.lives + 1, None
        self._normaliser(self.learner_saved)
        self.windows = self.learner_saved["windows"].copy()
        self.counted = CountedWindows(self.readers, True, self.lives)
        self.counted.begin(self.windows)
        self.asked = deque()

    def kill_reader(self, index):
        """Its successor is asked what was not answered."""
        self.saving = None
        self.roles[index] = self.make(index)
        self.roles[index].load(self.saved[index])

    def save(self):
        """One role after the other; a death in between leaves the checkpoint before."""
        self.saving = [] if self.saving is None else self.saving
        if not self.saving:
            self.saving.append({"windows": self.windows.copy(), **{name: tensor.clone() for name, tensor in self.state.items()}})
        elif len(self.saving) <= self.readers:
            self.saving.append(self.roles[len(self.saving) - 1].state())
        else:
            (self.learner_saved, *self.saved), self.saving = self.saving, None

    def ask(self):
        if len(self.asked) < AHEAD:
            questions = [a_question(BATCH // self.readers) for _ in self.roles]
            for index, question in enumerate(questions):
                self.counted.ask(question, index)
            self.asked.append([questions, [None] * self.readers])

    def answer(self, index):
        """A reader answers the oldest question that waits for it."""
        for questions, answers in self.asked:
            if answers[index] is None:
                answers[index] = an_answer(self.roles[index])
                self.roles[index]._answer(questions[index], answers[index])
                return

    def take(self):
        if not self.asked or any(answer is None for answer in self.asked[0][1]):
            return
        _, answers = self.asked.popleft()
        moments = {part: np.concatenate([answer[MOMENTS][part] for answer in answers])
                   for part in ("count", "shift", "sum", "square")}
        self.counted.receive(answers, moments)
        self.statistics.merge(self.statistics.sums(moments))
        self.windows += self.counted.news(self.windows)

    def work(self, rng):
        event = int(rng.integers(8))
        if event >= 4:
            self.answer(int(rng.integers(self.readers)))
        else:
            (self.ask, self.take, self.take, self.save)[event]()

    @property
    def done(self):
        return all(role.epoch >= 2 for role in self.roles)


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("memory", [1024.0, SMALL])
@pytest.mark.parametrize("seed", range(8))
def test_random_deaths(tmp_path, readers, memory, seed):
    """However many learners and readers have died, at any moment and from any checkpoint."""
    path, rng = numbered(tmp_path / "x"), np.random.default_rng(seed)
    run = Learning(lambda index: reader_of(path, [], readers * memory, normalised=True, index=index, replicas=readers), readers)
    for _ in range(40):
        for _ in range(int(rng.integers(1, rng.choice([20, 100])))):
            run.work(rng)
        run.kill_learner() if rng.random() < 0.2 else run.kill_reader(int(rng.integers(readers)))
    for _ in range(100_000):
        if run.done:
            break
        run.work(rng)
    assert run.done, "the readers came to no end"
    everything = np.concatenate([rows for rows, _ in drawn(reader_of(path, []), TOTAL, count=1)])
    assert run.state["observations.count"].item() == TOTAL
    assert run.state["observations.mean"].item() == pytest.approx(everything.mean(dtype=np.float64))
    assert run.state["observations.m2"].item() == pytest.approx(((everything - everything.mean(dtype=np.float64)) ** 2).sum())


def test_next_window():
    assert next_window((0, 0, 0), 4, 90) == 0
    assert next_window((3, 4, 90), 4, 90) == 3
    assert next_window((4, 4, 90), 6, 90) == 6, "all of it is counted, in whatever windows it is read now"
    assert next_window((3, 4, 90), 6, 90) == 0 and next_window((4, 4, 90), 4, 91) == 0


def told(*numbers):
    return {"counted": np.array(numbers)}


def test_sums_that_came_already():
    """A new reader sends the first window again, and with it the second: neither counts here, and the second is asked for anew."""
    counted, question = CountedWindows(1, True, 0), told(0, 0, 0, 0)
    counted.begin(np.zeros((1, COLUMNS), np.int64))
    for first, end, left in ((0, 1, 5.0), (0, 2, 0.0)):
        moments = {"count": np.full((1, 1), 5.0)}
        counted.receive([told(1, first, end, 3, 90)], moments)
        assert moments["count"].item() == left
    counted.ask(question, 0)
    assert question["counted"].tolist() == [2, 1, 3, 90]


def test_question_of_an_earlier_session():
    """It is answered without sums, and the later session goes on as if nothing had come."""
    sums, moments, answer = WindowSums(1, 2, 90), MomentRelay(1), Layout(observation_moment_fields(1) | reply_fields()).empty()
    found = []
    for session in (2, 1, 2):
        question = told(session, 0, 0, 0)
        sums.heed(question)
        moments.count[:] = 7.0
        sums.add(moments)
        sums.answer(question, answer)
        found.append((answer[MOMENTS]["count"].item(), answer["counted"][:3].tolist()))
    assert found == [(7.0, [2, 0, 1]), (0.0, [1, 1, 1]), (14.0, [2, 1, 3])]


# ---------------------------------------------------------------------------------------------- real runs
def cart(path, files):
    """CartPole in as many files."""
    for number in range(files):
        words = ["data", "record", "random", "CartPole-v1", "--episodes", "3", "--seed", str(number), "--out", str(path)]
        assert cli.main([*words, *(["--append"] if number else [])]) == 0
    return path


def learned(folder):
    """The learner's statistics in the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("[0-9]*"))
    return TensorFiles().load(next(newest.glob("learner-0*")))


class Mortal(Learner):
    """Dies after its second update: long before the second checkpoint of a run."""

    async def _update(self, batch):
        done = await super()._update(batch)
        if self.me.incarnation == 0 and self.counts[1] == 2:
            die()
        return done


def test_learner_killed_before_the_second_checkpoint(tmp_path):
    """All that it had counted is gone with it, and the readers send it again."""
    logs = cart(tmp_path / "logs", 2)
    session = go(tmp_path / "run", "bc", "CartPole-v1", every=1000.0,
                 change=lambda program: setattr(program.nodes["learner"], "role", Mortal),
                 until=lambda control: control.total("learner_steps") >= 50,
                 overrides={"demos": str(logs), "offline": True, "architecture": {}, "eval": {"episodes": 2},
                            "algorithm": {"normalise_observations": True}})
    assert session.reason == "until" and session.summary["restarts"] == 1
    assert learned(tmp_path / "run")["learn/observations.count"].item() == sum(open_shards(str(logs)).shard_steps)


KILLED = {
    "readers": ("bc", ("reader-0", "reader-1"), 4, {"data": {"readers": 2}}),
    "both": ("bc", ("learner-0", "reader-0", "learner-0", "reader-1"), 4, {"data": {"readers": 2}}),
    "learners": ("bc", ("learner-0", "learner-1", "reader-0"), 3, {"learners": 2}),
    "windows": ("bc", ("learner-0", "reader-0"), 4, {"data": {"memory_mb": 0.0}, "replay": {"batch_size": 8}}),
    "table": ("apex", ("demonstrations-0", "learner-0"), 2, {"replay": {"batch_size": 16}}),
}


@pytest.mark.parametrize("case", KILLED)
@pytest.mark.parametrize("every", [0.3, 1000.0])
def test_kills(tmp_path, case, every):
    """With a checkpoint at the beginning alone, or with many."""
    preset, victims, times, more = KILLED[case]
    logs = cart(tmp_path / "logs", 8 if case == "windows" else 2)
    sizes = open_shards(str(logs)).shard_steps
    if case == "windows":
        more = {**more, "data": {"memory_mb": 4 * max(sizes) * 60 / 1e6}}
    killer = Killer(victims, times, "learner_steps", 30)
    session = go(tmp_path / "run", preset, "CartPole-v1", act=killer, until=killer.done, every=every,
                 overrides={"demos": str(logs), "offline": True, "architecture": {}, "eval": {"episodes": 2},
                            "algorithm": {"normalise_observations": True}, **more})
    assert session.reason == "until" and session.summary["restarts"] >= times
    assert learned(tmp_path / "run")["learn/observations.count"].item() == sum(sizes)
