"""Which lines are known by those before them, and which are looked at for themselves."""

from pathlib import Path

import pytest

from hpc_gpt.reader.lines import line_kinds, matches
from hpc_gpt.reader.lines import line_reader as lines
from hpc_gpt.reader.lines import read_log as read_log_module
from hpc_gpt.reader.lines.growing_parts import PRINTED_BEFORE
from hpc_gpt.reader.lines.line_kinds import LineKinds
from hpc_gpt.reader.lines.matches import ZEROS, DialectPattern, find, literal_scan
from hpc_gpt.reader.lines.pattern import Dialect, Pattern
from hpc_gpt.reader.lines.read_log import read_log
from tests.reader.lines.comparable import comparable
from tests.reader.lines.test_blocks import SPECIMENS
from tests.reader.lines.test_source import LINE
from tests.reader.reading import read_log_plainly


def test_few_lines_are_looked_at_for_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3000 lines of steps, timers and noise, those of a new width: what makes the reader fast."""
    looked_at: list[str] = []
    monkeypatch.setattr(line_kinds, "find", lambda line, tried: looked_at.append(line) or find(line, tried))
    monkeypatch.setattr(read_log_module, "kinds_for_a_log", LineKinds)
    log = tmp_path / "run.out"
    timers = "time (ms) | forward-compute: 148.03 | optimizer: 87.67\n"
    log.write_text("".join(LINE.format(step) + timers + f"[noise] shard {step} read\n" for step in range(1, 1001)))
    (part,) = read_log(log).parts
    assert (len(part.steps["megatron"]), part.timers_s["optimizer"][1]) == (1000, 1000)
    assert len(looked_at) <= 10


# Lines that programs print today: {step}, and {a} and {b} for figures of one width.
OF_TODAY = {
    "throughput per GPU": " iteration {step}/ 9000 | consumed samples: 12 | elapsed time per iteration (ms): 2{a}.5 |"
    " throughput per GPU (TFLOP/s/GPU): 4{b}.1 | global batch size:    8 | lm loss: 1.{a}E+00 | loss scale: 1.0 |\n",
    "colours": "[rank0]:[titan] 2025-03-01 10:00:00,123 - root - INFO - \x1b[31mstep: {step}  \x1b[32mloss:  3.{a}  "
    "\x1b[33mmemory: 41.{b}GiB(51.07%)  \x1b[34mtps: 7,0{b}  \x1b[36mtflops: 412.59  \x1b[35mmfu: 41.38%\x1b[39m\n",
    "no step": "{{'loss': 1.{a}, 'grad_norm': 0.899086093487{a}, 'learning_rate': 1.{b}e-05, 'epoch': 0.{step}}}\n",
    "bars": "\r 12%|█▏        | {step}/9000 [1{b}:{b}<2:{b}:{b},  4.09s/it]\r{{'loss': 1.{a}, 'epoch': 0.{step}}}\n",
    "figures on lines of their own": "[step={step}/9000,epoch=0]\n    train/CrossEntropyLoss=2.{a}\n"
    "    throughput/device/tokens_per_second=9,1{b}\n    System/Peak GPU Memory (MB)=41,0{b}\n",
    "a digit that may be there": "Training epoch 0, iteration {step}/8999 | lr: 1.{a}e-05 | global_batch_size: 8 |"
    " global_step: {step} | reduced_train_loss: 9.{a} | train_step_timing in s: 5.{b} | consumed_samples: {a}\n",
}


@pytest.mark.parametrize("line", OF_TODAY.values(), ids=OF_TODAY)
def test_lines_of_today_are_read_many_at_once(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3000 steps few lines are looked at for themselves, and what is read is what the reader of lines reads."""
    looked_at: list[str] = []
    for module in (line_kinds, read_log_module, lines):
        if hasattr(module, "find"):
            seen = lambda text, tried=None: looked_at.append(text) or find(text, tried)  # noqa: E731
            monkeypatch.setattr(module, "find", seen)
    text_of = line_kinds.LineBlock.text
    monkeypatch.setattr(line_kinds.LineBlock, "text", lambda *given: looked_at.append("") or text_of(*given))
    monkeypatch.setattr(read_log_module, "kinds_for_a_log", LineKinds)
    log = tmp_path / "run.out"
    told = (line.format(step=step, a=1000 + step % 997, b=10 + step % 49) for step in range(1000, 4000))
    log.write_text("".join(told), newline="")
    (part,) = read_log(log).parts
    assert len(looked_at) <= 60
    (plain,) = read_log_plainly(log).parts
    assert comparable(part) == comparable(plain)
    (steps,) = part.steps.values()
    assert len(steps) == 3000


def test_a_line_of_an_epoch_that_is_printed_twice_counts_once(tmp_path: Path) -> None:
    """Two processes that print the same dict, without a step and without a label."""
    log = tmp_path / "run.out"
    dicts = [f"{{'loss': 1.{step:04}, 'learning_rate': 2e-05, 'epoch': {step / 100}}}\n" for step in range(1, 200)]
    log.write_text("".join(each * (1 + place % 3) for place, each in enumerate(dicts)))
    (part,), (plain,) = read_log(log).parts, read_log_plainly(log).parts
    assert comparable(part) == comparable(plain)
    assert len(part.steps["hf_trainer"]) == 199
    assert part.left_out == {PRINTED_BEFORE: sum(place % 3 for place in range(199))}


def test_a_pattern_that_asks_for_a_digit_is_asked_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`step 7` is a line of steps to this dialect, `step 8` is none."""
    dialect = Dialect("picky", (Pattern("step", r"picky step 7(?P<step>\d+) loss (?P<loss>[\d.]+)"),))
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
    """The scan of a block against a search for each literal."""
    scan = literal_scan()
    texts = [line.encode().translate(ZEROS)[cut:] for line in SPECIMENS for cut in range(4)]
    found = scan.candidates(texts)
    for index, line in enumerate(texts):
        wanted = {each.number for literal, group in scan.groups.items() if literal in line for each in group}
        assert {each.number for each in found.get(index, [])} == wanted
