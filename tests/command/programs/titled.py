"""loop.sh's steps by a program that overwrites its environment, as setproctitle does, with a worker in another session.

It notes in `beside` that another copy lives, or its worker. If the last step has no line, as LOG_EVERY does not divide
STEPS, it ends with an evaluation: it is silent until there is a file `evaluated`.
"""

import ctypes
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

steps, log_every, save_every = (int(os.environ[name]) for name in ("STEPS", "LOG_EVERY", "SAVE_EVERY"))
step_s = float(os.environ["STEP_S"])
begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
ctypes.memset(begin, 0, end - begin)
alone = os.open("alone", os.O_CREAT | os.O_WRONLY)
try:
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    with open("beside", "a") as beside:
        beside.write(f"a copy lived as process {os.getpid()} began\n")
if os.fork() == 0:
    os.setsid()
    time.sleep(3000)
    sys.exit()

asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
step = int(Path(sys.argv[1], "step").read_text()) if sys.argv[1:] else 0
while step < steps:
    time.sleep(step_s)
    step += 1
    if step % log_every == 0:
        print(f"step {step}/{steps} loss {4 / step:.6g}", flush=True)
    if step % save_every == 0 or asked:
        checkpoint = Path(f"out/ckpt-{step}")
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "step").write_text(f"{step}\n")
        (checkpoint / ".done").touch()
    if asked:
        sys.exit(3)
while steps % log_every and not os.path.exists("evaluated"):
    time.sleep(0.2)
