"""Makes the two pictures of README: what `plan` prints on a terminal, and the report page of four runs on this machine.

python -m tests.docs.pictures docs            both; takes some minutes, and Chromium
python -m tests.docs.pictures docs LOGS       the page of the runs in LOGS instead
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.report.page.chromium import PROGRAM
from tests.terminal import on_a_terminal

PLAN = "hpc-gpt plan --model 48b --gpus 64 --cluster jean-zay-v100-32g"
COLUMNS = 122
# Two layouts, two engines, and one whose learning rate ends it.
RUNS = (
    "--tp 2 --pp 2",
    "--tp 1 --pp 1 --engine fsdp --set engine.recompute=full",
    "--tp 1 --pp 1 --engine ddp",
    "--tp 1 --pp 1 --engine ddp --set train.lr=1e9 --set train.max_bad_steps=3",
)
STEPS = "--set train.steps=60 --set train.warmup_steps=10 --set train.eval_every=20 --set train.log_every=1"
SIZE = (1280, 820)


def picture_of_plan() -> str:
    """The answer of PLAN as SVG, without a font or anything else from a network."""
    code, shown = on_a_terminal("-m", "hpc_gpt", *shlex.split(PLAN)[1:], COLUMNS=str(COLUMNS), NO_COLOR="")
    assert code == 0, shown
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), color_system="truecolor")  # noqa: SIM115
    console.print(Text.from_ansi(f"$ {PLAN}\n{shown.partition('next: ')[0].rstrip()}"))
    drawn = console.export_svg(title="hpc-gpt plan", unique_id="plan")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)


def train(logs: str) -> None:
    """RUNS, the last of which fails."""
    environment = {**os.environ, "HPC_GPT_LOGS": logs, "OMP_NUM_THREADS": "1"}
    for options in RUNS:
        words = shlex.split(f"submit demo --cluster local --wait {STEPS} {options}")
        subprocess.run([sys.executable, "-m", "hpc_gpt", *words], env=environment, check=False)


def picture_of_report(path: Path, logs: str = "") -> None:
    """The top of the report page of RUNS, or of the runs in a folder."""
    assert PROGRAM, "no chromium here: apt-get install chromium"
    with tempfile.TemporaryDirectory() as folder:
        if not logs:
            logs = f"{folder}/logs"
            train(logs)
        page = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "hpc_gpt", "report", logs, "--html", page], check=True)
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        own = ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/user")
        words = [PROGRAM, *own, size, f"--screenshot={path.absolute()}", page.as_uri()]
        subprocess.run(words, check=True, capture_output=True)


def main(folder: str, logs: str = "") -> None:
    (Path(folder) / "plan.svg").write_text(picture_of_plan(), encoding="utf-8")
    picture_of_report(Path(folder) / "report.png", logs)


if __name__ == "__main__":
    main(*sys.argv[1:])
