"""Names of tests are short."""

import re

from tests.conftest import REPOSITORY


def test_a_tests_name_has_at_most_sixty_letters():
    files = (path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert [name for text in files for name in re.findall(r"^ *def (test_\w{56,})", text, re.M)] == []
