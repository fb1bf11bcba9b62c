"""What is written is whole, or what was there before."""

from __future__ import annotations

import errno
import os

import pytest
from matplotlib.figure import Figure

from joulemark.errors import ConfigurationError
from joulemark.report import plot
from joulemark.report.output import write_text


@pytest.fixture
def full(monkeypatch):
    """A disk that takes the first bytes of a file and no more."""

    class Full:
        def __init__(self, handle, *args, **kwargs):
            self.handle = handle

        def __enter__(self):
            return self

        def __exit__(self, *_):
            os.close(self.handle)

        def write(self, content):
            os.write(self.handle, content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", Full)


@pytest.mark.parametrize("write", [lambda path: write_text("new", path), lambda path: plot.save(Figure(), path)])
@pytest.mark.parametrize("before", [None, "old"])
def test_a_full_disk_leaves_what_was_there(tmp_path, full, write, before):
    path = tmp_path / "folder" / "file.svg"
    if before is not None:
        path.parent.mkdir()
        path.write_text(before)
    with pytest.raises(ConfigurationError, match=r"file\.svg cannot be written \(No space left"):
        write(path)
    assert [one.read_text() for one in path.parent.iterdir()] == ([] if before is None else [before])


@pytest.mark.parametrize(("suffix", "begin"), [(".svg", b"<?xml"), (".PNG", b"\x89PNG"), (".pdf", b"%PDF")])
def test_a_plot_is_of_the_kind_that_its_name_says(tmp_path, suffix, begin):
    plot.save(Figure(), tmp_path / f"plot{suffix}", "about it")
    assert (tmp_path / f"plot{suffix}").read_bytes().startswith(begin)
