"""Files that are replaced whole or not at all."""

import pytest

from shoal.files import check_room, replacing


def test_replaced_at_the_end(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("the disk is full"), ValueError("what is written is wrong"), KeyboardInterrupt()])
def test_kept_when_writing_fails(tmp_path, error):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(type(error)), replacing(path) as draft:
        draft.write_text("ne")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_room_on_the_disk(tmp_path):
    check_room(tmp_path, 0)
    check_room(tmp_path, 1 << 16)
    with pytest.raises(OSError, match=r"No space left|too large"):
        check_room(tmp_path, 1 << 60)
    assert not list(tmp_path.iterdir())
