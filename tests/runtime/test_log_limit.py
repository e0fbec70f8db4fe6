"""The bound on logs by itself."""

import re

from shoal.runtime.log_limit import ALL_BYTES, LEAST_BYTES, MOST_BYTES, LogLimit, cut_log


def test_log_is_cut_to_its_last_lines(tmp_path):
    """A log is cut to its last lines and says so."""
    log = tmp_path / "actor-0.log"
    lines = [f"line {number}\n" for number in range(1000)]
    log.write_text("".join(lines))
    with log.open("ab", buffering=0) as role:  # it appends all the time
        dropped = cut_log(log, 200)
        role.write(b"later\n")
    first, *kept = log.read_text().splitlines(keepends=True)
    assert int(re.search(r"[\d,]+", first)[0].replace(",", "")) == dropped
    assert kept[-1] == "later\n" and kept[:-1] == lines[-len(kept) + 1 :] and 100 < len("".join(kept)) <= 206
    assert dropped + len("".join(kept[:-1])) == len("".join(lines))


def test_what_was_dropped_adds_up(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.runtime.log_limit.MOST_BYTES", 1000)
    monkeypatch.setattr("shoal.runtime.log_limit.LEAST_BYTES", 100)
    limit, log = LogLimit(tmp_path, 1), tmp_path / "learner-0.log"
    for _ in range(5):
        with log.open("a") as role:
            role.write("".join(f"{number}\n" for number in range(500)))
        limit.look()
        assert log.stat().st_size < 1000
    said = int(re.match(r"\[shoal\] ([\d,]+)", log.read_text())[1].replace(",", ""))
    assert 5 * len("".join(f"{number}\n" for number in range(500))) - 1000 < said


def test_all_logs_together_have_a_bound(tmp_path):
    for logs in (1, 16, 100, 1000):
        assert LogLimit(tmp_path, logs).most * logs <= ALL_BYTES
    assert LogLimit(tmp_path, 1).most == MOST_BYTES and LogLimit(tmp_path, 10**6).most == LEAST_BYTES
