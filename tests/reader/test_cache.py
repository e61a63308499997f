"""The cache. With it a second look at a log reads what was appended, and says what a first look at all of it says."""

import gzip
import io
import os
import pickle
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_gpt.reader import cache as cache_module
from hpc_gpt.reader.cache import KINDS, CacheFile, FileIdentity, cache_path, cached_prefix
from hpc_gpt.reader.logs import Part, source
from hpc_gpt.reader.logs.read_log import LogRead, read_log
from tests import examples
from tests.reader.logs.comparable import comparable
from tests.reader.logs.test_blocks import LOGS
from tests.reader.logs.test_source import LINE

CHECKED = 300_000  # bytes that are read to find that a log is as it was, and its first ones, at most
LOG = "".join(LINE.format(step) for step in range(1, 5001)).encode()
MORE = "".join(LINE.format(step) for step in range(5001, 5101)).encode()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPC_GPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "report"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (path := tmp_path / "run.out").write_bytes(LOG)
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def from_size(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Logs of so many bytes and more are cached."""
    monkeypatch.setitem(KINDS, "log", replace(KINDS["log"], least=size))


def anew(path: Path) -> LogRead:
    """The log read without the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_GPT_CACHE", "off")
        return read_log(path)


def assert_same(found: LogRead, path: Path) -> None:
    whole = anew(path)
    assert (found.lines, found.left_out) == (whole.lines, whole.left_out)
    assert [comparable(part) for part in found.parts] == [comparable(part) for part in whole.parts]


def test_only_what_was_appended_is_read(cache: Path, log: Path) -> None:
    assert read_log(log).bytes >= len(LOG)
    again = read_log(log)
    assert again.bytes < CHECKED
    assert_same(again, log)
    append(log, MORE + b" iteration     5101/ 10")  # being written
    for _ in range(2):
        more = read_log(log)
        assert more.bytes < CHECKED + len(MORE)
        assert_same(more, log)
    append(log, LINE.format(5101).encode().removeprefix(b" iteration     5101/ 10"))
    last = read_log(log)
    assert last.bytes < CHECKED
    assert_same(last, log)


@pytest.mark.parametrize(
    "change",
    [
        lambda log: log.write_bytes(LOG[:-1_000_000]),
        lambda log: log.write_bytes(LOG.replace(b"2767.3", b"2767.4")),
        lambda log: log.write_bytes(LOG.replace(b" 2500/", b" 2501/")),
        lambda log: (log.unlink(), log.write_bytes(MORE + LOG)),
        lambda log: log.write_bytes(b"\n" + LOG),
    ],
    ids=["shorter", "rewritten", "one line rewritten", "replaced", "grown at the front"],
)
def test_a_log_that_is_another_is_read_anew(cache: Path, log: Path, change) -> None:
    read_log(log)
    change(log)
    os.utime(log)
    found = read_log(log)
    assert found.bytes >= log.stat().st_size
    assert_same(found, log)


def test_another_version_takes_nothing_over(cache: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_log(log)
    monkeypatch.setattr(cache_module, "program_digest", lambda: "others")
    assert read_log(log).bytes >= len(LOG)


def test_an_edited_program_caches_for_its_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for imported in (time.time(), time.time(), 0.0, 0.0):
        monkeypatch.setattr(cache_module, "_IMPORTED", imported)
        digests.append(cache_module.program_digest.__wrapped__())
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


def test_compressed_logs_are_cached_while_they_do_not_change(cache, log, monkeypatch):
    from_size(monkeypatch, 1000)
    log.write_bytes(gzip.compress(LOG + b" torn", 0))
    read_log(log)
    again = read_log(log)
    assert again.bytes < CHECKED
    assert_same(again, log)
    append(log, gzip.compress(MORE))
    assert read_log(log).bytes >= log.stat().st_size
    assert_same(read_log(log), log)


def test_states_are_private_and_those_of_others_are_not_trusted(cache: Path, log: Path) -> None:
    read_log(log)
    (state,) = cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700
    assert state.stat().st_mode & 0o777 == 0o600
    state.chmod(0o666)
    assert read_log(log).bytes >= len(LOG)


def test_without_a_folder_to_write_it_works_without(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_GPT_CACHE", str(log / "below a file"))
    assert_same(read_log(log), log)


def test_small_logs_and_small_spaces(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small := tmp_path / "small.out").write_bytes(MORE)
    read_log(small)
    assert not cache.exists()
    monkeypatch.setattr(cache_module, "_MOST_BYTES", 1_000_000)
    for number in range(4):
        (log := tmp_path / f"{number}.out").write_bytes(LOG)
        read_log(log)
        os.utime(next(iter(sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime_ns))))
    assert 0 < sum(path.stat().st_size for path in cache.iterdir()) <= 1_000_000


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LOGS, min_size=2, max_size=4), st.integers(0, 40))
def test_any_log_in_any_pieces(cache, log, monkeypatch, logs, cut):
    from_size(monkeypatch, 1)
    monkeypatch.setattr(source, "CHUNK", 2000)
    log.write_bytes(b"start\n")
    for text in logs:
        append(log, text.encode()[: len(text.encode()) - cut])
        assert_same(read_log(log), log)


def test_no_secret_of_a_log_is_cached(cache, tmp_path):
    path = tmp_path / "run.out"
    dump = "  hub_token ....... abcd1234\n  tracker ......... https://h/x?api_key=abcd1234\n"
    header = "------------------------ arguments ------------------------\n"
    failure = "RuntimeError: no login with hub_token=abcd1234 PASSWORD='abcd1234'\n"
    path.write_bytes(f"{header}{dump}{'-' * 20} end of arguments {'-' * 20}\n".encode() + LOG + failure.encode())
    found = read_log(path)
    assert "tracker" in found.parts[0].arguments
    assert found.parts[0].failures
    cached = b"".join(file.read_bytes() for file in cache.iterdir())
    assert b"tracker" in cached
    assert b"no login" in cached
    assert b"abcd1234" not in cached
    assert "abcd1234" not in str(found)


def prefix_of(path: Path, kind: str = "log", **changed: int) -> cache_module.CachedPrefix | None:
    """The cache of a file whose bytes are all `-`."""
    identity = FileIdentity(**{"device": 1, "inode": 2, "size": 2_000_000, "changed_ns": 3, **changed})
    return cached_prefix(kind, path, identity, lambda start, size: b"-" * size)


def test_where_the_cache_lies_and_from_which_size_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(**environment: str) -> str | None:
        with monkeypatch.context() as patch:
            for name in ("HOME", "XDG_CACHE_HOME", "HPC_GPT_CACHE"):
                patch.setenv(name, environment[name]) if name in environment else patch.delenv(name, raising=False)
            place = cache_path("log", Path("a"), FileIdentity(1, 2, 3, 4))
        return str(place.parent) if place else None

    assert folder(HOME="/h") == folder(HOME="/h", XDG_CACHE_HOME="", HPC_GPT_CACHE="") == "/h/.cache/hpc-gpt/report"
    assert folder(HOME="/h", XDG_CACHE_HOME="/x") == "/x/hpc-gpt/report"
    assert folder(HOME="/h", XDG_CACHE_HOME="/x", HPC_GPT_CACHE="/c") == "/c/report"
    assert folder(HOME="/h", XDG_CACHE_HOME="/x", HPC_GPT_CACHE="off") is None
    assert [prefix_of(Path("a"), size=size) is None for size in (999_999, 1_000_000)] == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_has_the_objects_of_its_kind_alone(kind: str) -> None:
    """A damaged or planted cache file starts no code."""

    def load(value: object) -> object:
        return cache_module._Unpickler(io.BytesIO(pickle.dumps(value, 5)), kind=kind).load()

    plain = {"a": (1, [2.5, None, b"b"])}
    assert load(plain) == plain
    own = [Part("a"), np.arange(3.0), np.array(["a"])]
    if KINDS[kind].has_objects:
        assert repr(load(own)) == repr(own)
    foreign = (Path("a"), cache_module.program_digest, Path.iterdir, np.float64, os.system)
    for value in foreign if KINDS[kind].has_objects else (*foreign, *own):
        with pytest.raises(pickle.UnpicklingError):
            load(value)


def test_a_prefix_is_of_one_time_and_path(cache: Path, log: Path) -> None:
    """A file that was written to and did not grow is another, and so is one at another path or inode; one file has a
    value of each kind."""
    prefix_of(log).store(10, "read")
    other_kind, other_path = prefix_of(log, "metrics"), prefix_of(log.parent)
    others = [prefix_of(log, **change) for change in ({"device": 4}, {"inode": 4}, {"changed_ns": 4})]
    shorter = prefix_of(log, size=1_999_999, changed_ns=3)
    assert [each.load() for each in (other_kind, other_path, *others)] == [(0, None)] * 5
    assert (shorter.load(grows=False), prefix_of(log, size=2_000_001).load(grows=False)) == ((0, None), (0, None))
    assert prefix_of(log).load() == prefix_of(log).load(grows=False) == (10, "read")
    assert prefix_of(log, size=2_000_001, changed_ns=4).load() == (10, "read")
    prefix_of(log).store(2_000_000, "all")
    assert shorter.load() == (0, None)


@pytest.mark.parametrize("place", [0, 10, 100, 250, -100, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_cache_file_is_not_used(tmp_path: Path, kind: str, place: int) -> None:
    file = CacheFile(kind, tmp_path / "cache" / "file")
    value = {str(number): [number, "text"] for number in range(100)}
    file.store(value)
    sound = file.path.read_bytes()
    assert file.load()[1] == value
    flipped = bytearray(sound)
    flipped[place] ^= 1
    for damaged in (bytes(flipped), sound[: place or 1], b""):
        file.path.write_bytes(damaged)
        assert file.load() is None
        file.store(value)
        assert file.load()[1] == value


def test_what_ends_with_a_carriage_return_is_read_once(cache: Path, log: Path) -> None:
    append(log, LINE.format(5001).encode().rstrip(b"\n") + b"\r")
    for _ in range(3):
        assert_same(read_log(log), log)
    append(log, b"\n" + MORE)
    assert_same(read_log(log), log)


def test_the_folder_is_not_listed_at_each_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = []
    real = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: (listed.append(path), real(path))[1])
    for number in range(40):
        file = CacheFile("log", tmp_path / "many" / str(number))
        file.store(number)
        assert file.load()[1] == number
    assert len(listed) == 1
