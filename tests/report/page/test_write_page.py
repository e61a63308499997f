"""Writing the page: whole or not at all, and over nothing but another page of ours."""

import os
from pathlib import Path

import pytest

from hpc_gpt.core.errors import ConfigError, RunFolderError
from hpc_gpt.report.page import build_page, check_page_target, write_page
from tests.report.page.page_runs import usual_runs


def test_a_page_is_written_and_replaced_whole(tmp_path):
    target = tmp_path / "report.html"
    write_page(target, usual_runs())
    assert target.read_text(encoding="utf-8") == build_page(usual_runs())
    write_page(target, [], ["nothing there"])
    assert target.read_text(encoding="utf-8") == build_page([], ["nothing there"])
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("text", ["", "my notes", "<!DOCTYPE html><html><title>mine</title></html>"])
def test_what_is_no_page_of_ours_stays_as_it_is(tmp_path, text):
    (target := tmp_path / "thesis.html").write_text(text)
    with pytest.raises(ConfigError, match=r"thesis\.html exists and is not a page of hpc-gpt report") as failure:
        write_page(target, usual_runs())
    assert failure.value.hint == "give another FILE to --html"
    assert target.read_text() == text


def test_a_folder_a_link_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a page of hpc-gpt report"):
        check_page_target(tmp_path)
    (tmp_path / "link.html").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is not a page of hpc-gpt report"):
        check_page_target(tmp_path / "link.html")
    with pytest.raises(ConfigError, match="is not a folder") as failure:
        check_page_target(tmp_path / "a b" / "report.html")
    assert failure.value.hint == f"make it: mkdir -p '{tmp_path}/a b'"


def test_a_write_that_fails_leaves_the_page_as_it_was(tmp_path):
    target = tmp_path / ("r" * 246 + ".html")  # so long that the file aside gets a name no system takes
    target.write_text(build_page([]), encoding="utf-8")
    before = target.read_bytes()
    with pytest.raises(RunFolderError, match="cannot write"):
        write_page(target, usual_runs())
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "kept").mkdir(mode=0o500)
    folder = tmp_path / "kept"
    if os.access(folder, os.W_OK):  # root may write anywhere but in what the kernel shows
        folder = Path("/proc/self")
    with pytest.raises(ConfigError, match=f"^{folder} cannot be written to$") as failure:
        check_page_target(folder / "report.html")
    assert failure.value.hint == "give another FILE to --html"
