"""Every group of every pattern is given texts of its own expression, and the readers any bytes: nothing is raised, and
no byte of a living program is lost."""

import json
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from re import _parser as parser  # type: ignore[attr-defined]

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_gpt.reader.failures.live_lines import LiveLines
from hpc_gpt.reader.lines.fields import scaled
from hpc_gpt.reader.lines.matches import DialectPattern, all_patterns
from hpc_gpt.reader.lines.pattern import NUMBER, Pattern, literal_of, needed_texts
from hpc_gpt.reader.runs.discovery import DiscoveredFiles
from hpc_gpt.reader.runs.foreign import read_foreign_runs
from hpc_gpt.trainer.program.process import ForeignLog, LastLines
from tests import examples
from tests.made_runs import unsubmitted_run
from tests.reader.generated import groups_of, text_of
from tests.reader.lines.test_fuzz import check, hurt_lines
from tests.reader.reading import specimen_of

TEXTS = examples(10)  # for each group
_NUMBER = parser.parse(NUMBER)


def texts() -> Iterator[tuple[DialectPattern, str, str]]:
    """(pattern, group, text) for every group of every pattern."""
    dice = random.Random(64)
    for each in all_patterns():
        for name, tree in groups_of(each.pattern.regex).items():
            for _ in range(TEXTS):
                yield each, name, text_of(tree, dice)


def lines() -> Iterator[str]:
    """Lines of every pattern's own expression, and its specimens' lines with each group's text in the group's place."""
    dice = random.Random(65)
    lines_of = {each.dialect.name: specimen_of(each.dialect.name).splitlines() for each in all_patterns()}
    for each in all_patterns():
        tree = parser.parse(each.pattern.regex)
        for _ in range(examples(5)):
            line = text_of(tree, dice) + "".join(_named(each.pattern, dice))
            yield line if each.pattern.literal in line else line + each.pattern.literal
    matches: dict[tuple[str, str], re.Match[str] | None] = {}
    for each, name, text in texts():
        if (key := (each.dialect.name, each.pattern.regex)) not in matches:
            matches[key] = next(filter(None, map(each.regex.search, lines_of[each.dialect.name])), None)
        found = matches[key]
        if found is not None and found.span(name) != (-1, -1) and not dice.randrange(8):
            yield found.string[: found.start(name)] + text + found.string[found.end(name) :]


def _named(pattern: Pattern, dice: random.Random) -> Iterator[str]:
    """Some names of a pattern in any order, each with a text of a number."""
    names = list(pattern.names.items())
    for name, figures in dice.sample(names, min(4, len(names))):
        end = dice.choice((*(figure.unit for figure in figures), "", "K", "%"))
        words = dice.choice((f"{name.replace('_', ' ')}: ", f"{name}=", f'"{name}": ', f"{name}  ")) if name else "| "
        yield f" {words}{text_of(_NUMBER, dice)}{end}{dice.choice(('', ' ', ',', ' |', '}'))}"


def test_a_group_takes_every_text_of_its_own() -> None:
    count = 0
    for each, name, text in texts():
        found = scaled(name, text)
        assert found is None or isinstance(found[1], str | float), (each.pattern.regex, name, text)
        count += 1
    assert count > 500 * TEXTS


def test_the_texts_of_an_expression_are_in_every_text_of_it() -> None:
    dice = random.Random(66)
    count = 0
    for regex in (each.pattern.regex for each in all_patterns()):
        if not (needed := needed_texts(regex)):
            continue
        count += 1
        tree = parser.parse(regex)
        for _ in range(examples(8)):
            text = text_of(tree, dice)
            assert all(each in text for each in needed), regex
    assert count > 1200
    with pytest.raises(AssertionError, match="several forms"):
        literal_of("step one|step two")
    with pytest.raises(AssertionError, match="no text"):
        literal_of(r"(?:step )?(\d+)")


def test_lines_of_every_expression_are_read_alike_by_all_readers(tmp_path: Path) -> None:
    made = [line.replace("\n", " ") for line in lines()]
    live, last = LiveLines(), LastLines("it")
    for line in made:
        row = live.take(line)
        last.add(line)
        assert row is None or json.dumps(row)
    last.failure(1), live.failure, last.killed_worker()
    found = DiscoveredFiles(logs=[tmp_path / f"{start}.out" for start in range(0, len(made), 500)])
    for number, log in enumerate(found.logs):
        check(log, "\n".join(made[500 * number : 500 * number + 500]).encode("utf-8", "surrogatepass"))
    assert read_foreign_runs(found)
    assert not found.skipped


@pytest.mark.parametrize("rate", ["inf", "INFinity", "1e300", "9" * 40])
def test_a_rate_without_bounds_gives_no_steps(rate: str, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    total = f"'train_samples_per_second': {rate}, 'train_steps_per_second': {rate}"
    log.write_text(f"{{'train_runtime': 12.5, {total}, 'epoch': 1.0}}\n")
    found = DiscoveredFiles(logs=[log])
    (run,) = read_foreign_runs(found)
    assert (run.record.steps_used, found.skipped) == (None, {})


def run_program(data: bytes, log: ForeignLog, folder: Path) -> int:
    """The exit code of a program that writes these bytes, whose log is followed; 60 s if it waits for good."""
    (file := folder / "output").write_bytes(data)
    with subprocess.Popen(["cat", file], stdout=subprocess.PIPE) as program:
        try:
            log.follow(program)
            code = program.wait(60)
            log.finish()
        finally:
            program.kill()
    return code


def log_of(read: Callable[[str], object], **follow: object) -> ForeignLog:
    run = unsubmitted_run()
    return ForeignLog(run.new_attempt(), run.resolved(), 0, read, **follow)  # type: ignore[arg-type]


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.lists(st.one_of(hurt_lines(), st.binary(max_size=200)), max_size=20).map(b"".join))
def test_no_byte_of_a_living_program_is_lost(data, tmp_path, capfdbinary):
    capfdbinary.readouterr()
    live = LiveLines()
    run_program(data, log_of(live.take, saw=LastLines("it").add, loss=lambda: live.loss), tmp_path)
    assert capfdbinary.readouterr() == (data, b"")


def raises(line: str) -> None:
    raise TypeError(f"not read: {line}")


def test_a_readers_fault_neither_blocks_nor_loses_output(tmp_path, capfdbinary):
    data = b"step 1 loss 2.0\n" * 10_000  # more than a pipe holds
    assert run_program(data, log_of(raises, saw=raises, loss=lambda: raises("a loss")), tmp_path) == 0
    out, err = capfdbinary.readouterr()
    assert out == data
    assert err.count(b"\n") == 1
    assert b"TypeError: not read: step 1 loss 2.0 (test_generated.py:" in err


def test_a_disk_that_refuses_does_not_block_the_program(tmp_path, capfdbinary):
    data = b"".join(b"step %d loss 2.0\n" % step for step in range(10_000))
    log = log_of(LiveLines().take)
    log._attempt.metrics.mkdir()
    assert run_program(data, log, tmp_path) == 0
    out, err = capfdbinary.readouterr()
    assert out == data
    assert err.count(b"\n") == 1


def test_a_line_is_read_up_to_a_bound() -> None:
    seen: list[int] = []
    log_of(lambda line: seen.append(len(line))).take("x" * 1_000_000)
    assert seen == [4000]
