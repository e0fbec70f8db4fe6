"""The pages of docs/presets: their commands make sense, their graphs are what `shoal show` prints."""

import re
import shlex
from pathlib import Path

import pytest

from shoal import cli
from shoal.experiment.presets import preset_names

PAGES = sorted(path for path in (Path(__file__).parents[2] / "docs" / "presets").glob("*.md") if path.stem != "README")


def test_there_is_a_page_for_each():
    assert {page.stem for page in PAGES} == set(preset_names()) - {"anakin_throughput"}  # which is on that of anakin


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_graphs(page, capsys, tmp_path, monkeypatch):
    """Commands make sense and the graph is the real one."""
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command in re.findall(r"^    shoal (data record .*)$", text, re.MULTILINE):
        assert cli.main(shlex.split(command)) == 0, capsys.readouterr().err
    commands = re.findall(r"^    shoal train (.*)$", text, re.MULTILINE)
    assert commands and commands[0].startswith(page.stem)
    for command in commands:
        assert cli.main(["show", *shlex.split(command)]) == 0, capsys.readouterr().err
    capsys.readouterr()
    shown = re.search(r"^`shoal (show .*)`$", text, re.MULTILINE)
    graph = re.search(r"^```\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert cli.main(shlex.split(shown[1])) == 0
    assert capsys.readouterr().out.startswith(graph[1] + "\n")
