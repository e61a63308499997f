"""The project's tests. `ALL_TESTS=true`, as `make test-all` sets it, adds what is too long for every change."""

import os

ALL_TESTS = os.environ.get("ALL_TESTS") == "true"
