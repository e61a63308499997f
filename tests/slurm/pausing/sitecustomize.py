"""Python imports this at its start: what tests need of the ranks of their runs.

PAUSE_AFTER="8 20": attempt 1 stops itself, as SIGSTOP does, after step 8, attempt 2 after step 20. A test that waits
for a step and then stops the ranks may come too late on a busy machine; a rank that stops itself does not. Rank 0 does
it, and the others wait for it. It stops when it is about to write the line of the next step.

CLOCK_AHEAD="3600": the clock of the ranks is so many seconds ahead of that of their job's script, as on a node whose
clock is wrong.

A run without end takes no more than a part of a core: its rank 0 rests before each line that it writes, as whoever
waits for it needs that core.
"""

import json
import os
import re
import signal
import sys
import time

_NAME = re.compile(r"/attempts/(\d+)/metrics\.jsonl$")
_ENDLESS_STEPS = 10**6
_REST_S = 0.2


def _pause(steps, rests, done=[]):  # noqa: B006  (the hook's memory)
    rests = float("inf") if rests else 0  # before so many lines

    def hook(event, arguments):
        nonlocal rests
        if event != "open" or done or not isinstance(arguments[0], (str, os.PathLike)):
            return
        found = _NAME.search(os.fspath(arguments[0]))
        if not found or found[1] != os.environ.get("HPC_GPT_ATTEMPT"):
            return
        if rests:
            rests -= 1
            time.sleep(_REST_S)
        if not 0 < int(found[1]) <= len(steps) or not os.path.exists(found.string):
            return
        done.append("looks")  # opening the file is such an event itself
        with open(found.string, encoding="utf-8") as file:
            lines = file.read().splitlines()
        paused = lines and json.loads(lines[-1])["step"] >= steps[int(found[1]) - 1]
        done.clear()
        if paused:
            steps[int(found[1]) - 1] = float("inf")
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(_REST_S)  # what came meanwhile, a signal or a request, is heard by another thread
            rests = max(rests, 5)

    sys.addaudithook(hook)


def _is_endless():
    try:
        with open(os.path.join(os.environ["HPC_GPT_RUN"], "resolved.json"), encoding="utf-8") as file:
            return json.load(file)["train"]["steps"] >= _ENDLESS_STEPS
    except (KeyError, OSError, ValueError):
        return False


if sys.orig_argv[1:3] == ["-m", "hpc_gpt.trainer"]:
    _ahead_s, _time = float(os.environ.get("CLOCK_AHEAD") or 0), time.time
    if _ahead_s:
        time.time = lambda: _time() + _ahead_s
    _pause([int(step) for step in os.environ.get("PAUSE_AFTER", "").split()], _is_endless())
