"""A job's request: what sbatch reads of a script and of its own line."""

from __future__ import annotations

import signal

import pytest

from hpc_gpt.rehearsal.job_request import (
    LimitSignal,
    OptionFault,
    RequestFault,
    compress_counts,
    compress_hosts,
    ignored_options,
    output_path,
    parse_options,
    read_hosts,
    read_request,
    read_time,
)

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
    asked = read_request(SCRIPT, {"nodes": "3", "output": "x"}, "job.sh", 0.0)
    assert (asked.name, asked.nodes, asked.ntasks, asked.ntasks_per_node) == ("a b", 3, 12, 4)
    assert (asked.gpus_per_node, asked.limit_s, asked.requeue, asked.append) == (4, 120, False, True)
    assert asked.signal == LimitSignal(signal.SIGUSR2, 120, False)


@pytest.mark.parametrize(
    "line",
    [{"time": "soon"}, {"nodes": "0"}, {"signal": "USR9"}, {"begin": "tomorrow?"}, {"ntasks": "x"}],
)
def test_what_sbatch_refuses_is_refused(line: dict[str, str]) -> None:
    with pytest.raises(RequestFault):
        read_request(SCRIPT, line, "job.sh", 0.0)


def test_options_stand_in_all_of_getopts_ways() -> None:
    found, left = parse_options("srun", ["-n4", "-N", "2", "-lK1", "--ntasks-per-node=2", "--overl", "bash", "-c", "x"])
    assert found == {"ntasks": "4", "nodes": "2", "label": "", "kill-on-bad-exit": "1", "ntasks-per-node": "2",
                     "overlap": ""}  # fmt: skip
    assert left == ["bash", "-c", "x"]


@pytest.mark.parametrize("words", [["-y"], ["--nosuch"], ["--nodes"], ["-N"], ["--parsable=1"]])
def test_a_word_that_is_no_option_and_an_option_without_its_value_are_refused(words: list[str]) -> None:
    with pytest.raises(OptionFault):
        parse_options("sbatch", words)


def test_a_profiles_own_options_are_accepted_and_those_not_acted_on_are_named() -> None:
    words = ["--error=job.err", "--nice=5", "--hold", "job.sh"]
    options, left = parse_options("sbatch", words)
    assert left == ["job.sh"]
    assert ignored_options("sbatch", options) == ["sbatch --error=job.err", "sbatch --hold"]
    options, left = parse_options("srun", ["--export=ALL", "--mpi", "pmix", "--output=ranks.log", "bash"])
    assert (ignored_options("srun", options), left) == (["srun --output=ranks.log"], ["bash"])


def test_times_are_read_as_the_scripts_write_them() -> None:
    assert read_time("now", 100.0) == 100.0
    assert read_time("now+20", 100.0) == 120.0
    with pytest.raises(RequestFault, match="not known to a rehearsal"):
        read_time("teatime", 100.0)


def test_hosts_are_written_as_one_word_and_back() -> None:
    for hosts in (["n1"], ["n1", "n2", "n4"], ["a", "b3", "b5"], ["n9", "n10", "n11"]):
        assert read_hosts(compress_hosts(hosts)) == hosts
    assert compress_counts([2, 2, 1]) == "2(x2),1"
    with pytest.raises(ValueError, match="Invalid hostlist"):
        read_hosts("n[1-")


def test_an_outputs_name_is_filled_in() -> None:
    assert output_path("%x-%4j.out%%j", {"x": "it", "j": "7"}) == "it-0007.out%j"
