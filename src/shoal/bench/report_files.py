"""results.md and report.html beside a results.jsonl, written anew whenever a run has ended."""

from __future__ import annotations

from shoal.bench.columns import left_line, results_table, where_line
from shoal.bench.html import page
from shoal.bench.ledger import Ledger
from shoal.errors import ConfigError

__all__ = ["write_files"]


def write_files(ledger: Ledger) -> str:
    """Returns the table."""
    sessions, groups = ledger.sessions(), ledger.groups()
    where = where_line(sessions, ledger.rows()) + left_line(ledger.left_out())
    table = f"{where}\n\n{results_table(groups)}"
    title = sessions[0]["title"] if sessions else ledger.folder.name
    try:
        (ledger.folder / "results.md").write_text(f"# {title}\n\n{table}\n", encoding="utf-8")
        (ledger.folder / "report.html").write_text(page(title, where, groups), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}; the results are safe in {ledger.path}") from None
    return table
