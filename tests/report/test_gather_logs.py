"""Runs of other programs in a report: beside our own, by file or folder, and what is refused."""

import io
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hpc_gpt.core.errors import ConfigError, NoSuchRun, RunFolderError
from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.lines import read_log
from hpc_gpt.reader.runs import foreign
from hpc_gpt.reader.runs.foreign import NOT_KNOWN
from hpc_gpt.report.gather import TEACH, compared_names, gather_paths, read_compared, read_one, refresh_record
from tests.made_runs import make_run, with_attempt
from tests.measured_rows import make_bench
from tests.reader.made_logs import dump, iterations, write_log


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def lab(tmp_path):
    write_log(tmp_path / "lab" / "a.log", dump(), iterations(1, 5))
    write_log(tmp_path / "lab" / "two.log", dump(), iterations(1, 5, of=5), dump(micro_batch_size=2), iterations(1, 9))
    return tmp_path / "lab"


def test_our_own_runs_and_logs_side_by_side(lab, logs):
    run = with_attempt(make_run(lab / "ours"), 10)
    (lab / "notes.txt").write_text("nothing\n")
    gathered = gather_paths([str(lab)], logs)
    assert [run.record.dialect for run in gathered.runs] == ["hpc-gpt", "megatron", "megatron", "megatron"]
    assert run.record.is_file()
    assert not (lab / "record.json").exists()
    assert gathered.notes == [f"skipped {lab / 'notes.txt'}: has no line that a reader knows"]
    assert not gathered.unread


def test_a_file_that_was_named_and_holds_no_run_is_an_error(lab, logs):
    (lab / "notes.txt").write_text("nothing\n")
    (lab / "none.err").touch()
    nothing, empty = f"{lab / 'notes.txt'}: {NOT_KNOWN}; {TEACH}", f"{lab / 'none.err'}: empty file"
    files = [str(lab / name) for name in ("notes.txt", "none.err")]
    assert gather_paths(files, logs).unread == [empty, nothing]
    # Beside a log that has a run it is a note, which names each.
    gathered = gather_paths([*files, str(lab / "a.log")], logs)
    assert [run.record.run for run in gathered.runs] == ["a"]
    assert (gathered.unread, gathered.notes) == ([], [f"skipped {empty}", f"skipped {nothing.partition('; ')[0]}"])


def test_a_folder_without_runs_is_refused_beside_others(lab, logs):
    (lab / "none").mkdir()
    for other in (lab, lab / "a.log"):
        with pytest.raises(NoSuchRun, match=r"no runs under .*none$"):
            gather_paths([str(other), str(lab / "none")], logs)
    assert not gather_paths([], logs).runs


def test_standard_input_is_a_log(logs, monkeypatch):
    text = "\n".join([*dump(), *iterations(1, 5)])

    class Stream:
        buffer = io.BytesIO(text.encode())

    monkeypatch.setattr(sys, "stdin", Stream())
    (run,) = gather_paths(["-"], logs).runs
    assert (run.record.run, run.record.gpus) == ("stdin", 8)


def test_one_run_by_a_log_a_folder_or_its_number_in_a_log(lab, logs):
    assert read_one(str(lab / "a.log"), logs).record.micro_batch == 4
    assert read_one(f"{lab / 'two.log'}#1", logs).record.micro_batch == 4
    assert read_one(f"{lab / 'two.log'}#2", logs).record.micro_batch == 2
    two, a = str(lab / "two.log"), str(lab / "a.log")
    for paths, found in (
        ([f"{two}#2"], ["two#2"]),
        ([f"{two}#2", a], ["a", "two#2"]),
        ([f"{two}#2", f"{two}#1", f"{two}#2"], ["two#2", "two"]),
        ([two, f"{two}#2"], ["two", "two#2"]),
    ):
        assert [run.record.run for run in gather_paths(paths, logs).runs] == found
    own = make_run(logs)
    assert read_one(own.run_id, logs).folder == own.path
    assert read_one(str(own.path), logs).folder == own.path
    write_log(lab / "only" / "b.log", dump(), iterations(1, 5))
    assert read_one(str(lab / "only"), logs).record.run == "b"


A_RUN = "give a log with training steps, a run folder, a run id or a job id"
RUNS = "give a log, a run folder, or a folder of run folders, such as logs/"
A_LOG = "name one log; the second run in a log is LOG#2"
NONE = "no runs under LAB/none; skipped LAB/none/plot.py: not a log by its name (*.py)"


def test_what_names_no_run_or_several_is_refused(lab, logs):
    own = with_attempt(make_run(logs), 10)
    bench = make_bench(logs, "gpt2", *((Record(name=name, ended="done"), ()) for name in ("ddp", "fsdp")))
    (lab / "plot.py").write_text("x")
    (lab / "none").mkdir()
    (lab / "none" / "plot.py").write_text("x")
    page = {"schema": 1, "records": [record.to_tables() for record in gather_paths([str(lab)], logs).records]}
    (lab / "all.json").write_text(json.dumps(page))
    one = {"schema": 1, "records": page["records"][:1]}
    (lab / "one.json").write_text(json.dumps(one))
    of_two = "LAB/two.log#1, LAB/two.log#2"
    (lab / "notes").write_text("nothing\n")
    of_bench = f"name one row, such as {bench.name}#1"
    for ask, name, line, hint in (
        (read_one, lab / "two.log", "2 runs in LAB/two.log: two, two#2", f"name one: {of_two}"),
        (read_one, f"{lab}/two.log#3", "LAB/two.log has no run 3; it has 2 runs", f"name one: {of_two}"),
        (gather_path, f"{lab}/two.log#0", "LAB/two.log has no run 0; it has 2 runs", f"name one: {of_two}"),
        (read_one, f"{lab}/notes#2", f"LAB/notes: {NOT_KNOWN}; {TEACH}", A_RUN),
        (read_one, f"{lab}/two#2", f"no run '{lab}/two#2'", f"did you mean '{lab}/two.log#2'?"),
        (gather_path, f"{lab}/a#1", f"no run '{lab}/a#1'", f"did you mean '{lab}/a.log#1'?"),
        (read_one, lab, "3 runs in LAB: a, two, two#2", A_LOG),
        (read_one, lab / "none", NONE, RUNS),
        (read_one, bench, f"2 runs in {bench}: {bench.name}#1, {bench.name}#2", of_bench),
        (read_one, f"{bench}#3", f"{bench} has no run 3; it has 2 runs",
         f"name one: {bench}#1, {bench}#2"),
        (read_compared, bench / "bench.json", f"{bench}/bench.json holds 2 records: {bench.name}#1, {bench.name}#2",
         f"compare single rows, such as {bench}/bench.json#1"),
        (read_compared, lab / "all.json", "LAB/all.json holds 3 records: a, two, two#2", "give a file of one run"),
        (gather_path, lab / "none", NONE, RUNS),
    ):  # fmt: skip
        with pytest.raises((NoSuchRun, ConfigError)) as refused:
            ask(str(name), logs)
        said = (str(refused.value), refused.value.hint)
        assert [text.replace(str(lab), "LAB") for text in said] == [
            text.replace(str(lab), "LAB") for text in (line, hint)
        ]
    assert read_compared(str(lab / "one.json"), logs).record.run == "a"
    assert refresh_record(own).run == own.run_id
    assert read_compared(str(own.path / "record.json"), logs).record.run == own.run_id
    assert compared_names(own.run_id, logs) == [own.run_id]
    assert compared_names(str(lab), logs) == [str(lab)]
    damaged = make_run(logs)
    (damaged.path / "resolved.json").write_text("{")
    with pytest.raises(RunFolderError, match=damaged.run_id) as refused:
        refresh_record(damaged)
    assert refused.value.hint == "is this a run folder?"


def gather_path(path, logs):
    return gather_paths([path], logs)


def test_paths_that_overlap_give_each_run_once(lab, logs):
    make_run(lab / "ours")
    gathered = gather_paths([str(lab), str(lab / "ours"), str(lab / "a.log"), f"{lab}/./"], logs)
    assert len(gathered.runs) == 4
    assert not gathered.unread


def fails_on_bad(real: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but for what holds bad.log."""

    def call(*given: Any) -> Any:
        if "bad.log" in repr(given):
            raise TypeError("no such figure")
        return real(*given)

    return call


@pytest.mark.parametrize("name", ["_read_log", "group_logs", "read_foreign"])
def test_a_file_whose_reader_raised_is_skipped_by_name(name, tmp_path, monkeypatch):
    for file in ("bad.log", "good.log", "other.log"):
        write_log(tmp_path / file, iterations(1, 9))
    module = read_log if name == "_read_log" else foreign
    monkeypatch.setattr(module, name, fails_on_bad(getattr(module, name)))
    found = gather_paths([str(tmp_path)], tmp_path / "logs")
    assert [record.run for record in found.records] == ["good", "other"]
    (note,) = found.notes
    assert note.startswith(f"skipped {tmp_path}/bad.log: its reader failed: TypeError: no such figure (")
    with pytest.raises(NoSuchRun, match=r"bad\.log: its reader failed: TypeError"):
        read_one(str(tmp_path / "bad.log"), tmp_path)
