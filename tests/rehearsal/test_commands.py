"""What the stand-ins read of a command line: options, times, signals; and where a step's ranks are."""

import time

import pytest

from hpc_gpt.launcher.rehearsal.commands import RequestFault, ignored_options, parse_options, read_time
from hpc_gpt.launcher.rehearsal.controller import signal_number

SCRIPT = """#SBATCH --job-name='a b' --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:v100:4
#SBATCH --time=1:30
#SBATCH --no-requeue --open-mode=append
true
#SBATCH --nodes=9
"""


def test_the_line_goes_over_directives_up_to_the_first_command(slurm, commands):
    job_id = commands.submit("job", SCRIPT, "--nodes=3")
    asked = slurm.jobs()[int(job_id)]
    assert (asked.options["job-name"], asked.options["open-mode"]) == ("a b", "append")
    assert (asked.sizes.nodes, asked.sizes.tasks, asked.per_node, asked.sizes.gpus) == (3, 12, 4, 4)
    assert (asked.limit_s, asked.requeues) == (120, False)
    assert signal_number("SIGUSR2") == signal_number("usr2") == signal_number("12") == 12


def test_a_profiles_options_are_accepted_and_idle_ones_named() -> None:
    words = ["--error=job.err", "--nice=5", "--hold", "job.sh"]
    options, left = parse_options("sbatch", words)
    assert left == ["job.sh"]
    assert ignored_options("sbatch", options) == dict.fromkeys(["sbatch --error=job.err", "sbatch --hold"])
    assert not ignored_options("sbatch", {"error": "both", "output": "both"})
    options, left = parse_options("srun", ["--export=ALL", "--mpi", "pmix", "--output=ranks.log", "-lK1", "bash"])
    assert (ignored_options("srun", options), left) == ({"srun --output=ranks.log": None}, ["bash"])
    with pytest.raises(RequestFault, match="not known to a rehearsal"):
        parse_options("sbatch", ["--nosuch"])


def test_times_are_read_as_the_scripts_write_them() -> None:
    assert read_time("sbatch", "now+20") - read_time("sbatch", "now") == pytest.approx(20, abs=5)
    assert read_time("sbatch", "now") == pytest.approx(time.time(), abs=5)
    with pytest.raises(RequestFault, match="not known to a rehearsal"):
        read_time("sbatch", "teatime")
