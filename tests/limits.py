"""Limits of this process, for the time of a test."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lower_limit(kind: int, limit: int) -> Iterator[None]:
    """The soft limit of a resource, as `resource` numbers it."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def open_files_left(count: int) -> Iterator[None]:
    """This process can open so many files more."""
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    with lower_limit(resource.RLIMIT_NOFILE, lowest + count):
        yield
