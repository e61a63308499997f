"""The lock under which a node builds a kernel of DeepSpeed. It does not outlive its process.

torch's lock is a file that its maker removes. A job that is killed while it builds leaves the file, and every later run
of that user waits for it without end (pytorch/pytorch issue 189245).
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path

# Age in seconds at which a lock of torch's counts as left over: several times the build on a loaded node.
LEFT_OVER_S = 1800.0


class BuildLock:
    """Replaces `torch.utils.file_baton.FileBaton`, and excludes processes that hold torch's lock, too.

    Its file has one line and is locked by `flock`, which ends with the process. On a file system without `flock` the
    file is empty like torch's, and only its age shows that it is left over.
    """

    def __init__(self, lock_file_path: str, wait_seconds: float = 0.1) -> None:
        self._path, self._wait_s = Path(lock_file_path), wait_seconds
        self._file = -1

    def try_acquire(self) -> bool:
        """Waits for the lock and takes it. So a build that failed in another process is tried again, not loaded."""
        while True:
            try:
                self._file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
                break
            except FileExistsError:
                self._remove_left_over()
                time.sleep(self._wait_s)
        with contextlib.suppress(OSError):
            # A waiting process may have the new file's lock for a moment, while it checks whether the file is left
            # over.
            fcntl.flock(self._file, fcntl.LOCK_EX)
            os.write(self._file, b"locked by flock\n")
        return True

    def wait(self) -> None:
        """Does nothing: `try_acquire` has waited."""

    def release(self) -> None:
        """Removes the file while it is locked."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _remove_left_over(self) -> None:
        """Removes a file that is left over: only while holding its `flock`, and only if it still has its name."""
        with contextlib.suppress(OSError), open(self._path, "r+b", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:
                pass  # no flock here
            status = os.fstat(file.fileno())
            if status.st_nlink and (file.read(1) or time.time() - status.st_mtime > LEFT_OVER_S):
                self._path.unlink()
