"""Makes the two pictures of README: what `plan` prints on a terminal, and a page of three runs on this machine.

python -m tests.docs.pictures docs            both; takes some minutes, and Chromium
python -m tests.docs.pictures docs LOGS       the page of the runs in LOGS instead
"""

import os
import re
import shlex
import signal
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
ROWS = 6
# (words of a line, its colour): the words say the same without it.
_STYLES = (("tight: ", "yellow"), ("does not fit", "red"), ("best", "green"))
# Two layouts, the second stopped and resumed, and one whose learning rate ends it.
RUNS = (
    "--tp 2 --pp 2",
    "--tp 1 --pp 1 --engine ddp",
    "--tp 1 --pp 1 --engine ddp --set train.lr=1e9 --set train.max_bad_steps=3",
)
RESUMED = 1
STEPS = "--set train.steps=60 --set train.warmup_steps=10 --set train.eval_every=20 --set train.log_every=1"
SIZE = (1280, 640)


def picture_of_plan() -> str:
    """The answer of PLAN as SVG, its ROWS best rows in colour, without a font or anything else from a network."""
    code, shown = on_a_terminal("-m", "hpc_gpt", *shlex.split(PLAN)[1:], COLUMNS=str(COLUMNS), NO_COLOR="")
    assert code == 0, shown
    kept, rows = [f"$ {PLAN}\n"], 0
    for line in Text.from_ansi(shown.rstrip()).plain.split("\n"):
        rows += re.match(r"tp\d+-pp\d+-dp\d+ ", line) is not None
        if rows > ROWS:
            break
        if rows and not line.startswith("tp"):  # a row has two lines
            kept[-1] += f"{line}\n"
        else:
            kept.append(f"{line}\n")
    styled = [(row, next((style for words, style in _STYLES if words in row), "")) for row in kept]
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), color_system="truecolor")  # noqa: SIM115
    console.print(Text.assemble(*styled))
    drawn = console.export_svg(title="hpc-gpt plan", unique_id="plan")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)


def train(logs: str) -> None:
    """RUNS: one is stopped by Ctrl-C after 25 steps and resumed, and the last fails."""
    environment = {**os.environ, "HPC_GPT_LOGS": logs, "OMP_NUM_THREADS": "1"}
    for place, options in enumerate(RUNS):
        words = [sys.executable, "-m", "hpc_gpt", *shlex.split(f"submit demo --cluster local --wait {STEPS} {options}")]
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run:
            assert run.stdout is not None
            for line in run.stdout:
                if place == RESUMED and "step 25/" in line:
                    run.send_signal(signal.SIGINT)
        if place == RESUMED:
            newest = max(Path(logs).glob("*/*"), key=lambda folder: folder.name)
            words = [sys.executable, "-m", "hpc_gpt", "submit", "--resume", str(newest), "--wait"]
            subprocess.run(words, env=environment, check=True)


def picture_of_report(path: Path, logs: str = "") -> None:
    """The first screen of the report page of RUNS, or of the runs in a folder."""
    assert PROGRAM, "no chromium here: apt-get install chromium"
    with tempfile.TemporaryDirectory() as folder:
        if not logs:
            logs = f"{folder}/logs"
            train(logs)
        page = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "hpc_gpt", "report", logs, "--html", page], check=True)
        scale = 0.75
        size = f"--window-size={SIZE[0] / scale:.0f},{SIZE[1] / scale:.0f}"
        own = ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/user")
        words = [PROGRAM, *own, f"--force-device-scale-factor={scale}", size, f"--screenshot={path.absolute()}"]
        subprocess.run([*words, page.as_uri()], check=True, capture_output=True)


def main(folder: str, logs: str = "") -> None:
    (Path(folder) / "plan.svg").write_text(picture_of_plan(), encoding="utf-8")
    picture_of_report(Path(folder) / "report.png", logs)


if __name__ == "__main__":
    main(*sys.argv[1:])
