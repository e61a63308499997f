"""Records which lines of hpc_gpt and templates a process executes, and for which test: a part of `make map`.

Every Python of the environment runs this file at its start while TESTS_MAP names a folder (tests/mutations/map.py
puts a .pth file beside the packages): pytest, commands, ranks, jobs of the cluster, forked workers. coverage does the
work. A process belongs to the test that the folder's file `current` names as it starts. It saves what it has each
second, so that one that is killed loses no more.
"""

import atexit
import contextlib
import os
import threading
import time
import uuid

FOLDER = "TESTS_MAP"
_SAVED_EVERY_S = 1.0


def start(folder: str, forked: bool = False) -> None:
    """Records this process from now on, and each fork of it as a process of its own."""
    import coverage

    if forked:
        coverage.Coverage.current().stop()
    test = ""
    with contextlib.suppress(OSError), open(os.path.join(folder, "current"), encoding="utf-8") as file:
        test = file.read()
    recording = coverage.Coverage(
        data_file=os.path.join(folder, f"lines.{os.getpid()}.{uuid.uuid4().hex[:8]}"),
        include=["**/hpc_gpt/**", "**/templates/**"],
        context=test or None,
        config_file=False,
        messages=False,
    )
    recording.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured", "already-imported"])
    recording.start()

    def save() -> None:
        # What it fails of is a test's: a full disk, an interpreter that ends.
        with contextlib.suppress(Exception):
            recording.get_data().write()

    def keep_saving() -> None:
        while coverage.Coverage.current() is recording:
            time.sleep(_SAVED_EVERY_S)
            save()

    threading.Thread(target=keep_saving, daemon=True).start()
    atexit.register(save)  # before coverage's own end of it
    if forked:
        return
    os.register_at_fork(after_in_child=lambda: start(folder, forked=True))
    leave = os._exit

    def save_and_leave(status: int) -> None:
        _save_current()
        leave(status)

    os._exit = save_and_leave  # type: ignore[assignment]


def _save_current() -> None:
    import coverage

    with contextlib.suppress(Exception):
        coverage.Coverage.current().get_data().write()


if FOLDER in os.environ:
    with contextlib.suppress(Exception):
        start(os.environ[FOLDER])
