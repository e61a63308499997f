"""The page of runs as they are read: the three real logs, and runs of our own with restarts, skips and NaN."""

import re

from hpc_gpt.report.gather import gather_paths
from hpc_gpt.report.page import build_page
from hpc_gpt.report.table_notes import ABSURD


def test_the_three_real_logs(shared, tmp_path):
    gathered = gather_paths([str(shared / "logs")], tmp_path)
    page = build_page(gathered.runs, gathered.notes)
    assert page.count('<tr><th scope="row"><a href="#run-') == 3
    assert "tp4-pp16-dp1" in page
    assert re.search(r'<span class="words">every step was skipped by an fp16 overflow', page)
    first = page.index("every step was skipped")
    assert first < page.index("step_s rests on 2 steps"), "what cannot be right stands before what is worth a look"
    assert page.count('role="img"') >= 1
    assert str(shared) not in page
    assert "meg_gpt2_perf_n16.out:" in page


def test_a_step_time_off_by_a_hundred_tops_the_anomalies(tmp_path):
    """Milliseconds that the lines' own times of day contradict: a minute a step."""
    lines = [
        f"2024-03-05 10:{step:02d}:00 step: {step} loss: {5 - step / 100:.4f} step_time: 410 ms"
        for step in range(1, 30)
    ]
    (tmp_path / "a.log").write_text("\n".join([*lines, "RuntimeError: size mismatch"]))
    page = build_page(gather_paths([str(tmp_path)], tmp_path).runs)
    anomalies = page[page.index('<section id="anomalies"') :]
    assert re.search(r'<li class="level-(\d)">', anomalies)[1] == str(ABSURD)
    assert "the program prints 0.410 s per step, but the lines&#39; times of day give 60.0 s: left out" in anomalies
    assert page.index('<section id="failures"') < page.index('<section id="anomalies"')
