"""On a full disk: outputs and lines that wait for space, and space for an attempt's end."""

import errno
import os
import re
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpc_gpt.core.ends.end_policy import End
from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import write_once
from hpc_gpt.core.runs.full_disk import KeptLines, PatientOutput, reserve, when_there_is_space
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.supervision.ending import write_end
from tests.trainer.filling import fill
from tests.trainer.launch import new_run, settings
from tests.waiting import wait_for


def test_what_is_printed_on_a_full_disk_comes_when_there_is_room(small_disk: Path) -> None:
    number = os.open(small_disk / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    output = PatientOutput(number)
    filler = fill(small_disk)
    expected = b""
    for line in range(1000):
        text = f"line {line}\n".encode()
        expected += text
        assert output.write(text) == len(text)
    filler.unlink()
    output.write(b"room\n")
    os.close(number)
    assert (small_disk / "log").read_bytes() == expected + b"room\n"


def test_of_much_that_waits_the_newest_is_kept_the_loss_said(small_disk: Path) -> None:
    number = os.open(small_disk / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    output = PatientOutput(number)
    filler = fill(small_disk)
    lines = [b"%08d%s\n" % (line, b"." * 1000) for line in range(2000)]
    for text in lines:
        output.write(text)
    filler.unlink()
    output.write(b"room\n")
    output.write(b"more\n")
    os.close(number)
    found = (small_disk / "log").read_bytes()
    (note,) = re.findall(rb"\[\d+ bytes of this log are lost: the disk was full\]\n", found)
    assert int(note[1:].split()[0]) + len(found) - len(note) == sum(map(len, lines)) + 10
    assert found.endswith(lines[-1] + b"room\nmore\n")
    assert found.count(lines[-900]) == 1
    assert lines[900] not in found


def test_a_reader_that_has_gone_is_an_error_as_ever() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        PatientOutput(writing).write(b"words")
    os.close(writing)


def test_a_process_prints_by_lines_on_both() -> None:
    program = (
        "import sys; from hpc_gpt.core.runs.full_disk import install_patient_output; install_patient_output(); "
        "print('out é'); print('err', file=sys.stderr); import os; os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert (done.stdout.decode(), done.stderr.decode()) == ("out é\n", "err\n")


def test_lines_wait_whole_and_in_order(small_disk: Path) -> None:
    kept = KeptLines(small_disk / "metrics.jsonl")
    assert not kept.append(["first\n"])
    filler = fill(small_disk)
    long = "x" * 5000 + "\n"
    refusal = kept.append([long])
    assert refusal.is_full
    assert "No space left on device" in refusal.text
    assert (small_disk / "metrics.jsonl").read_text() == "first\n"
    assert kept.append(["third\n"])
    filler.unlink()
    assert not kept.append([])
    assert (small_disk / "metrics.jsonl").read_text() == f"first\n{long}third\n"


def test_what_two_threads_print_comes_once_each() -> None:
    """The first one's words wait in a pipe that is full, when the second one has something to say."""
    reading, writing = os.pipe()
    output = PatientOutput(writing)
    first, second = b"a" * (1 << 18), b"b" * 64
    threads = [threading.Thread(target=output.write, args=(text,)) for text in (first, second)]
    threads[0].start()
    while not select.select([reading], [], [], 0)[0]:
        pass
    threads[1].start()
    with open(reading, "rb") as pipe:
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(pipe.read()))
        reader.start()
        for thread in threads:
            thread.join()
        os.close(writing)
        reader.join()
    assert found == [first + second]


def test_an_attempt_says_how_it_ended_though_the_disk_is_full(small_disk: Path) -> None:
    run: RunFolder = new_run(small_disk, settings(Path("none.tokens"), {"tp": 1, "pp": 1, "dp": 1}))
    killed, attempt = run.new_attempt(), run.new_attempt()
    reserve(killed)
    reserve(attempt)
    assert [path.parent.name for path in run.path.glob("attempts/*/.reserve")] == ["2"]
    fill(small_disk)
    with pytest.raises(RunFolderError):
        killed.write_ended("error", None, 3)
    write_end(run, attempt, End("stopped", "hpc-gpt stop"), 7)
    assert attempt.ended()["ended"] == "stopped"
    assert not list(run.path.glob("attempts/*/.reserve"))


def test_a_note_waits_for_room(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_gpt.core.runs.full_disk._PAUSE_S", 0.01)
    note = small_disk / "note"
    filler = fill(small_disk)
    when_there_is_space(lambda: write_once(note, "words" * 2000), "note")
    assert not note.exists()
    filler.unlink()
    wait_for("the note", note.exists)
    assert note.read_text() == "words" * 2000


def test_another_refusal_is_an_error() -> None:
    def refuse() -> None:
        raise RunFolderError("cannot write note: Read-only file system") from OSError(errno.EROFS, "Read-only")

    with pytest.raises(RunFolderError, match="Read-only file system"):
        when_there_is_space(refuse, "note")
