"""Which run a verb means if it is given none: the newest for verbs that look, none for those that act."""

import pytest

from tests.cli.command import error_of, in_process
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


@pytest.mark.parametrize("verb", ["why", "verify", "logs"])
def test_without_runs_there_is_no_newest(verb):
    done = in_process(verb)
    assert done.code == 5
    assert error_of(done)[0].startswith("no run in ")


@pytest.mark.parametrize("verb", ["cancel", "stop", "save", "requeue", "export"])
def test_a_verb_that_acts_wants_a_name(verb):
    unsubmitted_run()
    done = in_process(verb)
    assert done.code == 2
    assert "Missing argument" in done.stderr
