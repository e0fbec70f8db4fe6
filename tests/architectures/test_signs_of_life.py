"""Roles one by one, driven by hand: who beats within a long step, who may be checkpointed while it waits, what a barrier drops."""

from shoal.algorithms import a2c, ppo
from shoal.core import Wait
from shoal.roles.parts import EvalPlan
from shoal.runtime.instance import Instance, RoleContext
from shoal.runtime.wires import Port
from shoal.slots import InlineAllocator
from tests.architectures.graphs import SEATS, draw

UNROLL = 5


class Counting(RoleContext):
    """Counts its signs of life."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.beats = 0

    def beat(self):
        super().beat()
        self.beats += 1


class Cast:
    """A synchronous program whose roles are brought to life and resumed by the test."""

    def __init__(self, algorithm, **options):
        self.program, _ = draw(algorithm, "synchronous", "shoal/Catch-v0", **options)
        self.program.build(InlineAllocator())
        for node, index in self.program.instances():
            self.tell(node, index, "enlist", True)
            self.tell(node, index, "membership", True)
        self.trainer = self.born("trainer")

    def tell(self, node, index, word, value):
        for port in self.program.nodes[node].ports.values():
            getattr(port.wire, word)(port.end, port.wire.member_number(port.end, node, index), value)

    def born(self, node, index=0, incarnation=0):
        me = Counting(self.program, node, index, incarnation, lambda message: None)
        arguments = {key: self.program.endpoint(value, node, index, incarnation) if isinstance(value, Port) else value
                     for key, value in self.program.nodes[node].arguments.items()}
        return self.program.nodes[node].role(me, **arguments)


def stepped(role):
    """Whether a step of the role came to its end; one that waits is given up."""
    step = role.step()
    try:
        wait = step.send(None)
    except StopIteration:
        return True
    assert isinstance(wait, Wait)
    step.close()
    return False


def test_beats_within_a_step():
    """An environment may be slow and an update long: they beat after every step of the one and every minibatch of the other."""
    cast = Cast(ppo.Config(unroll=UNROLL, epochs=2, minibatches=4))
    trainer, worker = cast.trainer, cast.born("worker")
    assert not stepped(trainer) and trainer.weights.version == 1  # it has published, and waits for data
    assert stepped(worker) and worker.me.beats == UNROLL
    assert stepped(trainer) and trainer.me.beats == 2 * 4


def test_evaluation_beats_at_every_step():
    """An evaluation beats after every step of its environments."""
    cast = Cast(a2c.Config(unroll=UNROLL), eval=EvalPlan(episodes=8, every_env_steps=1))
    evaluator = cast.born("evaluator")
    assert not stepped(cast.trainer) and stepped(evaluator)
    assert evaluator.me.beats == 1  # what compiles (environments, the policy) does so in the first step, which may take long
    while evaluator.keeps_turn:
        before = evaluator.me.beats
        assert stepped(evaluator) and evaluator.me.beats == before + 1
    assert evaluator.me.stats.get("evaluations") == 1
    assert evaluator.me.beats >= 9 and evaluator.me.stats.get("eval_env_steps") == 8 * evaluator.me.beats  # 9 rows to fall


def test_checkpoint_of_a_waiting_evaluator(tmp_path):
    """Within a step that has changed nothing yet; but not in the middle of one that has."""
    cast = Cast(a2c.Config(unroll=UNROLL), eval=EvalPlan(episodes=4, every_env_steps=1))
    cast.program.store = Files()
    said = []
    instance = Instance(cast.program, "evaluator", 0, 0, said.append, lambda: None, None)
    assert not stepped(cast.trainer)
    instance.advance()
    while instance.keeps_turn():
        instance.advance()
        assert instance.settled()  # it may be checkpointed in the middle of an evaluation
    assert instance.stats.get("evaluations") == 1
    instance.advance()  # nothing newer: it waits within its next step
    assert instance.wait is not None and not instance.runnable() and instance.settled()
    instance.commands.append({"op": "checkpoint", "id": 7, "arguments": {"folder": str(tmp_path)}})
    assert instance.obey() and (tmp_path / "evaluator-0.safetensors").exists()
    assert said[-1] == {"kind": "done", "id": 7, "op": "checkpoint", "error": None, "result": "evaluator-0.safetensors"}
    instance.role.settled = False
    assert not instance.settled()
    instance.close()


class Files:
    def save(self, path, state):
        assert "best_return" in state
        path.write_bytes(b"")


def test_unroll_of_a_dead_worker():
    """A worker's successor pulls weights, and they are replaced by those of an update that went on without it: what it then sends
    is older than its turn. The barrier gives it back and waits for the next, so that the lag stays 0."""
    cast = Cast(a2c.Config(unroll=UNROLL), actors=2)
    trainer, workers = cast.trainer, [cast.born("worker", index) for index in range(2)]
    assert not stepped(trainer) and all(map(stepped, workers)) and stepped(trainer)
    cast.tell("worker", 0, "membership", False)  # killed
    successor = cast.born("worker", 0, incarnation=1)
    successor._refresh()
    assert stepped(workers[1]) and stepped(trainer) and trainer.weights.version == 3  # without it
    refresh, successor._refresh = successor._refresh, lambda: None
    assert stepped(successor) and successor.player.version == 2
    successor._refresh = refresh
    cast.tell("worker", 0, "membership", True)
    assert stepped(workers[1]) and not stepped(trainer), "the barrier took what is outlived"
    assert trainer.me.stats.get("samples_masked") == UNROLL * SEATS
    assert stepped(successor) and successor.player.version == 3
    assert stepped(trainer) and trainer.weights.version == 4
    stats = trainer.me.stats
    assert stats.get("policy_lag/max") == 0 and stats.get("policy_lag/count") == 5 * UNROLL * SEATS
    stream = cast.program.wires["unrolls"]
    assert stream.numbers()["written"] == stream.numbers()["consumed"] == 6 and stream.conserved()
