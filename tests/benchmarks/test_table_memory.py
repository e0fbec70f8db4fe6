"""The measurement of what a table takes: it plays, stores, draws, and its table says what came of it."""

import pytest

from benchmarks.table_memory import BATCHES, KINDS, measure, table


@pytest.mark.atari
def test_case_for_every_kind():
    pytest.importorskip("ale_py")
    case = measure("apex", "ALE/Pong-v5", 200, **{"replay.batch_size": 16})
    rows = case["tables"]
    assert tuple(rows) == tuple(", ".join(kind) for kind in KINDS) and case["items"] == 200
    assert rows["shared, none"]["bytes_sent_per_item"] < 0.5 * rows["whole, none"]["bytes_sent_per_item"], "frames are sent once"
    assert rows["shared, lz4"]["bytes_per_item"] < rows["shared, none"]["bytes_per_item"] < rows["whole, none"]["bytes_per_item"]
    assert all(len(row["insert_ms"]) == 4 and len(row["batch_ms"]) == BATCHES for row in rows.values())
    assert table(case).count("\n") == 1 + len(KINDS) and "GB when full (2,000,000)" in table(case)
