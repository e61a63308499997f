"""Peers: as the options name them, and their runs' records with the figures of what they printed."""

import statistics

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.launcher.bench.measurement import measure
from hpc_gpt.launcher.bench.peer import peer_record
from hpc_gpt.launcher.peers import prepare_peer, read_peers


def test_a_command_may_hold_anything_a_shell_does():
    command = "cd ~/nanoGPT && X=1 python train.py --a=b | tee out"
    assert read_peers([f"nanogpt={command}"], []) == {"nanogpt": (command, None)}


def test_a_pattern_is_for_all_peers_or_for_the_one_it_names():
    peers = read_peers(["a=run a", "b=run b", "c=run c"], [r"tok=(\d+)", r"b=rate (\S+)"])
    patterns = [pattern for _, pattern in peers.values()]
    assert (list(peers), patterns) == (["a", "b", "c"], [r"tok=(\d+)", r"rate (\S+)", r"tok=(\d+)"])


@pytest.mark.parametrize(
    ("peers", "patterns", "words"),
    [
        (["python train.py"], [], ["'python train.py' is not NAME='COMMAND'"]),
        (["=python train.py"], [], ["'=python train.py' is not NAME='COMMAND'"]),
        (["a b=x"], [], ["'a b=x' is not NAME='COMMAND' with a name of letters"]),
        (["../x=x"], [], ["a name of letters"]),
        (["a= "], [], ["'a= ' is not NAME='COMMAND'"]),
        (["a=x", "b=x", "a=y"], [], ["a: another row has that name"]),
        (["ddp=x"], [], ["ddp: another row has that name"]),
        (["a=x"], ["tok/s"], ["'tok/s' is not a regular expression with one group"]),
        (["a=x"], [r"(\d+) (tok|seq)/s"], ["with one group"]),
        (["a=x"], ["(unclosed"], ["'(unclosed' is not a regular expression"]),
        (["a=x"], ["a=(x)", "a=(y)"], ["'(y)' is a second one for the same peers"]),
        (["a=x"], ["(x)", "(y)"], ["'(y)' is a second one for the same peers"]),
        ([], ["(x)"], ["there is no --peer"]),
        (["a", "b c=x"], ["x"], ["'a' is not NAME", "'b c=x' is not NAME", "'x' is not a regular"]),
    ],
)
def test_every_fault_is_reported_with_what_to_do(peers, patterns, words):
    with pytest.raises(ConfigError) as refusal:
        read_peers(peers, patterns, taken=["ddp"])
    lines = str(refusal.value).splitlines()
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines
    assert "--peer" in refusal.value.hint


def test_a_secret_in_a_faulty_value_is_not_repeated():
    with pytest.raises(ConfigError) as refusal:
        read_peers(["python train.py --hub_token hf_plantedplantedplanted1"], [])
    assert "planted" not in str(refusal.value)


def test_a_command_with_a_secret_is_refused():
    found = read_peers(["a=HF_TOKEN=hf_plantedplantedplanted1 ./train.sh"], [])
    with pytest.raises(ConfigError, match=r"looks like a secret.*HF_TOKEN=\[removed\]"):
        prepare_peer("a", *found["a"], load_profile("local"))


NANOGPT = "tokens per iteration will be: 16,384\n" + "".join(
    f"iter {step}: loss {9 - step / 10:.4f}, time {900 if step == 0 else 50 + step % 3:.2f}ms, mfu 30.00%\n"
    for step in range(20)
)
OWN = "".join(f"[{step}] speed=<{100 if step < 5 else 5000 + step:,}>\n" for step in range(12))
DONE = Record(name="peer", run="id", ended="done")


def read(tmp_path, text, pattern=None, record=DONE):
    log = tmp_path / "log"
    log.write_bytes(text if isinstance(text, bytes) else text.encode())
    return peer_record(record, log, pattern)


def test_the_log_readers_find_the_speed_of_a_program_they_know(tmp_path):
    record = read(tmp_path, NANOGPT)
    assert (record.name, record.run, record.dialect, record.engine) == ("peer", "id", "nanogpt", "nanogpt")
    assert record.tokens_per_s == pytest.approx(16384 / 0.051, rel=0.03)
    assert (record.ended, record.loss_first, record.loss_last) == ("done", 9.0, 7.1)
    assert not [flag for flag in record.flags if "--peer-pattern" in flag]


def test_a_pattern_gives_the_median_without_the_first_few(tmp_path):
    record = read(tmp_path, OWN, r"speed=<([\d,]+)>")
    assert record.tokens_per_s == statistics.median(range(5005, 5012))
    assert (record.steps_used, record.dialect) == (7, None)
    assert "median of the last 7 of 12 lines" in record.sources["tokens_per_s"]
    record = read(tmp_path, NANOGPT, r"mfu ([\d.]+)%")
    assert (record.tokens_per_s, record.dialect) == (30.0, "nanogpt")


def test_a_pattern_reads_rewritten_bars_and_bytes_not_text(tmp_path):
    bar = b"\xff\xfe 10.0k tok/s\r 20.0k tok/s\r 30.0k tok/s\n"
    assert read(tmp_path, bar, r"([\d.]+k) tok/s").tokens_per_s == 25e3
    assert (
        read(tmp_path, "".join(f"{text} tok/s\n" for text in ("nan", "-5", "0", "1e999")), "(.+) tok").tokens_per_s
        is None
    )


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("", None), (OWN, None), ("step 1: loss 9.5\n", None), (OWN, r"(\d+) tok/s")],
)
def test_a_log_without_a_speed_asks_for_a_pattern(tmp_path, text, pattern):
    record = read(tmp_path, text, pattern)
    assert (record.tokens_per_s, record.ended) == (None, "done")
    (flag,) = [flag for flag in record.flags if "--peer-pattern" in flag]
    assert flag.startswith("no tokens/s found in ")


def test_exit_0_is_enough_and_a_failure_keeps_its_cause(tmp_path):
    early = Record(ended="error", cause="ends by itself at 5 of 100 steps, with exit code 0")
    assert (read(tmp_path, NANOGPT, record=early).ended, read(tmp_path, NANOGPT).cause) == ("done", None)
    failed = Record(ended="gpu_memory", cause="rank 0: out of memory")
    assert read(tmp_path, NANOGPT, record=failed).cause == failed.cause


def test_a_peer_runs_its_command_and_leaves_nothing_running(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GREETING", "two  words")
    monkeypatch.setenv("WANDB_API_KEY", "opensesame-1234")
    line = (
        'sleep 300 & echo $!; echo "$GREETING ${GREETING} {gpus} {{y}} 7 tok/s"; echo KeyError: $WANDB_API_KEY; exit 7'
    )
    cell = prepare_peer("own", line, r"(\d+) tok/s", load_profile("local"))
    measured = measure(cell, tmp_path, {}, "own")
    said = (measured.place / "attempts" / "1" / "log").read_text().splitlines()
    assert "two  words two  words {gpus} {{y}} 7 tok/s" in said
    assert not lives(said[1])
    assert (measured.record.ended, measured.record.cause) == ("error", "rank 0: KeyError: [removed]")
    # Our own line has the command, and with it the text that the pattern finds.
    assert "of the last 1 of 1 lines" in measured.record.sources["tokens_per_s"]


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
