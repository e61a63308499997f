"""One browser for all pages."""

import pytest

from tests.report.page.chromium import PROGRAM, Chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if PROGRAM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    found = Chromium(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
