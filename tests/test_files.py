"""Files that are replaced whole or not at all."""

import pytest

from shoal.files import replacing


def test_replaced_at_the_end(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_kept_when_writing_fails(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), replacing(path) as draft:
        draft.write_text("ne")
        raise OSError("the disk is full")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
