"""A verb that looks means the newest run if it is given none; one that acts wants a name (refused/names.txt)."""

import pytest

from tests.cli.command import in_process
from tests.made_runs import unsubmitted_run


@pytest.mark.parametrize("verb", [("why",), ("verify",), ("logs", "--path")])
def test_a_verb_that_looks_takes_the_newest_run(verb):
    unsubmitted_run()
    newest = unsubmitted_run()
    newest.new_attempt().log.write_text("step 1\n")
    done, named = in_process(*verb), in_process(*verb, newest.run_id)
    assert done.stderr.splitlines()[0] == f"the newest run, {newest.run_id} of demo:"
    assert (done.code, done.stdout) == (named.code, named.stdout)
    assert done.stdout


def test_a_logs_folder_that_is_not_there_is_said(tmp_path):
    gone = {"HPC_GPT_LOGS": str(tmp_path / "gone")}
    for verb in ("status", "report", "why"):
        words = f"no runs under {tmp_path / 'gone'}, the folder of HPC_GPT_LOGS, which is not there"
        assert words in in_process(verb, environment=gone).stderr, verb
