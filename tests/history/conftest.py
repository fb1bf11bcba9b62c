import os

import pytest

from joulemark.history.index import Index
from joulemark.report.foreign import read_result
from joulemark.store import result_files


@pytest.fixture
def looked_at(tmp_path):
    """Brings an index up to date with a folder; gives the index and the names of the files that were read for it."""
    opened = []

    def look(folder, path=tmp_path / "cache" / "index.sqlite3", **options):
        read = []
        index = Index(path, **options)
        opened.append(index)
        index.update(folder, result_files(folder, (".jsonl", ".json")), read_result, lambda one: read.append(one.name))
        return index, read

    yield look
    for index in opened:
        index.__exit__(None)


@pytest.fixture
def state_of():
    """Names, sizes, times and contents of the files of a folder."""

    def state(folder):
        return {
            path.relative_to(folder): (os.stat(path).st_mtime_ns, path.read_bytes())
            for path in folder.rglob("*")
            if path.is_file()
        }

    return state
