"""Every verb that prints tables or sentences, on terminals of several widths: no line is wider than it need be, no word
is lost, and what a program printed stays as it is."""

import itertools
import json
import os
import re
from pathlib import Path

import pytest

from tests.made_runs import make_run, with_attempt
from tests.terminal import on_a_terminal

WIDTHS = (60, 120)
# Each command as in a pipe and then at each width, with a line before it: one process for all.
PROGRAM = """
import contextlib, io, json, os, sys
from hpc_gpt.cli import main
for columns in (0, *json.loads(sys.argv[1])):
    os.environ["COLUMNS"] = str(columns)
    for words in json.loads(sys.argv[2]):
        print(f"=== {columns}", flush=True)
        piped = io.TextIOWrapper(io.BytesIO(), write_through=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(SystemExit))
            if not columns:
                stack.enter_context(contextlib.redirect_stdout(piped))
                stack.enter_context(contextlib.redirect_stderr(piped))
            main(words)
        print(piped.buffer.getvalue().decode(), end="", flush=True)
"""
CAUSE = (
    "rank 3 waited for rank 1 in all_reduce of the gradients for 600 s, which is the limit of train.hang_floor_s, and "
    "nobody answered"
)
LOGGED = "RuntimeError: " + "the program's own line stays whole, " * 3 + "to its end"
TABLES = (
    "status",
    "status --sizes",
    "report",
    "report gpt2-meg",
    "plan --model 48b --gpus 64 --cluster jean-zay-v100-32g",
)
SENTENCES = (
    "why FAILED",
    "compare GOOD FAILED",
    "doctor demo --cluster local",
    "doctor gpt2-meg-ds-3d --row 48b --cluster jean-zay-v100-32g",
    "submit demo --cluster local --dry-run",
    "submit gpt2-meg-ds-3d --row 48b --cluster jean-zay-v100-32g --dry-run",
    "plan --model 48b --gpus 64 --cluster jean-zay-v100-32g --why tp4-pp16-dp1",
    "clean GOOD FAILED",
    "logs GOOD --attempt 7",
    "render demo --gpus 16 --tp 4 --pp 8 --dp 1",
    "render demo --set train.lrr=1 --set model.hiden=3",
    "profile list",
)
ASKS = "submit --cluster jean-zay-v100-32g"
# Commands to be pasted, a script, and what a program printed are not ours to break.
FIGURE = re.compile(r"\d[\d.,]*")  # the room on a disk changes
WHOLE = re.compile(r"next: |with them: |hint: hpc-gpt |[> ] *\d+ \||RuntimeError: ")


@pytest.fixture
def verbs():
    """{verb: its words}, of a run that ended well and one that did not."""
    logs = Path(os.environ["HPC_GPT_LOGS"])
    good = with_attempt(make_run(logs), 20)
    failed = with_attempt(make_run(logs, train__lr=2e-3), 30, "error", cause=CAUSE)
    (failed.path / "attempts" / "1" / "log").write_text(f"step 1\n{LOGGED}\n")
    ids = {"GOOD": good.run_id, "FAILED": failed.run_id}
    return {verb: [ids.get(word, word) for word in verb.split()] for verb in (*TABLES, *SENTENCES, ASKS)}


@pytest.fixture
def answers(verbs):
    """{(columns, verb): what it prints}; 0 columns are a pipe."""
    words = ("-c", PROGRAM, json.dumps(WIDTHS), json.dumps(list(verbs.values())))
    code, shown = on_a_terminal(*words, type_in="n\n" * len(WIDTHS), after="queue it?", NO_COLOR="1")
    assert code == 0, shown
    texts = [part.partition("\n")[2] for part in re.split(r"^=== ", shown, flags=re.MULTILINE)[1:]]
    return dict(zip(itertools.product((0, *WIDTHS), verbs), texts, strict=True))


def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(verbs, answers):
    for (columns, verb), text in answers.items():
        for line in text.splitlines() if columns else ():
            breaks = re.search(r"\S\s+\S", line[:columns]) is not None
            assert len(line) <= columns or WHOLE.match(line) or not breaks, f"{columns}, {verb}: {line}"
        if verb in SENTENCES:
            assert FIGURE.sub("#", text).split() == FIGURE.sub("#", answers[0, verb]).split(), f"{columns}, {verb}"
    for columns in WIDTHS:
        assert LOGGED in answers[columns, "why FAILED"], "a program's line is not broken"
        assert CAUSE in " ".join(answers[columns, "status"].split())
        for run, verb in itertools.product(verbs["clean GOOD FAILED"][1:], ("status", "report")):
            assert run in answers[columns, verb]
    shown = " ".join(answers[60, "report"].split())
    assert all(each in shown for each in ("Run", "Layout", "Size", "Step s", "TFLOP/s (model)", "Ended"))
