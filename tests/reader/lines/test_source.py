"""What a log is read from: plain and compressed files, standard input, and what is no log."""

import gzip
import io
import os
import socket
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hpc_gpt.reader.lines import source as source_module
from hpc_gpt.reader.lines.read_log import read_log
from hpc_gpt.reader.lines.source import Source
from tests.reader.lines.comparable import comparable

LINE = (
    " iteration {0:8d}/    1000 | consumed samples: {0:12d} | elapsed time per iteration (ms): 2767.3 |"
    " learning rate: 1.500E-04 | global batch size:     4 | lm loss: 3.282511E+01 | loss scale: 16384.0 |"
    " grad norm: 9.804 | number of skipped iterations:   1 | number of nan iterations:   0 |\n"
)
LOG = "".join(LINE.format(step) for step in range(1, 401)).encode()
STEPS = [float(step) for step in range(1, 401)]


def steps_of(path: Path) -> list[float]:
    """Return the steps of a log."""
    found = read_log(path)
    assert found.refused is None
    return [step for part in found.parts for steps in part.steps.values() for step in steps["step"].tolist()]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "run.out"


@pytest.mark.parametrize(
    "data",
    [
        LOG,
        b"\xef\xbb\xbf" + LOG,
        b"\0" * 100_000 + LOG,
        LOG.replace(b"\n", b"\r\n"),
        gzip.compress(LOG),
        gzip.compress(LOG[:50_000]) + gzip.compress(LOG[50_000:]) + b"\0" * 512,
    ],
    ids=["plain", "bom", "nuls", "crlf", "gzip", "gzip members"],
)
def test_a_log_is_known_by_its_content(log: Path, data: bytes) -> None:
    log.write_bytes(data)
    assert steps_of(log) == STEPS
    assert read_log(log).lines == 400


def test_what_is_cut_off_is_read_so_far_and_counted(log: Path) -> None:
    noisy = b"".join(line + os.urandom(64).hex().encode() + b"\n" for line in LOG.splitlines(keepends=True))
    packed = gzip.compress(noisy * 4)
    log.write_bytes(packed[: len(packed) * 9 // 10])
    found = read_log(log)
    assert found.left_out == {"the rest of the file: its compressed data are cut off or damaged": 1}
    assert sum(len(steps) for part in found.parts for steps in part.steps.values()) > 200


def test_damaged_data_are_counted(log: Path) -> None:
    packed = bytearray(gzip.compress(LOG))
    packed[len(packed) // 2] ^= 0xFF
    log.write_bytes(packed)
    assert read_log(log).left_out == {"the rest of the file: its compressed data are cut off or damaged": 1}


def archive() -> bytes:
    """A zip archive, as torch.save writes it."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("data.pkl", b"x" * 100)
    return held.getvalue()


REFUSED: list[tuple[bytes, str]] = [
    (archive(), "a zip archive, as of a checkpoint"),
    *((first + bytes(100), words) for first, words in (
        (b"PK\x05\x06", "a zip archive"),
        (b"\x7fELF", "a program"), (b"\0asm", "a program"), (b"!<arch>\n", "a library"),
        (b"\x89PNG", "an image"), (b"\xff\xd8\xff", "an image"), (b"GIF8", "an image"), (b"%PDF-", "a PDF document"),
        (b"OggS", "sound"), (b"RIFF", "sound or an image"), (b"\x93NUMPY\x01\0", "a NumPy array"),
        (b"\x89HDF\r\n", "an HDF5 file"), (b"SQLite format 3\0", "a database"), (b"PAR1", "a Parquet file"),
        (b"ARROW1", "an Arrow file"), (b"MMIDIDX\0", "an index of tokens"), (b"7z\xbc\xaf\x27\x1c", "a 7-zip archive"),
        (b"Rar!\x1a\x07", "a rar archive"), (b"BZh", "compressed with bzip2, which is not read"),
        (b"\xfd7zXZ\0", "compressed with xz, which is not read"),
        (b"\x04\x22\x4d\x18", "compressed with lz4, which is not read"),
        (b"\x80\x02", "a pickle"), (b"\x80\x03", "a pickle"), (b"\x80\x04", "a pickle"), (b"\x80\x05", "a pickle"),
        (b"name" + bytes(253) + b"ustar", "a tar archive"),
    )),
    (struct.pack("<Q", 40) + b'{"weight":{"dtype":"BF16","shape":[2]}}', "a safetensors file"),
    (struct.pack("<QI", 24, 1) + b"\t\0\0\0\0\0\0\0\0\x1a\rbrain.Event:2" + bytes(40), "a TensorBoard event file"),
    (struct.pack("<4000H", *(number * 17 % 50257 for number in range(4000))), "binary"),
    (bytes(range(128, 256)) * 100, "binary"), (b"x" * 940 + b"\x01" * 60, "binary"),
    (b"x" * 69 + b"\xff" * 31, "binary"),
    (b"\x28\xb5\x2f\xfd\x04", "compressed with zstandard, which is not read: zstdcat LOG | hpc-gpt report -"),
    (gzip.compress(archive()), "a zip archive, as of a checkpoint"),
]  # fmt: skip
READ = (
    b"", b"\0" * 100, b"\0" * 4 + b"a {", b"x" * 950 + b"\x01" * 50, b"x" * 70 + b"\xff" * 30,
    b"\x80 a line", b"\x80\x06" + b" a line" * 9, b"\x07\x08\x0b\x0c\x1b[0m\t",
)  # fmt: skip


def test_what_is_no_log_is_refused_in_words(log: Path) -> None:
    for data, words in REFUSED:
        log.write_bytes(data)
        found = read_log(log)
        assert (found.refused, found.parts) == (words, []), data[:20]
    for data in READ:
        log.write_bytes(data)
        assert read_log(log).refused is None, data[:20]


def test_what_is_no_regular_file_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, plug, loop = tmp_path / "pipe", tmp_path / "plug", tmp_path / "loop"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(tmp_path)  # a socket's path must be short
        listening.bind("plug")
        loop.symlink_to(loop)
        refused = [read_log(path).refused for path in (pipe, plug, tmp_path, Path("/dev/zero"), loop, tmp_path / "no")]
    assert refused == ["a pipe", "a socket", "a folder", "a device", "a loop of symbolic links", "no such file"]
    assert read_log(Path("a\0b")).refused == "not a path that a file can have"


def test_a_file_that_may_not_be_read_is_refused(log: Path) -> None:
    log.write_bytes(LOG)
    log.chmod(0)
    reading = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from hpc_gpt.reader.lines.read_log import read_log\n"
        "if os.geteuid() == 0:\n    os.setuid(65534)\n"
        "print(read_log(Path(sys.argv[1])).refused)\n"
    )
    done = subprocess.run([sys.executable, "-c", reading, log.name], cwd=log.parent, capture_output=True, text=True)
    assert (done.stderr, done.stdout.strip()) == ("", "not readable")


def test_standard_input(log: Path) -> None:
    log.write_bytes(gzip.compress(LOG))
    imported = "from pathlib import Path\nfrom hpc_gpt.reader.lines.read_log import read_log\n"
    reading = imported + "print(read_log(Path('-')).lines)"
    with log.open("rb") as file:
        done = subprocess.run([sys.executable, "-c", reading], stdin=file, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "400"


def test_a_log_that_grows_meanwhile_is_read_to_where_it_was(log: Path) -> None:
    log.write_bytes(LOG)
    with Source(log) as source, log.open("ab") as more:
        found = b""
        for chunk in source.chunks():
            found += chunk
            more.write(LOG)
            more.flush()
    assert found == LOG


def test_a_log_that_is_cut_meanwhile_is_read_as_far_as_it_is(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "CHUNK", 10_000)
    log.write_bytes(LOG)
    with Source(log) as source:
        chunks = source.chunks()
        first = next(chunks)
        os.truncate(log, 70_000)
        assert first + b"".join(chunks) == LOG[:70_000]


def test_a_line_without_end_is_held_in_part_and_counted(log: Path) -> None:
    """A line of 50 MB: what is held of it is bounded, and the lines around it are read."""
    with log.open("wb") as file:
        file.write(LOG[:100_000])
        file.write(b"\nloss: ")
        for _ in range(50):
            file.write(b"9" * 1_000_000)
        file.write(b"\n" + LINE.format(999).encode())
    reading = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from hpc_gpt.reader.lines.read_log import read_log\n"
        "found = read_log(Path(sys.argv[1]))\n"
        "print(found.left_out['bytes of a line after its first 262,144'])\n"
        "print(found.parts[0].steps['megatron']['step'][-1])\n"
        # getrusage would tell the peak of the process that started this one, too.
        "print(int(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1]) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", reading, log], capture_output=True, text=True, check=True)
    left_out, step, peak_mib = done.stdout.split()
    assert float(left_out) == 50_000_006 - 262_144
    assert step == "999.0"
    assert int(peak_mib) < 300


def test_size_of_chunks_changes_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_bytes(b"\r\n\n" + LOG.replace(b"2767.3", b"27\0", 3) + b"\r\r torn")
    whole = read_log(log)
    for size in (1, 700, 5000):
        monkeypatch.setattr(source_module, "CHUNK", size)
        monkeypatch.setattr(source_module, "HEAD", size)
        found = read_log(log)
        assert (found.lines, found.left_out) == (whole.lines, whole.left_out)
        assert [comparable(part) for part in found.parts] == [comparable(part) for part in whole.parts]
