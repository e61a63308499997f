"""The Slurm script of a log: it is read, never run, and the weakest evidence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.reader.records.slurm_script import (
    arithmetic,
    assignment,
    expand,
    logical_lines,
    read_script,
    script_beside,
)
from hpc_gpt.report.gather import gather_paths
from tests.reader.made_logs import iterations, write_log

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=gpt2_perf_n16
#SBATCH --nodes=16 --ntasks-per-node=1   # crucial
#SBATCH --gres=gpu:4                     # number of gpus
#SBATCH -C v100-32g
#SBATCH --output=%x-%j.out
# WORLD_SIZE=1
NNODES=16
GPUS_PER_NODE=4
TP_SIZE=4    # always the size of a node
PP_SIZE='16'
export DP=$((NNODES*GPUS_PER_NODE/(PP_SIZE*TP_SIZE)))
if [ -n "$LARGE" ]; then
    MICRO_BATCH_SIZE=8
else
    MICRO_BATCH_SIZE=4
fi
HOSTS=$(scontrol show hostnames)
GPT_ARGS=" \\
    --num-layers 64 --hidden-size ${HIDDEN:-8192} \\
    --tensor-model-parallel-size $TP_SIZE \\
    --pipeline-model-parallel-size $PP_SIZE \\
    --seq-length $SEQ \\
    --fp16 \\
    "
srun python $GPT_ARGS --global-batch-size "$((4 * 256))"
touch executed; rm -rf $(echo executed-too)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "lab" / "perf.slurm"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


def test_what_a_script_says(script):
    read = read_script(script)
    assert {name: (each.value, each.source.removeprefix(f"{script}:")) for name, each in read.facts().items()} == {
        "layers": (64, "19 (--num-layers)"),
        "hidden": (8192, "19 (--hidden-size)"),
        "tp": (4, "19 (--tensor-model-parallel-size)"),
        "pp": (16, "19 (--pipeline-model-parallel-size)"),
        "global_batch": (1024, "26 (--global-batch-size)"),
        "nodes": (16, "8 (NNODES)"),
        "gpus_per_node": (4, "9 (GPUS_PER_NODE)"),
        "dtype": ("fp16", "19 (--fp16)"),
        "name": ("gpt2_perf_n16", "2 (--job-name)"),
        "device": ("v100-32g", "5 (--constraint)"),
    }
    # What only a shell would know is unknown: SEQ is never set, and MICRO_BATCH_SIZE twice, in the branches of an if.
    assert {name: value for name, value in read.variables.items() if name != "GPT_ARGS"} == {
        "NNODES": ("16", 8),
        "GPUS_PER_NODE": ("4", 9),
        "TP_SIZE": ("4", 10),
        "PP_SIZE": ("16", 11),
        "DP": ("1", 12),
        "HOSTS": ("$(scontrol", 18),
    }
    assert not list(script.parent.glob("executed*"))


# Field -> the flags, and in capitals the variables, that give it.
GIVES = {
    "tp": "tensor-model-parallel-size model-parallel-size tp-size tensor-parallel-size",
    "pp": "pipeline-model-parallel-size pipe-parallel-size pp-size pipeline-parallel-size",
    "cp": "context-parallel-size cp-size",
    "dp": "dp-size data-parallel-size",
    "micro_batch": "micro-batch-size per_device_train_batch_size micro-bs MBS",
    "micro_batches": "gas gradient_accumulation_steps",
    "global_batch": "global-batch-size global-batch GBS",
    "layers": "num-layers NLAYERS n_layers n_layer",
    "hidden": "hidden-size NHIDDEN n_hidden n_embd",
    "heads": "num-attention-heads NHEADS n_heads n_head num_heads",
    "ffn": "ffn-hidden-size",
    "seq": "seq-length SEQ_LEN sequence-length",
    "steps_planned": "train-iters max_steps",
    "nodes": "nnodes num_nodes",
    "gpus_per_node": "nproc_per_node gpus-per-node n_gpus_per_node GPU_PER_NODE",
    "gpus": "WORLD_SIZE",
    "zero_stage": "zero-stage",
}
# Line of a script -> the field and value that it gives.
DIRECTIVES = {
    "#SBATCH -N 3": ("nodes", 3),
    "  #SBATCH --nodes=2-4": None,
    "#SBATCH --gpus-per-node=h100:8": ("gpus_per_node", 8),
    "#SBATCH --gpus-per-node=8": ("gpus_per_node", 8),
    "#SBATCH --gres=lustre:1,gpu:a100:4": ("gpus_per_node", 4),
    "#SBATCH --gres=gpu": ("gpus_per_node", 1),
    "#SBATCH --gres=gpu=2": ("gpus_per_node", 2),
    "#SBATCH --gres=gpu:a:b:4": None,
    "#SBATCH --gres=lustre:1": None,
    "#SBATCH -G a100:16": ("gpus", 16),
    "#SBATCH -G5 # -N 2": ("gpus", 5),
    "#SBATCH --job-name='my run'": ("name", "my run"),
    "#SBATCH -J": None,
    '#SBATCH -C "[a100&(v100-16g|x)]"': ("device", "v100-16g"),
    "#SBATCH -C big": None,
    "#SBATCH -t 5": None,
    "srun python --fp16 --bf16=false": ("dtype", "fp16"),
    "srun python --bf16 0": None,
    "srun python --bf16 yes": ("dtype", "bf16"),
    "srun python --fp16 no": None,
    "# --tp-size 4": None,
    "NNODES=4x": None,
    "srun python --nnodes=`wc`": None,
    "#SBATCH -n 6\nWORLD_SIZE=$SLURM_NTASKS": ("gpus", 6),
    "#SBATCH -N 6\nsrun python --num_nodes $SLURM_NNODES": ("nodes", 6),
    "#SBATCH --cpus-per-task 7\nsrun python --dp-size $SLURM_CPUS_PER_TASK": ("dp", 7),
    "#SBATCH --ntasks-per-node 7\nsrun python --dp-size $SLURM_NTASKS_PER_NODE": ("dp", 7),
    "#SBATCH -N 7\nDP_SIZE=$((SLURM_JOB_NUM_NODES*2))": ("dp", 14),
    "#SBATCH --gpus-per-node 7\nDP_SIZE=${SLURM_GPUS_PER_NODE}": ("dp", 7),
    "srun python --tp-size 2\nsrun python --tp-size 4": ("tp", 2),
    "TP_SIZE=2\nTP_SIZE=2": ("tp", 2),
    "readonly TP_SIZE='2' # or 4": ("tp", 2),
    "declare -x TP_SIZE=2;": ("tp", 2),
}


def test_each_flag_variable_and_directive_gives_its_field(tmp_path):
    def found(line):
        (path := tmp_path / "a.sh").write_text(f"#!/bin/bash\n{line}\n")
        return [(name, each.value) for name, each in read_script(path).facts().items()]

    for field, names in GIVES.items():
        for name in names.split():
            line = f"{name}=3" if name.isupper() else f"srun python a.py --{name} 3"
            assert found(line) == [(field, 3)], line
    for line, fact in DIRECTIVES.items():
        given = [each for each in found(line) if fact is None or each[0] == fact[0]]
        assert given == ([] if fact is None else [fact]), line


def test_it_is_weaker_than_the_log_and_fills_its_gaps(script, tmp_path):
    write_log(script.parent / "gpt2_perf_n16-12345.out", iterations(1, 20, batch=512))
    (run,) = gather_paths([str(script.parent)], tmp_path / "logs").runs
    record = run.record
    assert (record.gpus, record.tp, record.pp, record.dp, record.device) == (64, 4, 16, 1, "v100-32g")
    assert record.sources["gpus"] == "inferred: nodes 16 x gpus_per_node 4"
    assert (record.global_batch, record.name) == (512, "gpt2_perf_n16")
    assert any("but the script next to it says 1024" in flag for flag in record.flags)
    assert script in run.files


def test_which_script_a_log_is_of(tmp_path):
    scripts = []
    for name, more in (("a", ""), ("b", "#SBATCH -o logs/%j-%x.log\n"), ("ab", "")):
        (path := tmp_path / f"{name}.sh").write_text(f"#!/bin/sh\n#SBATCH -J {name}\n{more}")
        scripts.append(read_script(path))

    def found(log):
        script = script_beside(tmp_path / log, None, {tmp_path: scripts})
        return script.job_name if script else None

    assert [found(log) for log in ("a-12345.out", "12345-b.log", "ab-1.out", "slurm-1.out")] == ["a", "b", "ab", None]
    assert script_beside(tmp_path / "slurm-1.out", None, {tmp_path: scripts[:1]}) is scripts[0]
    assert script_beside(tmp_path / "logs" / "a-1.out", None, {tmp_path: scripts}).job_name == "a"
    assert script_beside(tmp_path / "logs" / "slurm-1.out", None, {tmp_path: scripts[:1]}) is None
    assert script_beside(tmp_path / "other" / "deep" / "a-1.out", None, {tmp_path: scripts}) is None


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("A=; b", ("A", "", True)),
        ("A= b", ("A", "", True)),
        ("A=b#c d", ("A", "b", True)),
        ('export A="b \\"c\\" $D" e', ("A", 'b \\"c\\" $D', True)),
        ("local A='$b c'", ("A", "$b c", False)),
        ("declare -r A=''", ("A", "", False)),
        ("A=$((1 + (B * 2))) c", ("A", "$((1 + (B * 2)))", True)),
        ("A=$((1", None),
        ("A+=b", None),
        ("1A=b", None),
        ("a b=c", None),
    ],
)
def test_assignments(line, found):
    assert assignment(line) == found


def test_lines_that_go_on():
    text = 'a \\\nb\n# c \\\nd "e\nf" g\n\nh \\'
    assert [*logical_lines(text)] == [(1, "a  b"), (3, "# c \\"), (4, 'd "e f" g'), (6, ""), (7, "h  ")]


@given(st.text(alphabet="$(){}+-*/%A1b \"'`\\\n=#;", max_size=300))
def test_no_text_is_too_odd(text):
    for _, line in logical_lines(text):
        found = assignment(line)
        if found:
            expand(found[1], {"A": "$A$A", "b": "1"})
    arithmetic(text, {"A": "7"})


NUMBERS = st.integers(0, 10**6)


@given(NUMBERS, NUMBERS, st.integers(1, 10**6), st.sampled_from("+-*"))
def test_arithmetic_is_a_shells(one, two, three, sign):
    worked = {"+": one + two, "-": one - two, "*": one * two}[sign]
    towards_zero = abs(worked) // three * (1 if worked >= 0 else -1)
    assert arithmetic(f"(X {sign} {two}) / {three}", {"X": str(one)}) == towards_zero
    assert expand(f"$(( (X {sign} {two}) % {three} ))", {"X": str(one)}) == str(worked - towards_zero * three)


def test_what_is_no_arithmetic_is_unknown():
    for text in ("", "1 +", "1 / 0", "X", "(1", "1 2", "9" * 400, "(" * 99 + "1" + ")" * 99, "1 * " * 99 + "1"):
        assert arithmetic(text, {}) in (None, 1)
    assert arithmetic("999999999999999 * 999999999999999", {}) is None
    assert (expand("$(ls) ${X} `y`", {}), expand("$X-${Y:-3}", {"X": "1"})) == ("$(ls) ${X} `y`", "1-3")
