"""The Slurm script of a log: it is read, never run, and the weakest evidence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.reader.readers.runs.slurm_script import (
    arithmetic,
    assignment,
    expand,
    logical_lines,
    read_script,
    script_beside,
)
from hpc_gpt.reader.report.gather import gather_paths
from tests.readers.made_logs import iterations, write_log

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
    facts = {name: (each.value, each.source) for name, each in read_script(script).facts().items()}
    assert facts["nodes"] == (16, f"{script}:8 (NNODES)")
    assert facts["gpus_per_node"] == (4, f"{script}:9 (GPUS_PER_NODE)")
    assert facts["tp"] == (4, f"{script}:19 (--tensor-model-parallel-size)")
    assert facts["pp"][0] == 16
    assert (facts["layers"][0], facts["hidden"][0], facts["global_batch"][0]) == (64, 8192, 1024)
    assert facts["dtype"][0] == "fp16"
    assert facts["device"] == ("v100-32g", f"{script}:5 (--constraint)")
    assert facts["name"] == ("gpt2_perf_n16", f"{script}:2 (--job-name)")


def test_what_only_a_shell_would_know_is_unknown(script):
    read = read_script(script)
    facts = read.facts()
    assert "seq" not in facts
    # Set twice, in the branches of an if.
    assert "micro_batch" not in facts
    assert read.variables["DP"] == ("1", 12)
    assert not list(script.parent.glob("executed*"))


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
