"""The probe command: what it gives stands, what it cannot give ends the probe with its words."""

import pytest

from hpc_gpt.train.preflight.device_probes import ProbeFailed, figures_of_command


def test_a_command_gives_figures_or_none():
    assert figures_of_command(None) == {}
    assert figures_of_command("") == {}
    assert figures_of_command("true") == {}
    assert figures_of_command("""echo '{"matmul_tflops": 90.5}'""") == {"matmul_tflops": 90.5}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo first >&2; echo 'Xid 79' >&2; exit 3", "the probe command failed: Xid 79"),
        ("exit 3", "the probe command failed: exit 3"),
        ("echo nonsense", "prints no JSON"),
        ("echo '[1]'", "prints no object"),
        ("""echo '{"error": "row remapping failed"}'""", "row remapping failed"),
    ],
)
def test_a_command_that_fails_fails_the_probe(command, words):
    with pytest.raises(ProbeFailed, match=words):
        figures_of_command(command)
