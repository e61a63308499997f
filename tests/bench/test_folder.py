"""bench.json: replaced whole, every row a record that comes back as it was."""

import json

import pytest

from hpc_gpt.bench.folder import make_folder
from hpc_gpt.bench.row import row_of
from hpc_gpt.errors import RunFolderError
from hpc_gpt.readers.runs.run_read import is_bench, read_records
from tests.bench.test_row import bad, good


def test_the_rows_come_back_as_they_were(tmp_path):
    folder = make_folder(tmp_path, "gpt 2")
    assert folder.path.parent.name == "gpt_2-bench"
    rows = [row_of("ddp", folder.name_of(0), [good(0.03), good(0.06)]), row_of("big", folder.name_of(1), [bad()])]
    folder.write(rows[:1])
    folder.write(rows)
    assert is_bench(folder.file)
    assert read_records(folder.file) == [row.record for row in rows]
    page = json.loads(folder.file.read_text())
    assert [row["ratio"] for row in page["rows"]] == [1.0, None]
    assert [len(row["tokens_per_s"]) for row in page["rows"]] == [2, 0]
    assert [path.name for path in folder.path.iterdir()] == ["bench.json"]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "logs").write_text("a file\n")
    with pytest.raises(RunFolderError):
        make_folder(tmp_path / "logs", "gpt2")
    folder = make_folder(tmp_path / "other", "gpt2")
    folder.file.mkdir()
    with pytest.raises(RunFolderError):
        folder.write([])
