"""Text files are whole or as they were."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tfm_jax.files import write_whole


def test_what_is_interrupted_leaves_the_old_file(tmp_path: Path) -> None:
    path, link = tmp_path / "old", tmp_path / "link"
    path.write_text("precious")
    link.symlink_to(path)

    def parts() -> Iterator[str]:
        yield "half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(link, parts())
    assert path.read_text() == "precious"
    write_whole(link, ["new ", "text"])
    assert path.read_text() == "new text"
    assert sorted(tmp_path.iterdir()) == [link, path]
    assert link.is_symlink()


def test_a_device_is_written_as_it_is() -> None:
    write_whole(Path("/dev/null"), ["gone"])
    assert not Path("/dev/null").is_file()
