"""Damaged and hostile run directories: one sentence and exit code 2, or an older checkpoint; never a traceback."""

import json
import random
import shutil

import numpy as np
import pytest

import shoal
from shoal import cli
from shoal.algorithms.records.items import EpisodeItems
from shoal.experiment.checkpoints import TensorFiles

DEEP = "[" * 5000 + "]" * 5000
ODD = [[], {}, "x", None, -1, 1e300, True, ["a", 3], {"name": 3}, "?x", "no.such:Thing", float("nan")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage") / "run"
    values = {"runtime": "inline", "actors": 1, "console": {"mode": "none"}, "tensorboard": False, "net": {"hidden": (4,)},
              "eval": {"episodes": 2, "every_env_steps": 64}, "architecture": {"envs_per_actor": 2}}
    shoal.train("a2c", "CartPole-v1", run_dir=str(folder), max_env_steps=300, **values)
    shoal.resume(folder, max_env_steps=500)
    assert len(list((folder / "checkpoints").iterdir())) > 1
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def say(capsys, *words) -> tuple[int, str]:
    code = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.err


def refused(capsys, *words) -> str:
    code, said = say(capsys, *words)
    assert code == 2 and said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"\xff\xfe{}", b"{", DEEP.encode(), b'{"a": 1}'])
def test_file_that_is_not_what_it_should_be(name, text, run, capsys):
    (run / name).write_bytes(text)
    if name == "config.json":
        assert str(run / name) in refused(capsys, "eval", run)
    code, said = say(capsys, "resume", run, "--max-env-steps", "600", "--console.mode", "none")
    assert code == 2 or (name, text) == ("summary.json", b'{"a": 1}'), said
    assert say(capsys, "runs", run.parent)[0] == 0


@pytest.mark.parametrize("text", [b"\xff\n", b"[]\n3\n", DEEP.encode() + b"\n",
                                  b'{"kind": "snapshot", "env_steps": "x", "seconds": []}\n',
                                  b'{"kind": "snapshot", "env_steps": 9, "losses": {"loss": "x"}, "policy_lag": 3}\n'])
def test_unreadable_metrics(text, run, capsys):
    """Metrics that cannot be read are passed over."""
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(text)
    assert say(capsys, "watch", run, "--mode", "plain")[0] == say(capsys, "watch", run, "--mode", "live")[0] == 0
    assert say(capsys, "resume", run, "--max-env-steps", "600", "--console.mode", "none")[0] == 0


@pytest.mark.parametrize("odd", [["a", 3], {"name": 3}, "x", 2])
def test_a_summary_with_something_else_in_it(odd, run, capsys):
    """Values of every kind that are wrong are passed over: the run goes on from its checkpoint."""
    summary = json.loads((run / "summary.json").read_text())
    wrong = {name: odd for name in summary if name not in ("actors", "env_steps", "learner_steps", "seconds")}
    (run / "summary.json").write_text(json.dumps({**summary, **wrong, "layout": odd}))
    code, said = say(capsys, "resume", run, "--max-env-steps", "600", "--console.mode", "none")
    assert code == 0, said


def places(value, path=()):
    """The paths of everything in a JSON value."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def changed(value, path, new):
    value = json.loads(json.dumps(value))
    inside = value
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = new
    return value


@pytest.mark.parametrize("seed", [*range(25), 172])
def test_configuration_with_other_values(seed, run, capsys):
    rng = random.Random(seed)
    config = json.loads((run / "config.json").read_text())
    for _ in range(rng.randint(1, 2)):
        config = changed(config, rng.choice([p for p in places(config) if p[0] not in ("eval", "checkpoint")]), rng.choice(ODD))
    (run / "config.json").write_text(json.dumps(config))
    code, said = say(capsys, "eval", run, "--episodes", "1")
    assert code in (0, 2) and said.count("\n") <= 1, (config, said)


@pytest.mark.parametrize("value", ["..", None, [], 0.5])
def test_count_of_resumes(value, run, capsys):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "resumed": value}))
    assert "resumed is" in refused(capsys, "resume", run, "--max-env-steps", "600")


@pytest.mark.parametrize("changes", [{"net": {"hidden": [5]}}, {"env": {"name": "Acrobot-v1", "id": "Acrobot-v1"}}])
def test_configuration_of_another_net(changes, run, capsys):
    """A configuration of another net or environment."""
    config = json.loads((run / "config.json").read_text())
    changes = {section: {**config[section], **values} for section, values in changes.items()}
    (run / "config.json").write_text(json.dumps({**config, **changes}))
    assert "was saved with another network or environment" in refused(capsys, "eval", run, "--episodes", "1")
    assert "parameters, and this one would have" in refused(capsys, "resume", run, "--max-env-steps", "900")


def test_flipped_byte(run, capsys, caplog):
    """A flipped byte is noticed by eval and resume."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    path = newest / "trainer-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x40
    path.write_bytes(bytes(data))
    why = "trainer-0.safetensors has changed since it was written"
    assert say(capsys, "eval", run, "--episodes", "1")[0] == 0  # a warning goes to stderr, if nobody else listens
    assert [text.partition("; ")[0] for text in caplog.messages] == [f"checkpoint {newest.name} is damaged ({why})"]
    assert say(capsys, "resume", run, "--max-env-steps", "700", "--console.mode", "none")[0] == 0
    assert len(caplog.messages) == 2 and caplog.messages[1].endswith("is used instead")
    assert (run / "checkpoints" / f"damaged-{newest.name}").is_dir()


@pytest.mark.parametrize("text", [b"", b"\x08" + bytes(7) + b"{}", b"\xff" * 400])
def test_damaged_header_of_an_old_file(text, run, capsys):
    """A file of an earlier version with a damaged header."""
    for folder in (run / "checkpoints").iterdir():
        meta = json.loads((folder / "checkpoint.json").read_text())
        meta.pop("sha256"), meta.pop("seal")
        for name in meta["files"]:
            (folder / name).write_bytes(text)
            meta["files"][name] = len(text)
        (folder / "checkpoint.json").write_text(json.dumps(meta))
    refused(capsys, "eval", run, "--episodes", "1")
    refused(capsys, "resume", run, "--max-env-steps", "700")


def test_table_with_unknown_actions(tmp_path, monkeypatch, capsys):
    """As of a file that was changed by hand, with its checksums."""
    values = {"runtime": "inline", "actors": 1, "console": {"mode": "none"}, "tensorboard": False, "net": {"hidden": (4,)},
              "replay": {"checkpoint": True, "capacity": 200, "min_size": 20}, "eval": {"enabled": False}}
    run = tmp_path / "run"
    shoal.train("dqn", "CartPole-v1", run_dir=str(run), max_env_steps=100, **values)
    monkeypatch.setattr(EpisodeItems, "index_sizes", {"action": np.array(1)})
    code, said = say(capsys, "resume", run, "--max-env-steps", "200")
    assert code in (2, 3) and said.count("\n") == 1 and "its field action has values outside its space" in said


def test_a_file_without_what_its_role_needs(run, capsys):
    """As of another version, or changed by hand with its checksums."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    for path in newest.glob("*.safetensors"):
        arrays = {name.replace("adam.v", "adam.w"): array for name, array in TensorFiles().load(path).items()}
        TensorFiles().save(path, arrays)
        path.with_name(path.name + ".sha256").unlink()
    meta = json.loads((newest / "checkpoint.json").read_text())
    files = {path.name: path.stat().st_size for path in newest.glob("*.safetensors")}
    kept = {name: value for name, value in meta.items() if name not in ("seal", "sha256")}  # as earlier versions had it
    (newest / "checkpoint.json").write_text(json.dumps({**kept, "files": files}))
    said = refused(capsys, "resume", run, "--max-env-steps", "600", "--console.mode", "none")
    assert "is not what" in said and "KeyError: 'learn/adam.v'" in said
