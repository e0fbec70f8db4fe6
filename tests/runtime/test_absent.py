"""A checkpoint while a role is not there: it died, and waits for room. What stands for it is what its successor begins from."""

from pathlib import Path

from shoal.runtime import Program
from shoal.runtime.supervisor import NotRunning, Supervisor
from shoal.slots import Field, InlineAllocator, Layout
from tests.runtime.harness import Watch

LAYOUT = Layout({"x": Field((1,), "i8")})


def role(me, **arguments):
    """Never made."""


class Stage(Supervisor):
    """Roles that only write their file, if they are there."""

    def __init__(self, session, learners=1, late=()):
        program = Program("t")
        items, weights = program.stream("items", LAYOUT), program.broadcast("weights", LAYOUT)
        program.add("actor", role, out=items.sink, weights=weights.reader)
        program.add("learner", role, source=items.source, weights=weights.publisher, replicas=learners)
        program.add("evaluator", role, weights=weights.reader)
        program.build(InlineAllocator())
        super().__init__(program, session)
        self.gone, self.errors = set(), {}
        for node, index in program.instances():
            self.running[f"{node}-{index}"] = (node, index)
            if node not in late:
                self.receive(f"{node}-{index}", {"kind": "ready", "stateful": node != "actor", "shares": node == "learner"})

    def _send(self, instance, command):
        folder = Path(command["arguments"]["folder"])
        if instance in self.gone:
            self._answered(command["id"], None, NotRunning(f"{instance} died"))
        elif instance in self.errors:
            self._answered(command["id"], None, f"{instance}: {self.errors[instance]}")
        else:
            (folder / f"{instance}.safetensors").write_text(f"{instance} in {folder.name}")
            self._answered(command["id"], f"{instance}.safetensors", None)

    def wait(self, until, seconds):
        """Every command is answered at once."""

    def _spawn(self, node, index):
        pass

    def run(self):
        pass

    def close(self):
        pass


def contents(folder):
    return {path.stem: path.read_text().rpartition(" ")[2] for path in folder.iterdir()}


def saved(stage, folder):
    """What a checkpoint holds: of each role the one in which it was written; None where it failed."""
    stage.checkpoint(folder)
    where, ok = stage.session.saves[-1]
    assert where == folder
    return contents(folder) if ok else None


def test_last_file_of_a_missing_role_is_kept(tmp_path):
    """Which is what its successor begins from. It is said once, and once more when it has been there meanwhile."""
    stage = Stage(Watch())
    first, *more = (tmp_path / name for name in ("a", "b", "c", "d", "e"))
    assert saved(stage, first) == {"learner-0": "a", "evaluator-0": "a"}
    stage.gone = {"evaluator-0"}
    for folder in more[:2]:
        assert saved(stage, folder) == {"learner-0": folder.name, "evaluator-0": "a"}
    assert [(e["kind"], e["role"]) for e in stage.events()] == [("checkpoint", "evaluator-0")]
    stage.gone = set()
    assert saved(stage, more[2]) == {"learner-0": "d", "evaluator-0": "d"}
    stage.gone = {"evaluator-0"}
    assert saved(stage, more[3])["evaluator-0"] == "d" and len(stage.events()) == 1


def test_missing_learner_is_waited_for_once(tmp_path):
    stage = Stage(Watch())
    saved(stage, tmp_path / "a")
    stage.gone = {"learner-0"}
    assert saved(stage, tmp_path / "b") is None
    assert [(e["kind"], e["text"]) for e in stage.events()] == [("checkpoint failed", "died")]
    for name in ("c", "d"):
        assert saved(stage, tmp_path / name) == {"learner-0": "a", "evaluator-0": name}
    assert [(e["kind"], e["role"]) for e in stage.events()] == [("checkpoint", "learner-0")]
    stage.gone = set()
    assert saved(stage, tmp_path / "e")["learner-0"] == "e"
    stage.gone = {"learner-0"}
    assert saved(stage, tmp_path / "f") is None  # another death
    stage = Stage(stage.session)
    stage.gone, stage.ending = {"learner-0"}, True  # there will be no other one
    assert saved(stage, tmp_path / "g") == {"learner-0": "e", "evaluator-0": "g"}


def test_half_written_does_not_stay(tmp_path):
    stage = Stage(Watch())
    saved(stage, tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "evaluator-0.safetensors").write_text("torn")
    stage.gone = {"evaluator-0"}
    assert saved(stage, tmp_path / "b") == {"learner-0": "b", "evaluator-0": "a"}


def test_first_checkpoint_needs_the_learner(tmp_path):
    stage = Stage(Watch())
    stage.gone = {"evaluator-0"}
    assert saved(stage, tmp_path / "a") == {"learner-0": "a"}
    stage = Stage(Watch())
    stage.gone = {"learner-0"}
    assert saved(stage, tmp_path / "b") is None
    (event,) = stage.events()
    assert (event["kind"], event["role"], event["text"]) == ("checkpoint failed", "learner-0", "died")
    stage.ending = True
    assert saved(stage, tmp_path / "c") is None  # it could begin from nothing


def test_nothing_new_to_save(tmp_path):
    """A whole cluster that died: the files of the last checkpoint under a newer name would be a lie."""
    stage = Stage(Watch())
    saved(stage, tmp_path / "a")
    stage.gone = {"learner-0", "evaluator-0"}
    assert saved(stage, tmp_path / "b") is None
    assert {event["kind"] for event in stage.events()} == {"checkpoint failed"}


def test_shared_state_needs_one_file(tmp_path):
    """An old one would win over the other's when the run is resumed."""
    stage = Stage(Watch(), learners=2)
    saved(stage, tmp_path / "a")
    stage.gone = {"learner-0"}
    assert saved(stage, tmp_path / "b") == {"learner-1": "b", "evaluator-0": "b"}


def test_a_failed_write_fails_the_checkpoint(tmp_path):
    stage = Stage(Watch())
    saved(stage, tmp_path / "a")
    stage.gone, stage.errors = {"evaluator-0"}, {"learner-0": "no space left on device"}
    assert saved(stage, tmp_path / "b") is None
    assert [(e["role"], e["text"]) for e in stage.events()] == [("learner-0", "no space left on device")]


def test_run_that_ends_early_keeps_its_state(tmp_path):
    watch = Watch()
    saved(Stage(watch), tmp_path / "a")
    stage = Stage(watch, late=("learner",))
    assert saved(stage, tmp_path / "b") == {"learner-0": "a", "evaluator-0": "b"} and not stage.events()
