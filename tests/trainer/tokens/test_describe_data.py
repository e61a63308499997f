"""What is said of a run's data: source, tokens, epochs, and a vocabulary of which they use little."""

import re

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.trainer.tokens import description
from hpc_gpt.trainer.tokens.build import build_megatron, build_tokens, stdlib_length
from hpc_gpt.trainer.tokens.run_data import ensure_data


def describe_data(resolved):
    """The lines as they are printed."""
    return [str(line) for line in description.describe_data(resolved)]


def run_of(**overrides):
    return resolve(load_experiment("demo", {"layout.tp": 1, "layout.pp": 1, **overrides}), load_profile("local"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """40,000 letters as a text, as tokens, as Megatron's pair and with a table of characters; a folder of shards."""
    folder = tmp_path_factory.mktemp("data")
    (text := folder / "text.txt").write_text("abcdefgh" * 5000)
    build_tokens(text, folder / "made")
    build_megatron(text, folder / "pair")
    build_tokens(text, folder / "table", "char")
    (folder / "shards").mkdir()
    for name in "abcd":
        (folder / "shards" / f"{name}.jsonl").write_text('{"text": "abcdefg"}\n' * 100)
    (folder / "shards" / ".README.md").write_text("about them")
    return folder


MADE = "data: HERE/made by tokenizer byte, 38,001 tokens to train on"
FEW, NO_EVALUATION = {"train.steps": 5}, {"data.eval_fraction": 0.0, "train.eval_every": 0}
SMALLER = "makes its embedding smaller, and hpc-gpt data makes tokens from other text"
ONE_RANK = {"data.workers": 0, "layout.gpus": 1}
# The source, its path, what else is set, and the lines.
SAID = [
    ("tokens", "made", {},
     [f"{MADE}; 16.8 epochs in 50 steps of 128 samples",
      "note: each token is read 16.8 times: above data.max_epochs = 4 a model learns little from further repetitions"]),
    ("tokens", "made", FEW | {"model.vocab": 2560}, [f"{MADE}; 1.68 epochs in 5 steps of 128 samples"]),
    ("tokens", "made", FEW | {"model.vocab": 2561},
     [f"{MADE}; 1.68 epochs in 5 steps of 128 samples",
      "note: the data have at most 256 different tokens, 10 % of the model's vocabulary of 2,561; --set "
      f"model.vocab=256 {SMALLER}"]),
    ("tokens", "made", {"train.steps": 1, "data.mask_documents": True},
     [f"{MADE}; 0.337 epochs in 1 step of 128 samples; attention within documents, which token 0 ends"]),
    # Megatron's files do not say which tokenizer made them.
    ("megatron", "pair", FEW, ["data: HERE/pair, 38,001 tokens to train on; 1.68 epochs in 5 steps of 128 samples"]),
    ("stream", "shards", ONE_RANK | {"data.eval_fraction": 0.25, "data.max_epochs": 0.0},
     ["data: HERE/shards by tokenizer byte, 3 shards to train on, about 6,000 bytes of text (left out: 1 file: "
      ".README.md (hidden)); 26.7 epochs in 50 steps of 32 samples"]),
    ("stream", "text.txt", ONE_RANK | NO_EVALUATION | {"data.tokenizer": "HERE/table.vocab.json"},
     ["data: HERE/text.txt by tokenizer HERE/table.vocab.json, 1 shard to train on, about 40,000 bytes of text; the "
      "number of tokens is known only when they are read",
      "note: the data have at most 9 different tokens, 3.5 % of the model's vocabulary of 256; --set model.vocab=9 "
      f"{SMALLER}"]),
    ("random", None, {"data.mask_documents": True, "data.end_token": 7},
     ["data: random tokens, to measure speed; nothing is learnt from them; attention within documents, which token 7 "
      "ends"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "path", "more", "lines"), SAID, ids=range(len(SAID)))
def test_the_lines_on_a_runs_data(files, source, path, more, lines):
    given = {"data.source": source, "data.path": path and f"HERE/{path}", "model.seq": 100, "train.steps": 50, **more}
    here = {key: value.replace("HERE", str(files)) if isinstance(value, str) else value for key, value in given.items()}
    assert [line.replace(str(files), "HERE") for line in describe_data(run_of(**here))] == lines


def epochs_of(line):
    return float(re.search(r"; ([\d.,]+) epochs in ", line)[1].replace(",", ""))


@pytest.mark.long(but="first")
@pytest.mark.parametrize(("source", "path"), [("stdlib", None), ("megatron", "stdlib"), ("stream", "stdlib")])
def test_standard_library_data_are_the_same_before_made(source, path, tmp_path, monkeypatch):
    monkeypatch.setenv("HPC_GPT_DATA", str(tmp_path))
    resolved = run_of(**{"data.source": source, "data.path": path})
    before = describe_data(resolved)
    ensure_data(resolved)
    after = describe_data(resolved)
    assert before[0].startswith("data: Python's own sources by tokenizer byte, ")
    assert epochs_of(after[0]) == pytest.approx(epochs_of(before[0]), rel=0.3 if source == "stream" else 1e-9)
    if source != "stream":
        assert before == after
        assert f"{stdlib_length() - int(stdlib_length() * 0.05):,} tokens" in before[0]
