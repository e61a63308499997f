"""Time limits as sbatch reads them."""

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.experiment import limit_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-12", 216000), ("2-12:30", 217800),
        ("2-12:30:15", 217815), ("0", None), ("UNLIMITED", None), (None, None),
    ],
)  # fmt: skip
def test_every_form_of_sbatch(text, seconds):
    assert limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-5", "1.5", "02:00:00 "])
def test_what_sbatch_does_not_read_is_refused(text):
    with pytest.raises(ConfigError, match=r"job\.time"):
        limit_s(text)
