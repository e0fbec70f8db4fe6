"""results.md beside a results.jsonl, and report.html in a checkout: written again whenever a run has ended."""

from __future__ import annotations

from shoal.bench import checkout
from shoal.bench.result_columns import left_line, results_table, where_line
from shoal.bench.results_folder import ResultsFolder
from shoal.errors import ConfigError

__all__ = ["write_files"]


def write_files(results: ResultsFolder) -> str:
    """Returns the table."""
    sessions, groups = results.sessions(), results.groups()
    where = where_line(sessions, results.rows()) + left_line(results.left_out())
    table = f"{where}\n\n{results_table(groups)}"
    title = sessions[0]["title"] if sessions else results.folder.name
    try:
        (results.folder / "results.md").write_text(f"# {title}\n\n{table}\n", encoding="utf-8")
        if found := checkout.benchmarks():
            (results.folder / "report.html").write_text(found.page(title, where, groups), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}; the results are safe in {results.path}") from None
    return table
