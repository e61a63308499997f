"""Makes the pictures of README and docs/reports.md: what `plan` prints on a terminal, and two report pages.

python -m tests.docs.pictures docs            all; takes some minutes, and Chromium
python -m tests.docs.pictures docs LOGS       the curves of the runs in LOGS instead of those trained here
"""

import html
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_gpt.reader.runs.figures import add_figures
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.page import write_page
from hpc_gpt.report.published_tables import sweep_lines
from tests.report.page.chromium import Chromium
from tests.terminal import on_a_terminal

SIZE = WIDTH, HEIGHT = (1280, 640)
PLAN = "hpc-gpt plan --model 48b --gpus 64 --cluster jean-zay-v100-32g"
COLUMNS = 122
MARGIN = 14
_CODE, _SPLIT = re.compile(r"\x1b\[(\d*)m"), r"(\x1b\[\d*m)"
FOREGROUND = "#c5c8c6"
# {code of a style on a terminal: how SVG shows it}
STYLES = {
    1: ' font-weight="bold"', 31: ' fill="#cc555a"', 32: ' fill="#98a84b"', 33: ' fill="#d0b344"',
    34: ' fill="#608ab1"', 35: ' fill="#98729f"', 36: ' fill="#68a0b3"', 91: ' fill="#ff4e5a"',
    94: ' fill="#7da6d6"', 95: ' fill="#c397d8"',
}  # fmt: skip
ROWS = 10  # those that fit, and some that do not
# The sweep of the report's picture: the step times, memory and ends that its source has published.
PUBLISHED, DEVICE = "mingpt-fsdp", "v100-16g"
# The sweep of the curves' picture, trained on this machine.
TRAINED = (
    "submit demo --cluster local --wait --grid train.lr=3e-4,1e-3,3e-3,1e-2,3e-2 --gpus 1 --tp 1 --pp 1 --engine ddp "
    "--set layout.micro_batches=2 --set train.steps=150 --set train.warmup_steps=10 --set train.eval_every=25 "
    "--set train.log_every=1"
)


def picture_of_plan() -> str:
    """The answer of PLAN as SVG in the terminal's colours, without a font or anything else from a network."""
    code, shown = on_a_terminal("-m", "hpc_gpt", *shlex.split(PLAN)[1:], COLUMNS=str(COLUMNS), NO_COLOR="")
    assert code == 0, shown
    lines, rows = [f"$ {PLAN}"], 0
    for line in shown.replace("\r", "").rstrip().split("\n"):
        plain = _CODE.sub("", line)
        rows += re.match(r"tp\d+-pp\d+-dp\d+ ", plain) is not None
        if rows > ROWS or (rows and not plain.strip()):
            break
        lines += _wrapped(line)
    size = (WIDTH - 2 * MARGIN) / (0.6 * COLUMNS)  # a character of a monospaced font is 0.6 of its size wide
    step = min(1.3 * size, (HEIGHT - 2 * MARGIN) / len(lines))
    drawn = "".join(
        f'<text xml:space="preserve" x="{MARGIN}" y="{MARGIN + step * (number + 0.75):.1f}">{_spans(line)}</text>\n'
        for number, line in enumerate(lines)
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" xmlns="http://www.w3.org/2000/svg" role="img">\n'
        "<title>hpc-gpt plan</title>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#292929"/>\n'
        f'<g font-family="Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="{size:.2f}" fill="{FOREGROUND}">\n'
        f"{drawn}</g>\n</svg>\n"
    )


def _wrapped(line: str) -> list[str]:
    """The line as a terminal of COLUMNS shows it, with the codes of its styles."""
    lines, count = [""], 0
    for part in re.split(_SPLIT, line):
        if _CODE.fullmatch(part):
            lines[-1] += part
            continue
        for letter in part:
            if count == COLUMNS:
                lines.append("")
                count = 0
            lines[-1] += letter
            count += 1
    return lines


def _spans(line: str) -> str:
    """A line's text in SVG, a part of one style in a span of its own that says where it begins."""
    spans, style, column = "", "", 0
    for part in re.split(_SPLIT, line):
        if code := _CODE.fullmatch(part):
            style = STYLES.get(int(code[1] or 0), "")
        elif part:
            at = f' x="{MARGIN + column * (WIDTH - 2 * MARGIN) / COLUMNS:.1f}"' if column else ""
            text = html.escape(part, quote=False)
            spans += f"<tspan{at}{style}>{text}</tspan>" if style or at else text
            column += len(part)
    return spans


def published_runs() -> list[RunRead]:
    """The rows of PUBLISHED with the figures of their source; what follows from them is computed as for any run."""
    lines = sweep_lines(PUBLISHED, [])
    runs = []
    for line in lines.lines:
        published: dict[str, Any] = dict(line.row.published)
        row, asked = line.row.name, line.figures
        ran = "step_ms" in published
        engine = {"recompute": asked.recompute, "prefetch": bool(line.row.overrides.get("engine", {}).get("prefetch"))}
        record = replace(
            asked, name=PUBLISHED, run=row, engine="fsdp", device=DEVICE, ended="done" if ran else "gpu_memory",
            step_s=published["step_ms"] / 1000 if ran else None,
            memory_reserved_gib=[published["memory_mb"] / 1024] if ran else None,
            settings={**asked.settings, "engine": engine, "sweep": {"name": PUBLISHED, "row": row}},
            sources={"step_s": "published", "memory_reserved_gib": "published", "device": "published"},
        )  # fmt: skip
        runs.append(RunRead(add_figures(record), files=[Path("experiments") / PUBLISHED / "sweep.toml"]))
    return runs


def first_screen(page: Path, picture: Path) -> None:
    """What a window of SIZE shows of a page, drawn a little smaller than on a screen."""
    scale = 0.85
    with tempfile.TemporaryDirectory() as profile:
        browser = Chromium(Path(profile))
        browser.open(page, width=round(WIDTH / scale), height=round(HEIGHT / scale), scale=scale)
        browser.screenshot(picture, whole=False)
        browser.close()


def main(folder: str, logs: str = "") -> None:
    (Path(folder) / "plan.svg").write_text(picture_of_plan(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        page = Path(place) / "report.html"
        write_page(page, published_runs())
        first_screen(page, Path(folder) / "report.png")
        if not logs:
            logs = f"{place}/{TRAINED.split()[1]}"
            environment = {**os.environ, "HPC_GPT_LOGS": logs, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, "-m", "hpc_gpt", *TRAINED.split()], env=environment, check=True)
        subprocess.run([sys.executable, "-m", "hpc_gpt", "report", logs, "--html", page], check=True)
        first_screen(page, Path(folder) / "curves.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
