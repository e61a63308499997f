"""Which lines are known by those before them, and which are looked at for themselves."""

from pathlib import Path

import pytest

from hpc_gpt.readers.dialects import dialects
from hpc_gpt.readers.logs import line_kinds, matches
from hpc_gpt.readers.logs import read_log as read_log_module
from hpc_gpt.readers.logs.line_kinds import LineKinds
from hpc_gpt.readers.logs.matches import ZEROS, DialectPattern, find, literal_scan
from hpc_gpt.readers.logs.read_log import read_log
from hpc_gpt.readers.pattern import Dialect, Pattern
from tests.readers.logs.test_blocks import SPECIMENS
from tests.readers.logs.test_source import LINE


def test_few_lines_are_looked_at_for_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3000 lines of steps, timers and noise, those of a new width: what makes the reader fast."""
    looked_at: list[str] = []
    monkeypatch.setattr(line_kinds, "find", lambda line, tried: looked_at.append(line) or find(line, tried))
    monkeypatch.setattr(read_log_module, "kinds_for_a_log", LineKinds)
    log = tmp_path / "run.out"
    timers = "time (ms) | forward-compute: 148.03 | optimizer: 87.67\n"
    log.write_text("".join(LINE.format(step) + timers + f"[noise] shard {step} read\n" for step in range(1, 1001)))
    (part,) = read_log(log).parts
    assert len(part.steps["megatron"]) == 1000
    assert part.timers_s["optimizer"][1] == 1000
    assert len(looked_at) <= 10


def test_a_pattern_that_asks_for_a_digit_is_asked_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`step 7` is a line of steps to this dialect, `step 8` is none."""
    dialect = Dialect(
        "picky",
        (Pattern("step", "picky step", r"picky step 7(?P<step>\d+) loss (?P<loss>[\d.]+)"),),
        specimen="",
        seen="nowhere",
    )
    patterns = (DialectPattern(dialect, dialect.patterns[0], 0),)
    monkeypatch.setattr(matches, "all_patterns", lambda: patterns)
    for cached in (matches.patterns_by_literal, literal_scan):
        cached.cache_clear()
    monkeypatch.setattr(read_log_module, "kinds_for_a_log", LineKinds)
    try:
        log = tmp_path / "run.out"
        log.write_text("".join(f"picky step {7 + step % 2}{step:03d} loss 1.{step:03d}\n" for step in range(200)))
        (part,) = read_log(log).parts
    finally:
        for cached in (matches.patterns_by_literal, literal_scan):
            cached.cache_clear()
    assert part.steps["picky"]["step"].tolist() == [float(step) for step in range(0, 200, 2)]


def test_every_literal_is_found_wherever_it_stands() -> None:
    """The scan of four bytes at a time against a search for each literal."""
    scan = literal_scan()
    lines = [line.encode().translate(ZEROS)[cut:] for line in SPECIMENS for cut in range(4)]
    found = scan.candidates(lines)
    for index, line in enumerate(lines):
        wanted = {each.number for literal, group in scan.groups.items() if literal in line for each in group}
        assert {each.number for each in found.get(index, [])} == wanted


def test_a_literal_stands_in_each_line_that_its_pattern_matches() -> None:
    for dialect in dialects():
        for line in dialect.specimen.splitlines():
            tried = literal_scan().candidates([line.encode().translate(ZEROS)]).get(0, [])
            for match, each in find(line):
                assert each in tried, (match, each.pattern.regex)
