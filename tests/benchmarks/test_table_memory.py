"""The measurement of what a table takes: it plays, stores, draws, and its table says what came of it."""

from benchmarks.table_memory import KINDS, measure, table


def test_case_for_every_compression():
    case = measure("apex", "CartPole-v1", 200, **{"replay.batch_size": 16})
    rows = case["compression"]
    assert tuple(rows) == KINDS and case["items"] == 200
    assert rows["none"]["bytes_per_item"] == rows["lz4"]["bytes_per_item"] > 200, "it has no images"
    assert all(len(row["insert_ms"]) == 4 and len(row["batch_ms"]) == 20 for row in rows.values())
    assert table(case).count("\n") == 1 + len(KINDS) and "GB when full (50,000)" in table(case)
