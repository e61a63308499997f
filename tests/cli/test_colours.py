"""Colours and signs of life are for terminals that want them, and say nothing that the text does not."""

import json
import os
import re
from pathlib import Path

from tests.cli.command import in_process
from tests.made_runs import make_run, with_attempt
from tests.terminal import on_a_terminal

# The commands one after the other under each set of variables, with a line before each.
PROGRAM = """
import json, os, sys
from hpc_gpt.cli import main
for variables in ({}, {"NO_COLOR": "1"}, {"TERM": "dumb", "NO_COLOR": ""}):
    os.environ.update(variables)
    for words in json.loads(sys.argv[1]):
        print("===", flush=True)
        try:
            main(words)
        except SystemExit:
            pass
"""
PLAN = ("plan", "--model", "48b", "--gpus", "64", "--cluster", "jean-zay-v100-32g", "--engine", "deepspeed-3d")
CODE = re.compile(r"\x1b\[\d*m")
# Work shows life from its first moment.
AT_ONCE = "import sys; from hpc_gpt.core import terminal; terminal._LIFE_AFTER_S = 0.0; from hpc_gpt.cli import main; "


def test_colours_are_for_few_things_and_never_the_only_sign():
    logs = Path(os.environ["HPC_GPT_LOGS"])
    for ended in ("done", "nan", "walltime"):
        with_attempt(make_run(logs), 20, ended)
    commands = [["status"], ["report"], [*PLAN], ["render", "demo", "--set", "train.lrr=1"]]
    commands += [["doctor", "--cluster", "jean-zay-v100-32g"]]
    code, shown = on_a_terminal("-c", PROGRAM, json.dumps(commands), COLUMNS="120", NO_COLOR="")
    assert code == 0, shown
    parts = shown.split("===\n")[1:]
    coloured, plain, dumb = (parts[place : place + len(commands)] for place in range(0, len(parts), len(commands)))
    for text in coloured[:2]:
        for colour, ended in ((32, "done"), (31, "nan"), (33, "walltime")):
            assert re.search(rf"\x1b\[{colour}m{ended} *\x1b\[0m", text), text
    for painted in ("\x1b[32mtp4-pp16-dp1", "\x1b[33mtp", "\x1b[31mtp", "\x1b[31mb\x1b[0m bubble"):
        assert painted in coloured[2]
    assert "\x1b[31mError: \x1b[0m" in coloured[3]
    assert "\x1b[36mhint: \x1b[0m" in coloured[3]
    assert "\x1b[31mfail\x1b[0m" in coloured[4]
    for one, two, three in list(zip(coloured, plain, dumb, strict=True))[1:4]:  # ages change, and room on a disk
        assert "\x1b" not in two + three
        assert [line.rstrip() for line in CODE.sub("", one).splitlines()] == two.splitlines() == three.splitlines()


def test_no_colour_in_a_pipe_and_with_the_option():
    words = ("plan", "--model", "gpt2", "--gpus", "8", "--cluster", "a100-80g-8", "--engine", "ddp")
    assert "\x1b" not in in_process(*words, environment={"NO_COLOR": "", "TERM": "xterm"}).stdout
    assert "\x1b" not in on_a_terminal("-m", "hpc_gpt", *words, "--no-color", NO_COLOR="")[1]


# Standard input is a pipe, which gets a log when a key is pressed.
LATER = """
import os, threading
terminal_in, (end, begin) = os.dup(0), os.pipe()
os.dup2(end, 0)
def give():
    os.read(terminal_in, 1)
    os.write(begin, b"torch.OutOfMemoryError: CUDA out of memory\\n")
    os.close(begin)
threading.Thread(target=give, daemon=True).start()
"""


def test_reading_shows_life_until_it_ends():
    """The log comes once the line was seen, which is gone at the end."""
    _, shown = on_a_terminal("-c", f"{LATER}\n{AT_ONCE} main(['why', '-'])", type_in="\n", after=" s: -", COLUMNS="80")
    assert "\r\x1b[Kreading, 0 s: -" in shown
    *_, last = shown.split("\r\x1b[K")
    assert "gpu_memory" in last
    assert "reading" not in last


def test_data_and_the_search_for_a_model_show_life(tmp_path):
    (tmp_path / "corpus.txt").write_text("a line of text\n" * 1000)
    for words, line in (
        (["data", str(tmp_path / "corpus.txt"), "-o", str(tmp_path / "x.tokens")], "\r\x1b[Kmaking "),
        (["plan", "--max-model", "--gpus", "4", "--engine", "ddp", "--device", "h200"], "\r\x1b[Ksearching, "),
    ):
        code, shown = on_a_terminal("-c", f"{AT_ONCE} main({words!r})", COLUMNS="80")
        assert code == 0, shown
        assert line in shown
        assert line[4:] not in shown.rpartition("\r\x1b[K")[2]
    assert "searching" not in in_process(*words).stderr
