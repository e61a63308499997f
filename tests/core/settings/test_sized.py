"""Whether a run is of our model or of a program is known to three modules: all others call a function of theirs."""

from dataclasses import replace

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, LayoutRequest, ScriptFacts
from hpc_gpt.core.settings.sized import command_lines, does, program_tables, run_rows

PROGRAM = {"run": "train  {gpus}", "setup": ("a\n\nb",), "workdir": "/w"}
SHORT = {"checkpoints": "as the program decides itself", "stops by": "SIGTERM"}


@pytest.mark.parametrize(
    ("command", "rows", "lines", "stops"),
    [
        (
            PROGRAM,
            {"command": "once a gpu, in /w: train {gpus}", **SHORT},
            ["a", "b", "train  {gpus}"],
            "end by SIGTERM",
        ),
        (
            {
                "run": ("x y", "z"),
                "per": "node",
                "workdir": "/w",
                "stop_signal": "none",
                "checkpoints": "c-*",
                "resume": "-r",
            },
            {"command": "once a node, in /w: 'x y' z", "checkpoints": "c-*, resumed by -r", "stops by": "none"},
            ["'x y' z"],
            "end by SIGnone",
        ),
        (
            {"script": "/s/job", "args": ("a b",), "workdir": "/w"},
            {
                "script": "/s/job 'a b'",
                "runs in": "/w",
                "checkpoints": "the script's own, without --checkpoints",
            },
            ["/s/job 'a b'"],
            "end by SIGTERM",
        ),
    ],
)
def test_a_program_is_shown_by_its_command(command, rows, lines, stops) -> None:
    experiment = Experiment(engine=Engine("command"), layout=LayoutRequest(gpus=2), command=Command(run="x"))
    run = resolve(experiment, load_profile("local"))
    script = ScriptFacts("0") if "script" in command else None
    run = replace(run, command=Command(**command), script=script)
    assert dict(run_rows(run, "here")) == {"layout": "here", **rows}
    assert command_lines(run) == lines
    assert [does(run, verb) for verb in ("stop", "requeue")] == [stops, f"{stops} and go back to the queue"]
    kept = set(program_tables(run)["command"])
    of_program, of_script = {"run", "per", "setup", "resume", "snapshot", "link"}, {"script", "args"}
    assert (kept & of_program, kept & of_script) == ((set(), of_script) if script else (of_program, set()))
