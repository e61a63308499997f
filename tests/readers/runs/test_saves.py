"""What a save cost, where the program has a timer of it alone."""

import pytest

from hpc_gpt.reader.report.gather import gather_paths


def test_from_megatrons_timer(tmp_path) -> None:
    step = " iteration {:8d}/    1000 | elapsed time per iteration (ms): 100.0 | lm loss: 3.2E+00 | loss scale: 1.0 |\n"
    log = tmp_path / "run.log"
    log.write_text(
        "".join(step.format(number) for number in range(1, 5))
        + "  successfully saved checkpoint at iteration       4 to /ckpt\n"
        + "time (ms) | save-checkpoint: 12000.00\n"
        + step.format(5)
        + "    save-checkpoint ................................: (13000.00, 14000.00)\n"
    )
    (run,) = gather_paths([log], tmp_path / "logs").runs
    assert run.record.save_s == pytest.approx(13)
    assert run.record.sources["save_s"] == "inferred: mean of 2 timers save-checkpoint"
