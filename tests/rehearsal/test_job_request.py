"""A job's request: what sbatch reads of a script and of its own line."""

import pytest

from hpc_gpt.rehearsal.job_request import (
    RequestFault,
    ignored_options,
    parse_options,
    read_request,
    read_time,
    signal_number,
)
from hpc_gpt.slurm.sbatch_words import LimitSignal

SCRIPT = """#!/bin/bash
#SBATCH --job-name='a b' --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:v100:4
#SBATCH --time=1:30
#SBATCH --signal=USR2@120
#SBATCH --no-requeue --open-mode=append
true
#SBATCH --nodes=9
"""


def test_the_line_lies_over_the_directives_which_end_at_the_first_command() -> None:
    asked = read_request(SCRIPT, {"nodes": "3", "output": "x"}, "job.sh")
    assert (asked.name, asked.nodes, asked.ntasks, asked.ntasks_per_node) == ("a b", 3, 12, 4)
    assert (asked.gpus_per_node, asked.limit_s, asked.requeue, asked.append) == (4, 120, False, True)
    assert asked.signal == LimitSignal("USR2", 120, False)
    assert signal_number("SIGUSR2") == signal_number("usr2") == signal_number("12") == 12


def test_a_profiles_own_options_are_accepted_and_those_not_acted_on_are_named() -> None:
    words = ["--error=job.err", "--nice=5", "--hold", "job.sh"]
    options, left = parse_options("sbatch", words)
    assert left == ["job.sh"]
    assert ignored_options("sbatch", options) == ["sbatch --error=job.err", "sbatch --hold"]
    assert not ignored_options("sbatch", {"error": "both", "output": "both"})
    options, left = parse_options("srun", ["--export=ALL", "--mpi", "pmix", "--output=ranks.log", "-lK1", "bash"])
    assert (ignored_options("srun", options), left) == (["srun --output=ranks.log"], ["bash"])
    with pytest.raises(RequestFault, match="not known to a rehearsal"):
        parse_options("sbatch", ["--nosuch"])


def test_times_are_read_as_the_scripts_write_them() -> None:
    assert read_time("now", 100.0) == 100.0
    assert read_time("now+20", 100.0) == 120.0
    with pytest.raises(RequestFault, match="not known to a rehearsal"):
        read_time("teatime", 100.0)
