"""Peers as `--peer` and `--peer-pattern` name them: what is taken, and every fault in one go."""

from __future__ import annotations

import pytest

from hpc_gpt.bench.cell import Cell
from hpc_gpt.bench.peer import add_peers, read_peers
from hpc_gpt.errors import ConfigError


def test_a_command_may_hold_anything_a_shell_does():
    command = "cd ~/nanoGPT && X=1 python train.py --a=b | tee out"
    assert read_peers([f"nanogpt={command}"], []) == [Cell("nanogpt", command=command)]


def test_a_pattern_is_for_all_peers_or_for_the_one_it_names():
    peers = read_peers(["a=run a", "b=run b", "c=run c"], [r"tok=(\d+)", r"b=rate (\S+)"])
    assert [(peer.name, peer.pattern) for peer in peers] == [
        ("a", r"tok=(\d+)"),
        ("b", r"rate (\S+)"),
        ("c", r"tok=(\d+)"),
    ]


@pytest.mark.parametrize(
    ("peers", "patterns", "words"),
    [
        (["python train.py"], [], ["'python train.py' is not NAME='COMMAND'"]),
        (["=python train.py"], [], ["'=python train.py' is not NAME='COMMAND'"]),
        (["a b=x"], [], ["the name 'a b' is not of letters"]),
        (["../x=x"], [], ["the name '../x' is not of letters"]),
        (["a= "], [], ["peer a has no command"]),
        (["a=x", "b=x", "a=y"], [], ["two are called a"]),
        (["a=x"], ["tok/s"], ["'tok/s' has no group"]),
        (["a=x"], [r"(\d+) (tok|seq)/s"], ["has 2 groups"]),
        (["a=x"], ["(unclosed"], ["'(unclosed' is no regular expression: missing )"]),
        (["a=x"], ["a=(x)", "a=(y)"], ["peer a has two"]),
        (["nanogpt=x"], ["(x)", "nanogtp=(y)"], ["two without a peer's name; did you mean nanogpt?"]),
        ([], ["(x)"], ["there is no --peer"]),
        (["a", "b c=x"], ["x"], ["'a' is not NAME", "the name 'b c'", "'x' has no group"]),
    ],
)
def test_every_fault_is_told_with_what_to_do(peers, patterns, words):
    with pytest.raises(ConfigError) as refusal:
        read_peers(peers, patterns)
    lines = str(refusal.value).splitlines()
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines
    assert "--peer" in refusal.value.hint


def test_a_secret_in_a_faulty_word_is_not_repeated():
    with pytest.raises(ConfigError) as refusal:
        read_peers(["python train.py --hub_token hf_plantedplantedplanted1"], [])
    assert "planted" not in str(refusal.value)


def test_a_peer_stands_behind_our_rows_and_has_no_name_of_theirs():
    ours, peers = [Cell("ddp")], read_peers(["nanogpt=x"], [])
    assert [cell.name for cell in add_peers(ours, peers)] == ["ddp", "nanogpt"]
    with pytest.raises(ConfigError, match="--peer ddp: a row of ours"):
        add_peers(ours, read_peers(["ddp=x"], []))
