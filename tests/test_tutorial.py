"""Every block of docs/tutorial is run, page by page and in order: files are written, commands and Python run in the page's folder.
Trainings are shortened; what a page marks with `<!-- not run: reason -->` is left out."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from shoal import cli

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorial"
PAGES = sorted(path.name for path in FOLDER.glob("*.md") if path.name != "README.md")
FENCED, INDENTED = r"```(?P<kind>\w+) ?(?P<file>\S*)\n(?P<text>.*?)```", r"(?<=\n\n)(?P<commands>(?:    [^ \n][^\n]*\n)+)"
BLOCK = re.compile(rf"(?P<left><!-- not run: [^\n]+ -->\n\n)?(?:{FENCED}|{INDENTED})", re.S)
SHORT = {"max_env_steps": 300, "runtime": "inline", "actors": 1, "console.mode": "none", "tensorboard": False, "eval.episodes": 2,
         "eval.last_env_steps": 40, "eval.max_episode_steps": 100}
WORDS = ["--max-env-steps", "300", "--runtime", "inline", "--console.mode", "none", "--no-tensorboard", "--eval.episodes", "2",
         "--eval.last-env-steps", "40", "--eval.max-episode-steps", "100"]


def blocks(page):
    found = BLOCK.finditer((FOLDER / page).read_text())
    return [(match["kind"], match["file"], match["text"] or match["commands"]) for match in found if not match["left"]]


def command(line, capsys):
    words = shlex.split(line, comments=True)
    if words[0] != "shoal":
        raise AssertionError(f"{line}: only commands of shoal are run")
    words = words[1:]
    if words[0] == "plot":
        pytest.importorskip("matplotlib")
    if words[0] == "train":
        words = ["2" if before == "--seeds" else word for before, word in zip(["", *words], words, strict=False)]
        at = words.index("--max-env-steps") if "--max-env-steps" in words else len(words)
        words = [*words[:at], *words[at + 2:], *WORDS, *([] if "anakin" in words else ["--actors", "1"])]
    if words[0] == "resume":
        done = json.loads(Path(words[1], "summary.json").read_text())["env_steps"]
        words = [*words[:2], "--max-env-steps", str(done + 100), "--console.mode", "none"]
    capsys.readouterr()
    assert cli.main(words) == 0, f"{line}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES)
def test_page(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names, ran = {}, 0
    for kind, file, text in blocks(page):
        if file:
            (tmp_path / file).write_text(text)
            monkeypatch.delitem(sys.modules, file.removesuffix(".py"), raising=False)
        elif kind == "python":
            ran += 1
            exec(re.sub(r"max_env_steps=[\d_]+", f"**{SHORT!r}", text), names)
        elif kind is None:
            for line in text.splitlines():
                ran += 1
                command(line, capsys)
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)
    assert ran or page == "cluster.md", "a page without anything to run"


def test_trainings_of_pages_have_an_end():
    for page in PAGES:
        for kind, _, text in blocks(page):
            calls = text.splitlines() if kind is None else re.findall(r"shoal\.train\(.*?\)\n", text, re.S)
            ends = ("max-env-steps", "max_env_steps", "--config")
            assert all(any(word in call for word in ends) for call in calls if "train" in call.split("(")[0]), page


def test_the_index_names_every_page():
    index = (FOLDER / "README.md").read_text()
    docs = FOLDER.parent
    assert all(f"({page})" in index for page in PAGES)
    pages = (docs / "README.md").read_text()
    assert all(f"({path.name})" in pages for path in docs.glob("*.md") if path.name != "README.md")
