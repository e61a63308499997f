"""A job script is exactly what sbatch reads: its directives, their words, and the options that they name."""

import shlex
from pathlib import Path

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.runs.run_folder import create_run
from hpc_gpt.core.slurm.directives import script_directives
from hpc_gpt.core.slurm.requeue import cannot_continue
from hpc_gpt.core.slurm.sbatch_words import options_of_variables, read_options, sizes_of, split_directive
from hpc_gpt.launcher.decide import prepare
from hpc_gpt.launcher.overview import overview
from hpc_gpt.launcher.prepared import PreparedRun
from hpc_gpt.launcher.request import Request, ScriptRequest
from hpc_gpt.launcher.watch.status import _status
from hpc_gpt.trainer.program.job_script import read_job_script
from tests.cli.command import in_process
from tests.made_runs import with_job

BODY = "srun python fit.py\n"
CHOSEN = {"HPC_GPT_CLUSTER": "generic-slurm"}  # there may be no sbatch here


def script(folder: Path, text: str, name: str = "fit.slurm") -> Path:
    (path := folder / name).write_text(text)
    return path


def prepared_of(path: Path, *words: str) -> PreparedRun:
    return prepare(Request(str(path), "generic-slurm", None, {}, script=ScriptRequest(path, (), words)))


def values_of(path: Path) -> dict[str, str | None]:
    return {option.name: option.value for option in read_job_script(path).options}


def test_directives_end_at_the_first_line_that_is_no_comment(tmp_path: Path) -> None:
    text = "#!/bin/bash\n\n  # the size\n\t#also\n#SBATCH--nodes=3\n#SBATCH\t-t 7\n \n#SBATCHx\n"
    text += "  hostname\n#SBATCH --mem=1G\n"
    path = script(tmp_path, text.replace("#SBATCHx\n", ""))
    assert values_of(path) == {"nodes": "3", "time": "7"}
    head = prepared_of(path).script.split("\n\n")[0]
    assert "#SBATCH --nodes=3\n#SBATCH -t 7\n" in head
    with pytest.raises(ConfigError, match="'x' is not an option of sbatch"):
        read_job_script(script(tmp_path, text))


@pytest.mark.parametrize("blank", ["\u00a0", "\u3000", "\u2009", "\x1c", "\x85"])
def test_only_a_blank_of_c_ends_a_word(tmp_path: Path, blank: str) -> None:
    path = script(tmp_path, f"#!/bin/bash\n#SBATCH\f--job-name=a{blank}b\v--comment={blank}\n#SBATCH -t 7\n")
    assert values_of(path) == {"job-name": f"a{blank}b", "comment": blank, "time": "7"}


def test_two_dashes_end_the_directives(tmp_path: Path) -> None:
    """At the end of all of them sbatch takes it; in job.sh more follow, so it is left out there."""
    path = script(tmp_path, "#!/bin/bash\n#SBATCH --nodes=3\n#SBATCH -t 7 --\n# more\n" + BODY)
    assert values_of(path) == {"nodes": "3", "time": "7"}
    assert "#SBATCH --nodes=3\n#SBATCH -t 7\n" in prepared_of(path).script
    for text in ("#SBATCH -t 7 --\n#SBATCH --nodes=3\n", "#SBATCH -t 7 -- --nodes=3\n", "#SBATCH -t 7 -- x\n"):
        with pytest.raises(ConfigError, match="sbatch takes no option after --"):
            read_job_script(script(tmp_path, f"#!/bin/bash\n{text}"))
    assert values_of(script(tmp_path, "#!/bin/bash\n#SBATCH --comment -- -t 7\n")) == {"comment": "--", "time": "7"}


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--part gpu", "partition", "gpu"),
        ("--tasks-per-node 2", "ntasks-per-node", "2"),
        ("--cluster=north", "clusters", "north"),
        ("--kill-on-invalid-dep yes", "kill-on-invalid-dep", "yes"),
        ("--depend=singleton", "dependency", "singleton"),
        ("--of-a-plugin 5", "of-a-plugin", "5"),
        ("--nt 4", "nt", "4"),  # ambiguous: left to sbatch
    ],
)
def test_names_of_options_are_those_that_getopt_takes(line: str, name: str, value: str) -> None:
    first, last = read_options([*line.split(), "-N3"])
    assert (first.name, first.value) == (name, value)
    assert (last.name, last.value) == ("nodes", "3")


def test_the_value_of_an_unknown_option_is_never_the_script(tmp_path: Path) -> None:
    script(tmp_path, "#!/bin/bash\n#SBATCH -t 7\n" + BODY)
    for words in (("--of-a-plugin", "5"), ("--of-a-plugin",), ("--of-a-plugin=5",)):
        done = in_process(
            "submit", "--dry-run", *words, "fit.slurm", "--lr", "1", cwd=tmp_path, environment=CHOSEN, code=0
        )
        assert " ".join(words) in done.stdout
        assert "fit.slurm --lr 1" in done.stdout


@pytest.mark.parametrize(
    ("word", "by_script"),
    [("--wait", True), ("-W", True), ("-Q", False), ("--quiet", True), ("--parsable", True), ("--parsable", False)],
)
def test_what_keeps_the_jobs_number_from_the_run_is_left_out(tmp_path: Path, word: str, by_script: bool) -> None:
    path = script(tmp_path, f"#!/bin/bash\n#SBATCH -t 7 {word}\n" + BODY if by_script else "#!/bin/bash\n" + BODY)
    prepared = prepared_of(path, *(() if by_script else ("-t", "7", word)))
    assert prepared.job_script is not None
    directives = [line for line in prepared.script.splitlines() if line.startswith("#SBATCH ")]
    assert word not in " ".join((*directives[:3], *prepared.job_script.options)).split()
    assert any(f"{word} is left out" in note for note in prepared.notes)


@pytest.mark.parametrize("option", ["--no-requeue", "--requeue"])
def test_that_no_job_follows_is_said_before_and_in_status(tmp_path: Path, option: str) -> None:
    prepared = prepared_of(script(tmp_path, f"#!/bin/bash\n#SBATCH -t 7 {option}\n" + BODY))
    run = with_job(create_run(tmp_path / "logs", prepared.resolved, "", "", {}), "7")
    status = _status(run, {"7": ("PENDING", "Priority")})
    words = "no job follows this one, which has --no-requeue"
    said = [any(words in note for note in prepared.notes), words in str(status.cause)]
    assert said == [option == "--no-requeue"] * 2
    assert bool(cannot_continue(prepared.resolved)) == said[0]


def test_sbatchs_variables_are_options_of_every_chained_job(tmp_path: Path, monkeypatch) -> None:
    set_ = {"SBATCH_MEM_PER_NODE": "9G", "SBATCH_REQ_SWITCH": "2", "SBATCH_WAIT4SWITCH": "60", "SBATCH_WAIT": "1"}
    found = options_of_variables({**set_, "SBATCH_CPU_FREQ_REQ": "high", "SBATCH_MEM_PER_GPU": "3G"})
    assert found == ["--cpu-freq=high", "--mem-per-gpu=3G", "--mem=9G", "--switches=2@60", "--wait"]
    for name, value in set_.items():
        monkeypatch.setenv(name, value)
    prepared = prepared_of(script(tmp_path, "#!/bin/bash\n#SBATCH -t 7\n" + BODY))
    assert "#SBATCH --mem=9G\n" in prepared.script  # a later job of the chain has only these
    assert prepared.job_script is not None
    assert not {"--wait", "-W"} & set(prepared.job_script.options)


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ({"gres": "gpu:3080:2"}, 2),
        ({"gres": "lustre,gpu:3g.40gb:3"}, 3),
        ({"gres": "gpu:1g.10gb"}, 1),
        ({"tres-per-node": "gres:gpu:6"}, 6),
        ({"tres-per-node": "gres/gpu:h100=6"}, 6),
        ({"tres-per-task": "cpu=4,gres/gpu:2", "ntasks": "6", "nodes": "3"}, 4),
        ({"gpus-per-socket": "3", "sockets-per-node": "2"}, 6),
        ({"ntasks-per-gpu": "2", "ntasks": "8"}, 4),
        ({"gpus-per-node": "h100"}, 1),
        ({"gpus": "h100:5", "nodes": "2"}, 3),
        ({"nodes": "2", "gres": "lustre:1"}, 0),
    ],
)
def test_gpus_are_counted_for_every_way_of_asking(options: dict[str, str], gpus: int) -> None:
    assert sizes_of(options).gpus == gpus


def test_a_comment_is_no_part_of_a_value(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH --output=o-%j.txt  # the log\n#SBATCH --comment='a # b' # c\n# SBATCH\n#SBATCH # all\n"
    prepared = prepared_of(script(tmp_path, text + BODY))
    rows = dict(overview(prepared, tmp_path))
    assert rows["asks Slurm"].startswith("--time=01:00:00 '--comment=a # b' --job-name=")
    log = "attempts/<n>/log in the run's folder; before its first line, slurm-%j.out there"
    assert rows["output"] == f"{Path.cwd()}/o-%j.txt, and {log}"
    assert split_directive(r"--comment='it is \a'\ x -n4#5") == ["--comment=it is a x", "-n4"]


OPTIONS = """#!/bin/bash
#SBATCH -t 7 --output=o.txt -e e.txt -J fit
#SBATCH --nodes=2 --time=8 --no-requeue --open-mode=truncate
"""


@pytest.mark.parametrize("words", [(), ("--output=mine.txt", "-N4"), ("--array=0-3", "--requeue", "-t", "9:00")])
def test_a_dry_run_has_each_option_once(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Of several the one that counts; and it names the file that gets the output."""
    prepared = prepared_of(script(tmp_path, OPTIONS + BODY), *words)
    rows = overview(prepared, tmp_path)
    of_label = dict(rows)
    line = shlex.split(of_label["would run"])
    assert (line[0], line[-2:]) == ("sbatch", ["job.sh", "RUN"])
    shown = list(read_options(shlex.split(of_label["asks Slurm"])))  # those of the command line among them
    names = [option.name for option in shown]
    assert sorted(names) == sorted(set(names))
    # What counts for sbatch: the directives of job.sh, then its command line.
    inside = [word for line in script_directives(prepared.script) for word in split_directive(line)]
    counts = {option.name: option.value for option in read_options([*inside, *words])}
    ours = ("output", "error", "open-mode")
    assert {each.name: each.value for each in shown if each.name not in ours} == {
        name: value for name, value in counts.items() if name not in ours
    }
    named = "mine.txt" if "--output=mine.txt" in words else "o.txt"
    outputs = [text for label, text in rows if label == "output"]
    assert outputs[0].startswith(f"{Path.cwd()}/{named}, and ")
    assert outputs[1].startswith(f"errors in {Path.cwd()}/e.txt, and ")


def test_a_folder_of_output_that_is_not_there_is_said(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH -t 7 --output=%j/o.txt --error=slurm/%j.err\n"
    said = "slurm, the folder of --error, does not exist"
    assert said in "\n".join(prepared_of(script(tmp_path, text + BODY), f"--chdir={tmp_path}").notes)
    (tmp_path / "slurm").mkdir()
    assert said not in "\n".join(prepared_of(script(tmp_path, text + BODY), f"--chdir={tmp_path}").notes)


@pytest.mark.parametrize("name", ["mistral-0.3-7b", "mistral-0.3-7c"])
def test_a_dot_in_a_jobs_name_does_not_cut_the_experiments(tmp_path: Path, name: str) -> None:
    prepared = prepared_of(script(tmp_path, f"#!/bin/bash\n#SBATCH -t 7 -J {name}\n" + BODY))
    assert prepared.resolved.slug == name
    assert prepared_of(script(tmp_path, "#!/bin/bash\n#SBATCH -t 7\n" + BODY)).resolved.slug == "fit"


LOOP = "#!/bin/bash\n#SBATCH -t 7\nfor i in 1 2; do\n  python fit.py\n"


@pytest.mark.parametrize("first", ["#!/bin/bash", "#!/bin/sh -e", "#!/usr/bin/env bash", "#! /usr/local/bin/bash -x"])
def test_a_script_that_bash_cannot_read_is_refused_in_its_words(tmp_path: Path, first: str) -> None:
    script(tmp_path, LOOP.replace("#!/bin/bash", first))
    others = (("submit",), ("render",), ("doctor",)) if first == "#!/bin/bash" else ()
    for verb in (("submit", "--dry-run"), *others):
        done = in_process(*verb, "fit.slurm", cwd=tmp_path, environment=CHOSEN)
        assert done.code == (1 if verb == ("doctor",) else 2), done
        assert "bash cannot read fit.slurm: line 5: syntax error: unexpected end of file" in done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["fit.slurm"]


@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/bash\n#SBATCH -t 7\nshopt -s extglob\nrm -f !(a|b)\n",
        "#!/usr/bin/env python3\n#SBATCH -t 7\nfor i in range(2):\n    print(i)\n",
        "#!/bin/zsh\n#SBATCH -t 7\nfor i (1 2) { echo $i }\n",
    ],
)
def test_what_bash_can_read_or_another_program_reads_is_taken(tmp_path: Path, text: str) -> None:
    assert read_job_script(script(tmp_path, text)).options
