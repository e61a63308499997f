"""Which line is a step of its own, whose figure wins, and which figure is left out: small logs in programs' forms."""

from pathlib import Path

import pytest

from hpc_gpt.core.runs.record import ROUGH_STEP, Record
from hpc_gpt.reader.lines.read_log import read_log
from hpc_gpt.report.gather import gather_paths
from hpc_gpt.report.tables import COLUMNS
from tests.reader.lines.comparable import comparable
from tests.reader.reading import read_log_plainly


def read(folder: Path, text: str, name: str = "train.log") -> Record:
    """The record of the only run of a log, which both readers read alike."""
    (folder / name).write_text(text)
    block, plain = (reader(folder / name) for reader in (read_log, read_log_plainly))
    assert [comparable(part) for part in block.parts] == [comparable(part) for part in plain.parts]
    [record] = gather_paths([str(folder / name)], Path("/nowhere")).records
    return record


def clock(seconds: int) -> str:
    return f"{seconds // 60:02d}:{seconds % 60:02d}"


def bar(step: int, total: int) -> str:
    return (
        f"{100 * step // total:3d}%|{'#' * 4:10s}| {step}/{total} [{step // 60:02d}:{step % 60:02d}<10:00,  1.00s/it]"
    )


# name -> the line of a step whose figures are those of the line before
EQUAL_LINES = {
    "HF Trainer": "{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate': 2e-05, 'epoch': 0.01}",
    "TRL": "{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate': 1e-06, 'num_tokens': 81920.0, 'kl': 0.2, 'epoch': 0.0}",
    "ms-swift": "{'loss': 0.125, 'token_acc': 0.5, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': 0.02}",
}


@pytest.mark.parametrize("count", [8, 60])
@pytest.mark.parametrize("name", EQUAL_LINES)
def test_equal_lines_with_a_step_of_the_bar_between_are_two(tmp_path: Path, name: str, count: int) -> None:
    line = EQUAL_LINES[name]
    lines = "".join(f"\r{bar(step, count)}\n{line}\n\r{bar(step, count)}" for step in range(1, count + 1))
    record = read(tmp_path, lines)
    assert record.attempts[-1]["last_step"] == count
    assert not [flag for flag in record.flags if "printed before" in flag]


@pytest.mark.parametrize("name", EQUAL_LINES)
def test_a_line_that_is_printed_twice_at_once_is_one(tmp_path: Path, name: str) -> None:
    line = EQUAL_LINES[name]
    lines = "".join(f"\r{bar(step, 40)}\n{line}\n\r{bar(step, 40)}\n{line}\n" for step in range(1, 41))
    record = read(tmp_path, lines)
    assert record.attempts[-1]["last_step"] == 40
    assert "left out: 40 lines of a step that was printed before" in record.flags


@pytest.mark.parametrize("quote", ["", "'"])
@pytest.mark.parametrize("name", EQUAL_LINES)
def test_a_step_in_the_line_is_its_number(tmp_path: Path, name: str, quote: str) -> None:
    line = EQUAL_LINES[name].removesuffix("}")
    record = read(tmp_path, "".join(f"{line}, 'step': {quote}{12 * step}{quote}}}\n" for step in range(1, 31)))
    assert record.attempts[-1]["last_step"] == 360
    assert not [flag for flag in record.flags if "counted" in flag or "printed before" in flag]


def test_two_hosts_that_print_a_line_print_one_step(tmp_path: Path) -> None:
    hosts = ("gpu11", "gpu12")
    line = EQUAL_LINES["HF Trainer"]
    lines = "".join(f"{host}: {line}\n{host}: {bar(step, 30)}\n" for step in range(1, 31) for host in hosts)
    record = read(tmp_path, lines)
    assert record.attempts[-1]["last_step"] == 30
    assert "left out: 30 lines of a step that was printed before" in record.flags


AXOLOTL = (
    "{{'loss': '{0:.2f}', 'grad_norm': '0.41', 'learning_rate': '2e-05', 'memory/max_allocated (GiB)': '30.1',"
    " 'tokens/train_per_sec_per_gpu': '{1}', 'tokens/total': {2}, 'epoch': '{3:.3f}', 'step': {4}}}\n"
)
OWN = "step {4:4d} | loss {0:.2f} | dt: {5:.0f} ms | tok/s {1} | tokens seen {2}\n"
JSON = '{{"step": {4}, "loss": {0:.2f}, "step_time_ms": {5:.1f}, "tokens_per_sec": {1}, "total_tokens": {2}}}\n'
HEADS = {AXOLOTL: "Num processes: 4\n", OWN: "", JSON: ""}


def counted(form: str, rate: float, tokens: int = 65_536, step_s: float = 4.0) -> str:
    """The lines of 40 steps, with bars for the program that prints no time."""
    lines = [HEADS[form]]
    for step in range(1, 41):
        lines.append(form.format(3 - step / 50, rate, tokens * step, step / 400, step, 1e3 * step_s))
        lines += [f"\r{bar(int(step_s * step), 160)}".replace(f" {int(step_s * step)}/160", f" {step}/40")] * (
            form == AXOLOTL
        )
    return "".join(lines)


@pytest.mark.parametrize("form", HEADS)
def test_a_counter_judges_a_rate_of_one_micro_batch(tmp_path: Path, form: str) -> None:
    record = read(tmp_path, counted(form, 512 if form == AXOLOTL else 2048))
    assert record.tokens_per_s == pytest.approx(16_384, rel=0.02)
    assert "but its counter of tokens grows by 16,384 a second: left out" in record.flags[0]


@pytest.mark.parametrize("form", HEADS)
def test_a_rate_above_that_of_the_counter_is_left_out(tmp_path: Path, form: str) -> None:
    record = read(tmp_path, counted(form, 39_000))
    assert record.tokens_per_s is None or record.tokens_per_s == pytest.approx(16_384, rel=0.02)


@pytest.mark.parametrize("form", HEADS)
def test_a_rate_of_the_tokens_without_padding_stays(tmp_path: Path, form: str) -> None:
    rate = 3_300 if form == AXOLOTL else 13_200
    record = read(tmp_path, counted(form, rate))
    assert record.tokens_per_s == pytest.approx(13_200, rel=0.02) or record.tokens_per_s == pytest.approx(
        16_384, rel=0.02
    )
    assert not [flag for flag in record.flags if "counter of tokens" in flag]


MEGATRON = (
    " iteration {0:8d}/    1000 | consumed samples: {0:12d} | elapsed time per iteration (ms): 640.5 |"
    " throughput per GPU (TFLOP/s/GPU): {1:.1f} | learning rate: 2.0E-04 | global batch size:     1 |"
    " lm loss: 3.1E+00 | loss scale: 1.0 | grad norm: 1.1 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |\n"
)
TITAN = (
    "[titan] 2025-06-02 11:20:{0:02d},100 - root - INFO - step: {0:2d}  loss:  7.1020  grad_norm:  2.1000"
    "  memory: 20.10GiB(25.31%)  tps: 8,010  tflops: {1:.2f}  mfu: 16.21%\n"
)
NANOTRON = (
    "10/17/2025 16:31:{0:02d} [INFO|DP=0|PP=0|TP=0]: iteration: {0} / 900 | consumed_tokens: 85.8G |"
    " elapsed_time_per_iteration_ms: 640 | tokens_per_sec: 22.8K | tokens_per_sec_per_gpu: 11.4K |"
    " global_batch_size: 64 | lm_loss: 2.38 | lr: 1e-05 | model_tflops_per_gpu: {1:.1f} |"
    " hardware_tflops_per_gpu: {1:.1f} | grad_norm: 1.25\n"
)


@pytest.mark.parametrize("form", [MEGATRON, TITAN, NANOTRON])
def test_a_printed_rate_above_the_peak_of_any_device_is_left_out(tmp_path: Path, form: str) -> None:
    head = "Mixed precision type: bf16\n"
    record = read(tmp_path, head + "".join(form.format(step, 4711) for step in range(1, 9)))
    assert record.tflops_printed is None
    assert any("tflops_printed would be 4,711, above the peak of every device in bf16" in flag for flag in record.flags)
    assert read(tmp_path, head + "".join(form.format(step, 911) for step in range(1, 9))).tflops_printed == 911


def trainer_bars(steps: int, step_s: int) -> str:
    bars = "".join(
        f"\r{100 * step // steps:3d}%|####      | {step}/{steps}"
        f" [{step * step_s // 60:02d}:{step * step_s % 60:02d}<1:00:00,  7.00s/it]"
        for step in range(steps + 1)
    )
    last = "{'loss': 2.5, 'grad_norm': 1.1, 'learning_rate': 2e-05, 'epoch': 0.5}"
    return f"***** Running training *****\n  Total optimization steps = {steps}\n{bars}\n{last}\n"


def loop(steps: int) -> str:
    lines = (f"2025-06-02 10:{step:02d}:00,113 INFO step {step} | loss 3.{step}01\n" for step in range(1, steps + 1))
    return "".join(lines)


def factory(steps: int) -> str:
    return "".join(
        f'{{"current_steps": {step}, "total_steps": 90, "loss": 1.2{step}, "lr": 1e-05, "epoch": 0.1,'
        f' "elapsed_time": "0:0{step}:00"}}\n'
        for step in range(1, steps + 1)
    )


ROUGH = {"bars": trainer_bars(5, 9), "times of day": loop(5), "seconds since the start": factory(5)}
EXACT = {
    "many bars": trainer_bars(40, 1),
    "many lines": loop(9),
    "printed": "".join(f"iter {step}: loss 3.1{step}, time 561.94ms, mfu 11.20%\n" for step in range(5)),
}


@pytest.mark.parametrize("name", [*ROUGH, *EXACT])
def test_a_step_time_from_few_differences_is_about(tmp_path: Path, name: str) -> None:
    record = read(tmp_path, {**ROUGH, **EXACT}[name])
    assert record.step_s is not None
    assert (ROUGH_STEP in record.flag_kinds) is (name in ROUGH)
    [column] = [column for column in COLUMNS if column.keys == ("step_s",)]
    assert column.show(record).startswith("~") is (name in ROUGH)


def bars_with(figures: str) -> str:
    bars = (
        f"\r{5 * step:3d}%|####      | {step}/20 [{step:02d}:00<10:00, 60.13s/it{figures.format(3 - step / 20)}]"
        for step in range(1, 21)
    )
    return "".join(bars) + "\n"


@pytest.mark.parametrize(
    "figures", [", loss {0:.4f}", ", Loss={0:.4f}", ", lr=1e-5, train_loss {0:.4f}", ", Loss: {0:.4f}"]
)
def test_a_loss_in_a_bar_is_read(tmp_path: Path, figures: str) -> None:
    record = read(tmp_path, bars_with(figures))
    assert (record.loss_first, record.loss_last, record.attempts[-1]["last_step"]) == (2.95, 2.0, 20)


@pytest.mark.parametrize("form", [*EQUAL_LINES.values(), loop(9)])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_read_as_utf_8(tmp_path: Path, form: str, encoding: str) -> None:
    text = form + "\n" + bar(1, 40) + "\n\u2026 \u00e9poch \U0001f600\n"
    begin = "\ufeff" if encoding.endswith("be") else ""
    (tmp_path / "tee.log").write_bytes((begin + text.replace("\n", "\r\n")).encode(encoding))
    [record] = gather_paths([str(tmp_path / "tee.log")], Path("/nowhere")).records
    plain = read(tmp_path, text)
    assert (record.loss_first, record.attempts) != (None, [])
    assert record.loss_first == plain.loss_first
    assert record.attempts[-1]["last_step"] == plain.attempts[-1]["last_step"]


TRAINER_LINE = "{'loss': 2.5, 'grad_norm': 1.1, 'learning_rate': 2e-05, 'epoch': 0.5}\n"
RANK = (
    "03/02/2026 10:00:0{0} - WARNING - __main__ - Process rank: {0}, device: cuda:{0}, n_gpu: 1"
    " distributed training: True, 16-bits training: False\n"
)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("nranks = 2 num_gpus = 2\n" + TRAINER_LINE, 2),
        ("".join(RANK.format(rank) for rank in (1, 0, 3, 2)) + TRAINER_LINE, 4),
        ("".join(RANK.format(rank) for rank in range(8)) + loop(6), 8),
        (RANK.format(0).replace("True,", "False,") + TRAINER_LINE, None),
        (RANK.format(3) + TRAINER_LINE, None),
    ],
)
def test_gpus_in_own_words(tmp_path: Path, text: str, gpus: int | None) -> None:
    assert read(tmp_path, text).gpus == gpus


@pytest.mark.parametrize(
    "line",
    ["Validation - Loss: 0.1996", "| Valid loss: 0.1996 |", "eval loss = 0.1996, acc = 0.93", "Test - Loss 0.1996"],
)
def test_an_evaluation_in_own_words(tmp_path: Path, line: str) -> None:
    record = read(tmp_path, loop(6) + line + "\n")
    assert (record.loss_last, record.loss_eval) == (3.601, 0.1996)
    assert read(tmp_path, loop(6) + f"best {line[0].lower()}{line[1:]}\n").loss_eval is None


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("option", ["--{} True --x 2", "--x=2 --{}=True --y 1", "--deepspeed ds.json --{} True \\"])
def test_the_dtype_in_a_printed_command(tmp_path: Path, option: str, dtype: str) -> None:
    command = f"[2026-01-02 10:00:00,113] [INFO] [runner.py:568:main] cmd = deepspeed train.py {option.format(dtype)}\n"
    assert read(tmp_path, command + TRAINER_LINE).dtype == dtype


STREAMS = {
    "HF Trainer": "{{'loss': {0:.2f}, 'grad_norm': 1.1, 'learning_rate': 2e-05, 'epoch': {1:.2f}}}",
    "ms-swift": "{{'loss': {0:.2f}, 'token_acc': 0.5, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': {1:.2f}}}",
    "TRL": "{{'loss': {0:.2f}, 'grad_norm': 0.2, 'learning_rate': 1e-06, 'kl': 0.1, 'epoch': {1:.2f}}}",
}
RUNTIME = "{'train_runtime': 120.6, 'train_samples_per_second': 8.1, 'train_loss': 2.2, 'epoch': 0.6}"


@pytest.mark.parametrize("label", ["", "0: "])
@pytest.mark.parametrize("name", STREAMS)
def test_lines_and_bars_in_the_two_streams_of_a_job_are_one_run(tmp_path: Path, name: str, label: str) -> None:
    lines = [STREAMS[name].format(3 - step / 50, step / 100) for step in range(1, 61)] + [RUNTIME]
    bars = [bar(step, 60).replace(f"{step // 60:02d}:{step % 60:02d}", clock(2 * step)) for step in range(61)]
    for stream, texts in (("out", lines), ("err", bars)):
        (tmp_path / f"train-4811.{stream}").write_text("".join(f"{label}{text}\n" for text in texts))
    [record] = gather_paths([str(tmp_path)], Path("/nowhere")).records
    assert (record.attempts[-1]["last_step"], record.ended) == (60, "done")
    assert record.step_s == pytest.approx(2.01, rel=0.01)
    assert record.loss_last == 1.8


def test_two_jobs_in_a_folder_stay_two_runs(tmp_path: Path) -> None:
    for job, first in ((4811, 3.0), (4812, 5.0)):
        lines = [STREAMS["HF Trainer"].format(first - step / 50, step / 100) for step in range(1, 61)]
        (tmp_path / f"train-{job}.out").write_text("\n".join([*lines, RUNTIME]))
        (tmp_path / f"train-{job}.err").write_text("\n".join(bar(step, 60) for step in range(61)))
    records = gather_paths([str(tmp_path)], Path("/nowhere")).records
    assert sorted((record.loss_first, record.attempts[-1]["last_step"]) for record in records) == [
        (2.98, 60),
        (4.98, 60),
    ]


HEAD = " iteration {0:8d}/    9000 | consumed samples: {1:12d} | elapsed time per iteration "
TAIL = " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
BATCHES = {
    "Megatron-LM": f"{HEAD}(ms): {{3:.1f}} | learning rate: 2.0E-04 | global batch size: {{2:5d}} | lm loss: 3.1E+00 |"
    f" loss scale: 1.0 | grad norm: 1.1 |{TAIL}",
    "Megatron-DeepSpeed": f"{HEAD}(ms): {{3:.1f}} | learning rate: 2.0E-05 | global batch size: {{2:5d}} |"
    f" lm-loss: 1.2E+01 | loss scale: -1.0 | grad norm: 0.000 | num zeros: 0.0 |{TAIL}",
    "BLOOM": f"[default7]:{HEAD}(s): {{4:.3f}} | learning rate: 5.9E-05 | global batch size: {{2:5d}} |"
    f" lm loss: 2.4E+00 | grad norm: 0.174 | num zeros: 0.0 |{TAIL}",
}


def batches(form: str, sizes: dict[int, tuple[int, float]]) -> str:
    """Lines of so many steps with each (batch, milliseconds of a step)."""
    lines, samples = [], 0
    for count, (size, milliseconds) in sizes.items():
        for _ in range(count):
            samples += size
            lines.append(form.format(len(lines) + 1, samples, size, milliseconds, milliseconds / 1e3))
    return "".join(lines)


@pytest.mark.parametrize("form", BATCHES.values(), ids=[*BATCHES])
def test_the_batch_of_most_steps_is_the_runs(tmp_path: Path, form: str) -> None:
    record = read(tmp_path, batches(form, {12: (32, 698.0), 80: (8, 1140.0)}))
    assert (record.global_batch, record.step_s) == (8, pytest.approx(1.14))
    assert any("but most steps consume 8 (consumed_samples / steps, in 80 of 91 lines" in flag for flag in record.flags)
    record = read(tmp_path, batches(form, {30: (8, 400.0), 20: (32, 1600.0)}))
    assert (record.global_batch, record.step_s) == (32, 1.6), "a batch that grew is that of the last steps"


MEANS = "| epoch {0:03d} | loss {1:.3f} | nll_loss 2.521 | ppl 5.74 | wps 34121 | "
FAIRSEQ = {
    "2018": f"{MEANS}ups 9.6 | wpb 3557 | bsz 143 | num_updates {{2}} | lr 0.000493 | gnorm 0.912 | clip 0% | oom 0 |"
    " wall {2} | train_wall 41\n",
    "2019": f"{MEANS}ups 10 | wpb 3557.123 | bsz 143.112 | num_updates {{2}} | lr 0.000493 | gnorm 0.912 | clip 0.000 |"
    " oom 0.000 | wall {2} | train_wall 41\n",
    "with a label": f"0: {MEANS}num_updates {{2}} | lr 0.1\n",
}
FAIRSEQ_VALID = (
    "| epoch {0:03d} | valid on 'valid' subset | valid_loss {1:.4f} | valid_nll_loss 2.4 | valid_ppl 35.78 |"
    " num_updates {2} | best 3.5\n"
)


@pytest.mark.parametrize("form", FAIRSEQ.values(), ids=[*FAIRSEQ])
def test_losses_of_an_epoch_of_fairseq_are_in_nats(tmp_path: Path, form: str) -> None:
    lines = (f.format(epoch, 9 - epoch / 2, 401 * epoch) for epoch in range(1, 9) for f in (form, FAIRSEQ_VALID))
    record = read(tmp_path, "".join(lines))
    assert (record.loss_first, record.loss_last, record.loss_eval) == pytest.approx((5.892, 3.466, 3.466), rel=1e-3)
    assert (record.attempts[-1]["last_step"], record.engine) == (8 * 401, "fairseq")


OWN_BATCHES = {
    "batch in the line": "step {0} | loss 3.1{0:03d} | global_batch_size {2} | step_time {4:.3f}s\n",
    "samples so far": "[train] iter={0} loss=3.1{0:03d} samples_seen={1} dt={3:.1f}ms\n",
    "batch of all ranks": "Step: {0}, Loss: 3.1{0:03d}, Total batch: {2}, {4:.3f} s/step\n",
}


@pytest.mark.parametrize("form", OWN_BATCHES.values(), ids=[*OWN_BATCHES])
@pytest.mark.parametrize("header", ["", "  global_batch_size ............ 32\n"], ids=["", "an argument"])
def test_the_batch_of_most_lines_of_no_known_program(tmp_path: Path, form: str, header: str) -> None:
    record = read(tmp_path, header + batches(form, {20: (32, 698.0), 80: (8, 1140.0)}))
    assert (record.global_batch, record.step_s) == (8, pytest.approx(1.14))
    assert any("another batch size than 8 are set apart" in flag for flag in record.flags)
    same = read(tmp_path, header + batches(form, {90: (32, 698.0)}))
    assert (same.global_batch, same.step_s) == (32, pytest.approx(0.698))
