"""Bash as it is read and filled in: what bash itself makes of the same text is what counts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.errors import ConfigError
from hpc_gpt.scripts.expansion import Scope
from hpc_gpt.scripts.notes import Notes
from hpc_gpt.scripts.pieces import Piece
from hpc_gpt.scripts.shell import read_shell
from hpc_gpt.scripts.state import Started, names_used
from hpc_gpt.scripts.statements import Command, If, Loop, Pipeline
from hpc_gpt.scripts.walk import Walk
from hpc_gpt.settings.command import fill_line

# Prints the arguments that a program gets, one in brackets.
SHOWS = "python() { printf '<%s>' \"$@\"; printf '\\n'; }\n"


def walked(text: str, folder: Path = Path(), **more: str) -> Walk:
    """A walk through a script on two nodes of four GPUs."""
    sizes = {"SLURM_NNODES": Piece("{nodes}", "fill", "2")}
    walk = Walk(Scope(sizes, more, str(folder), str(folder), 8), Notes(), folder)
    walk.walk(read_shell(text, "job"))
    return walk


def started(text: str, folder: Path = Path(), **more: str) -> Started:
    found = walked(text, folder, **more).best()
    assert found is not None, text
    return found


def bash(text: str, cwd: Path = Path()) -> str:
    own = {"PATH": os.environ["PATH"], "HOME": "/home/me", "SLURM_NNODES": "2", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(["bash", "-c", SHOWS + text], env=own, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    return done.stdout


def ours(text: str, cwd: Path = Path()) -> str:
    """What bash prints of the command that is found in the text, its setup before it."""
    found = started(text, cwd, HOME="/home/me")
    line = fill_line(found.run, {"nodes": "2", "gpus": "8"})
    setup = "\n".join(step.text for step in found.steps if step.acts or step.sets & names_used(found.run))
    return bash(f"{setup}\n{line}", cwd)


SNIPPETS = [
    "python train.py a 'b c' \"d e\" f\\ g",
    "A=1 B='two three'\npython train.py $A $B \"$B\" '$B' x$A\"y$B\"z",
    'A=(1 \'two three\' 4)\npython train.py ${A[@]} "${A[@]}" "${A[*]}" ${#A[@]} ${A[1]} $A',
    'A=(--lr 1)\nA+=(--wd 0.1)\nA[1]=2\npython train.py "${A[@]}"',
    'ARGS="--x 1 \\\n --y 2"\nARGS="$ARGS --z"\nARGS+=\' --w\'\npython train.py $ARGS',
    'python train.py ${NONE:-d e} "${NONE:-d e}" ${NONE-} "${NONE:-}" ${NONE:+x} end',
    "X=val\npython train.py ${X:-d} ${X:+set} ${X:=e} ${Y:=new} $Y ${#X}",
    "F=/a/b.tar.gz\npython train.py ${F##*/} ${F#*/} ${F%.*} ${F%%.*} ${F/a/x} ${F//a/x} ${F:1:3} ${F^^} ${F,,}",
    "N=3\npython train.py $((N * 2 + 1)) $(( (N-1) / 2 )) $((N % 2)) $((${N}*$N)) $((7/2)) $((-7/2))",
    "N=$SLURM_NNODES\nW=$(($N*4))\npython train.py $N $W $((N+1)) \"n$N\" 'brace {nodes} {x}' {a}",
    "python train.py ~ ~/x '~/x' x~",
    "python train.py # a comment\n",
    "# python train.py no\npython train.py a#b '#c' \\#d # e",
    "if [ 1 -gt 2 ]; then A=1; elif [[ a == a* ]]; then A=2; else A=3; fi\npython train.py $A",
    'X=\nif [ -z "$X" ] && [ -n y ]; then A=yes; else A=no; fi\n[ a = b ] || B=b\npython train.py $A $B',
    'for i in 1 2 3; do A="$A $i"; done\npython train.py $A',
    "case x.y in a) A=1 ;; x*|z) A=2 ;; *) A=3 ;; esac\npython train.py $A",
    'f() { local w=$1; shift; OUT="$w:$#"; }\nf a b c\npython train.py $OUT ${1:-none}',
    'run() { python train.py "$@" "${@:2}" $1; }\nrun \'a b\' c',
    'CMD="python train.py --name \'a b\'"\neval "$CMD"',
    "CMD='python train.py --a b'\n$CMD --c",
    'X=1; export X; Y=$X\nbash -c "printf \'<%s>\' $X >/dev/null; :"\npython train.py "$Y"',
    'python train.py "a\\"b" "\\$HOME" "c\\\\d" $\'tab\\there\' \'it\'"\'"\'s\'',
    'python train.py `echo a` $(echo b c) "$(echo d e)" $(basename /x/y.sh .sh) $(dirname /x/y)',
    "python train.py {1..3} x{a,b}y '{a,b}'",
    "X=$'a\\nb'\npython train.py \"$X\" $X",
    "X='a;b|c&d<e>f(g)h*i?j[k]'\npython train.py \"$X\"",
    "true && A=1; false && A=2; false || B=3; true || B=4\npython train.py $A $B",
    "(( 3 > 2 )) && A=yes\n(( 3 < 2 )) && A=no\npython train.py $A",
    "{ A=1; }\npython train.py $A 2>&1 | cat",
    "A=1 \\\n  B=2\npython \\\n  train.py \\\n  $A # end\n",
    "cat >/dev/null <<EOF\npython no.py \"\nEOF\npython train.py a <<'X'\nit's\nX\n",
    "X=$(printf 'a b')\npython train.py \"$X\" $X",
    "[ -e /nonexistent ] && A=1 || A=2\npython train.py $A",
    "if [ -d / ]; then A=(x 'y z'); else A=(); fi\npython train.py \"${A[@]}\" ${#A[@]}",
    "while read -r l; do A=$l; done < <(printf '1\\n2\\n')\npython train.py $A",
]


@pytest.mark.parametrize("text", SNIPPETS)
def test_the_command_has_the_arguments_that_bash_gives_it(text: str, tmp_path: Path) -> None:
    assert ours(text, tmp_path) == bash(text, tmp_path)


PIECES = st.lists(
    st.one_of(
        st.text("abc -=/.,:{}$1", min_size=1, max_size=4).map(lambda text: "'" + text + "'"),
        st.text("abc =/.,:{}'", min_size=1, max_size=4).map(lambda text: '"' + text + '"'),
        st.text("abc1=/.,:", min_size=1, max_size=4),
        st.sampled_from(
            ["$A", '"$A"', "${B}", '"${C[@]}"', "${C[@]}", "${N:-x y}", "\\ ", '\\"', "$((2*D))", "''", '""']
        ),
        st.just(" "),
    ),
    min_size=1,
    max_size=8,
).map("".join)


@given(st.lists(PIECES, min_size=5, max_size=5))
def test_words_of_any_quoting_are_bashs(words: list[str]) -> None:
    head = "A='x  y'\nB=\"q'r\"\nC=('1 2' '' 3)\nD=21\n"
    texts = [f"{head}python train.py {word} end" for word in words]
    lines = "\n".join(fill_line(started(text).run, {"nodes": "2", "gpus": "8"}) for text in texts)
    assert bash(lines) == bash("\n".join(texts))


@given(st.text("ab$(){}[]'\"`\\ \n;&|<>#=!*-", max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        walked(text)
    except ConfigError as fault:
        assert "\n" not in str(fault)
        assert str(fault).startswith("job:")


def test_statements_keep_their_lines_and_sources() -> None:
    text = "a=1\n\nif x; then\n  y\nfi\nfor i in 1; do\n z\ndone\nw <<E\nq\nE\nlast"
    found = read_shell(text)
    assert [each.line for each in found] == [1, 3, 6, 9, 12]
    inner = [each.parts[0] for each in found if isinstance(each, Pipeline)]
    assert [type(each) for each in inner] == [Command, If, Loop, Command, Command]
    assert found[1].source == "if x; then\n  y\nfi"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo 'a", "job:1: a single quote has no end"),
        ('x\ny "a\n', "job:2: a double quote has no end"),
        ("x\ncat <<EOF\na\n", "job:2: the here-document <<EOF has no end"),
        ("if a; then b", "job:1: no elif or else or fi before the end"),
        ("a=(1 2", "job:1: a=( has no end"),
        ("x $(echo", "job:1: ( has no )"),
        ("for 1x in; do", "job:1: no name after for"),
        ("x)", "job:1: unexpected ')'"),
    ],
)
def test_what_bash_could_not_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="^" + message.replace("(", r"\(").replace(")", r"\)").replace("$", r"\$")):
        read_shell(text, "job")


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = (
        f"X=$(touch {mark})\n`touch {mark}`\neval 'touch {mark}'\n<(touch {mark})\ntouch {mark}\npython train.py $X\n"
    )
    walked(text, tmp_path)
    assert not mark.exists()


def test_loops_without_end_are_refused() -> None:
    turns = " ".join(map(str, range(60)))
    text = "".join(f"for {name} in {turns}; do\n" for name in "abcde") + "x=$a\n" + "done\n" * 5
    with pytest.raises(ConfigError, match="more than 5,000 statements"):
        walked(text)


def test_a_folder_that_only_the_job_knows_is_gone_to_there() -> None:
    found = started("cd $PROJECT/code\npython -c 'print(1)'\nsrun python train.py")
    assert [step.text for step in found.steps if step.acts] == ["cd $PROJECT/code"]
    known = started("cd $PROJECT/code\nsrun python train.py", PROJECT="/project/me")
    assert [step.text for step in known.steps if step.acts] == []


@pytest.mark.parametrize(
    "source",
    [
        "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)",
        '`scontrol show hostname "$SLURM_NODELIST" | head -n1`',
        '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        "$(hostname)",
        "$(hostname -s)",
        "$(hostname -I | awk '{print $1}')",
        "$(/bin/hostname --ip-address)",
    ],
)
def test_the_first_node_is_known_as_what_hpc_gpt_gives(source: str) -> None:
    found = started(f"HEAD={source}\nsrun torchrun --rdzv_endpoint=$HEAD:29500 train.py")
    assert found.run == 'torchrun "--rdzv_endpoint=$MASTER_ADDR:29500" train.py'


def test_a_list_of_hosts_gives_the_first_and_their_number() -> None:
    text = "mapfile -t H < <(scontrol show hostnames)\nsrun torchrun --nnodes ${#H[@]} --master_addr ${H[0]} train.py"
    assert started(text).run == 'torchrun --nnodes {nodes} --master_addr "$MASTER_ADDR" train.py'


def test_a_substitution_is_left_to_bash_with_what_it_uses() -> None:
    found = started('D=/data\nUNUSED=$(date)\nN="$(ls $D | wc -l)"\nsrun python train.py --n $N')
    assert found.run == "python train.py --n $N"
    assert {step.text for step in found.steps if not step.acts} >= {"D=/data", 'N="$(ls $D | wc -l)"'}


@pytest.mark.parametrize(
    "text",
    [
        "echo $(date)",
        "srun hostname",
        "python -c 'import torch'",
        "sbatch next.sh",
        "srun mkdir -p x",
        "make -j",
        "",
        "ls",
    ],
)
def test_what_trains_nothing_starts_nothing(text: str) -> None:
    assert walked(text).best() is None
