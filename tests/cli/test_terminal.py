"""On a real terminal: cancel asks, status --watch refreshes in place; off it they do neither."""

import pytest

from hpc_gpt.core import terminal
from tests.cli.command import in_process
from tests.terminal import on_a_terminal
from tests.waiting import LIMIT_S


def test_cancel_asks_and_no_means_no(made_run, waiting_process):
    code, shown = on_a_terminal("-m", "hpc_gpt", "cancel", made_run.run_id, type_in="n\n", after="cancel? [y/N]")
    assert code == 1
    assert "cancel: nothing was done" in shown
    assert made_run.run_id in shown
    assert waiting_process.poll() is None
    assert not list(made_run.path.glob("cancelled.*"))


def test_cancel_asks_and_yes_means_yes(made_run, waiting_process):
    code, shown = on_a_terminal("-m", "hpc_gpt", "cancel", made_run.run_id, type_in="y\n", after="cancel? [y/N]")
    assert code == 0
    assert f"cancelled {made_run.run_id}" in shown
    assert waiting_process.wait(LIMIT_S) == -15
    assert made_run.cancelled_mark(str(waiting_process.pid)).exists()


def test_watch_refreshes_in_place_until_ctrl_c(made_run, waiting_process):
    words = ("-m", "hpc_gpt", "status", "--watch", "--interval", "0.2")
    code, shown = on_a_terminal(*words, type_in="\x03", after="experiment", times=2)
    assert code == 130
    assert "running" in shown
    assert "\x1b[J" in shown


def test_a_command_that_never_shows_the_words_fails_its_test():
    with pytest.raises(pytest.fail.Exception, match=r"ended with 0 and had not shown 'cancel\?' 1 times, but:\nbye"):
        on_a_terminal("-c", "print('bye')", type_in="y\n", after="cancel?")


def test_watch_ends_when_nothing_runs(made_run):
    done = in_process("status", "--watch", code=0)
    assert made_run.run_id in done.stdout
    assert "\x1b" not in done.stdout


def test_a_screen_is_drawn_over_itself_however_long_its_lines(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "width", lambda: 80)
    screen = terminal.Screen()
    screen.show("x" * 95 + "\n\n" + "y" * 80)
    screen.show("short")
    screen.show("")
    shown = capsys.readouterr().out
    assert [part.partition("F")[0] for part in shown.split("\x1b[")[1:] if "F" in part] == ["4", "1"]


def test_a_screen_shows_no_more_rows_than_the_terminal_has(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "width", lambda: 80)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "6")
    screen = terminal.Screen()
    screen.show("\n".join(["a", "b" * 100, "c", "d", "e", "f"]))
    screen.show("a\nb\nc\nd\ne")
    shown = capsys.readouterr().out
    assert shown.startswith("a\n" + "b" * 100 + "\nc\n… 3 more lines\n\x1b[5F\x1b[J")
    assert shown.endswith("a\nb\nc\nd\ne\n")
