"""`shoal replay serve` and `info`, as a user runs them; and the package without the rest of shoal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shoal import replay
from shoal.errors import ConfigError
from shoal.replay.service.replay_commands import info_command, keys_command, parse_table, serve_command

RUN = "import sys; from shoal.replay.service import replay_commands as c; sys.exit(getattr(c, sys.argv[1])(sys.argv[2:]))"


def test_serve_and_info(tmp_path: Path) -> None:
    words = ["--table", "replay:prioritized:100000", "--table", "q:queue:10", "--checkpoint-dir", str(tmp_path)]
    heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also where these tests run under nohup
    for life, end in enumerate((signal.SIGHUP, signal.SIGTERM)):
        command = [sys.executable, "-c", RUN, "serve_command", *words]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard)
        assert server.stdout is not None
        address = server.stdout.readline().split()[1]
        with replay.Client(address, timeout=10) as client:
            client.insert({"x": life}, {"replay": 2.0})
            client.sample("replay", 4)
        shown = subprocess.run([sys.executable, "-c", RUN, "info_command", address], capture_output=True, text=True)
        assert shown.returncode == 0
        for part in (f"size               {life + 1} of 100000", "samples per insert", "blocked", "age", "priority", "q"):
            assert part in shown.stdout
        server.send_signal(end)
        assert server.wait(20) == 0
        server.stdout.close()


def test_confirmed_is_in_the_last_checkpoint(tmp_path: Path) -> None:
    """Served in this thread until the signal that another one sends while it goes on inserting."""
    confirmed = 0

    def insert() -> None:
        nonlocal confirmed
        with replay.Client(f"ipc://{tmp_path}/s", timeout=60) as client:
            client.insert_batch({"x": np.zeros((4000, 84, 84), np.uint8)}, {"t": np.ones(4000)})
            confirmed = 4000
            with contextlib.suppress(replay.ReplayError):
                while True:
                    client.insert({"x": np.ones((84, 84), np.uint8)}, {"t": 1.0}, timeout=0.5 if confirmed > 4010 else 60)
                    confirmed += 1
                    if confirmed == 4010:
                        os.kill(os.getpid(), signal.SIGTERM)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    thread = threading.Thread(target=insert)
    thread.start()
    try:
        assert serve_command([
            "--table", "t:uniform:100000", "--address", f"ipc://{tmp_path}/s", "--checkpoint-dir", str(tmp_path / "c")
        ]) == 0  # fmt: skip
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        thread.join()
    with replay.Server([replay.Table("t")], checkpoint_dir=tmp_path / "c") as again:
        assert again.info()["tables"]["t"]["size"] >= confirmed > 4000


def test_last_checkpoint_fails(tmp_path: Path) -> None:
    """A last checkpoint that fails is reported in one sentence."""
    words = ["--table", "t:uniform:10", "--checkpoint-dir", str(tmp_path / "c")]
    server = subprocess.Popen(
        [sys.executable, "-c", RUN, "serve_command", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert server.stdout is not None and server.stdout.readline().startswith("serving")
    (tmp_path / "c").rmdir()
    (tmp_path / "c").touch()
    server.send_signal(signal.SIGTERM)
    _, told = server.communicate(timeout=180)
    assert server.returncode == 1 and len(told.splitlines()) == 1 and str(tmp_path / "c") in told


def test_keys_and_a_server_off_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys_command([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "server.json"), str(tmp_path / "client.json")]
    assert keys_command([str(tmp_path), "--client", "learner"]) == 0
    assert keys_command([str(tmp_path / "elsewhere")]) == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*.json"))
    words = ["--table", "t:uniform:10", "--address", "tcp://0.0.0.0:0"]
    assert serve_command(words) == 2
    words += ["--key", str(tmp_path / "server.json")]
    server = subprocess.Popen([sys.executable, "-c", RUN, "serve_command", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = "tcp://127.0.0.1:" + server.stdout.readline().strip().rpartition(":")[2]
        for name in ("client", "learner"):
            with replay.Client(address, replay.Key.load(tmp_path / f"{name}.json"), timeout=60) as client:
                client.insert({"x": 1}, {"t": 1.0})
        assert info_command([address, "--key", str(tmp_path / "learner.json")]) == 0
        assert "size               2 of 10" in capsys.readouterr().out
        for stranger in ([], ["--key", str(tmp_path / "elsewhere" / "client.json")]):
            assert info_command([address, "--timeout", "0.5", *stranger]) == 1
            assert address in capsys.readouterr().err
        assert info_command([address, "--key", str(tmp_path / "nobody.json")]) == 2
        assert "is not a key file" in capsys.readouterr().err
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        server.stdout.close()


@pytest.mark.parametrize("name", ["client", "server", "", "../up"])
def test_a_key_is_never_overwritten(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    assert keys_command([str(keys)]) == 0
    before = {path: path.read_text() for path in tmp_path.rglob("*.json")}
    assert len(before) == 2
    assert keys_command([str(keys), "--client", name]) == 2
    assert {path: path.read_text() for path in tmp_path.rglob("*.json")} == before
    assert "name" in capsys.readouterr().err


def test_tables_from_words() -> None:
    table = parse_table("a:prioritized=0.9:1_000:50")
    assert table.selector == replay.Prioritized(0.9) and table.max_size == 1000 and table.limiter.min_size == 50
    assert isinstance(parse_table("a:uniform:5").selector, replay.Uniform)
    for bad in ("a", "a:b:5", "a:uniform:x", "a:uniform:5:6:7", ":uniform:5", "q:queue:5:9", "q:queue=2:5", "a:fifo=3:5"):
        with pytest.raises(ConfigError):
            parse_table(bad)


def test_bad_words_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_command(["--table", "a:nope:5"]) == 2
    assert "nope" in capsys.readouterr().err
    for words, said in ((["--seed", "-1"], "seed"), (["--address", "tcp://127.0.0.1:99999"], "65535")):
        assert serve_command(["--table", "a:uniform:5", *words]) == 2
        assert said in capsys.readouterr().err
    for seconds in ("nan", "inf", "-1"):
        with pytest.raises(SystemExit, match="2"):
            serve_command(["--table", "a:uniform:5", "--checkpoint-dir", "c", "--checkpoint-seconds", seconds])
        assert "--checkpoint-seconds is a positive number" in capsys.readouterr().err


def test_unwritable_checkpoint_dir(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint dir that cannot be written is refused before serving."""
    (tmp_path / "file").touch()
    words = ["--table", "t:uniform:10", "--checkpoint-dir", str(tmp_path / "file" / "c")]
    assert serve_command(words) == 2
    shown = capsys.readouterr()
    assert not shown.out and len(shown.err.splitlines()) == 1 and "cannot be written" in shown.err and str(tmp_path) in shown.err


def test_damaged_checkpoint_in_one_line(tmp_path: Path) -> None:
    with replay.Server([replay.Table("t")], checkpoint_dir=tmp_path) as server:
        server.client().insert({"x": np.zeros(9)}, {"t": 1.0})
        server.checkpoint()
        damaged = server.checkpoint()
    (damaged / "chunks.bin").write_bytes(b"")
    words = ["--table", "t:uniform:10", "--checkpoint-dir", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "serve_command", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with replay.Client(process.stdout.readline().split()[1], timeout=30) as client:
        assert client.info()["tables"]["t"]["size"] == 1
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=180)
    assert process.returncode == 0 and len(told.splitlines()) == 1 and str(damaged) in told and "checkpoint-000001" in told


def test_info_of_nobody_fails_quickly(capsys: pytest.CaptureFixture[str]) -> None:
    assert info_command(["tcp://127.0.0.1:1", "--timeout", "0.2"]) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["foo"], ["tcp://127.0.0.1:99999"], ["tcp://"], ["foo", "--key", "nobody.json"]])
def test_info_of_a_wrong_address(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert info_command(words) == 2 and time.monotonic() - began < 9  # it does not wait for a server
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf"])
def test_info_needs_a_timeout_that_is_one(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        info_command(["tcp://127.0.0.1:1", "--timeout", seconds])
    assert "--timeout" in capsys.readouterr().err


def test_importable_without_torch() -> None:
    """Importable without torch and the rest of shoal."""
    code = "import sys; import shoal.replay; print([m for m in sys.modules if m.startswith(('torch', 'shoal'))])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = ("shoal.replay", "shoal.errors", "shoal.files", "shoal.slots")
    loaded = [name for name in eval(shown.stdout) if name != "shoal"]
    assert all(name.startswith(allowed) for name in loaded)


def test_the_public_names() -> None:
    assert set(replay.__all__) == {
        "Array", "Batch", "Buffers", "Client", "Closed", "Core", "Dataset", "EpisodeWriter", "Expression", "Fifo", "Info",
        "InvalidItem", "Key", "Lifo", "MaxHeap", "MinHeap", "MinSize", "NotFound", "Prioritized", "Queue", "RateLimiter",
        "Refused", "ReplayError", "SampleToInsertRatio", "SequenceWriter", "Server", "SignatureMismatch", "Stack", "Table",
        "Timeout", "TransitionWriter", "Uniform", "VectorEpisodeWriter", "VectorSequenceWriter", "VectorTransitionWriter", "Writer",
        "apply", "column", "concat", "n_step",
    }  # fmt: skip
