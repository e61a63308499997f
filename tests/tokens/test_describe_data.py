"""What is said of a run's data: source, tokens, epochs, and a vocabulary of which they use little."""

import re

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.trainer.tokens import description
from hpc_gpt.trainer.tokens.build import build_megatron, build_tokens, stdlib_length
from hpc_gpt.trainer.tokens.run_data import ensure_data
from hpc_gpt.trainer.tokens.samples import open_samples


def describe_data(resolved):
    """The lines as they are printed."""
    return [str(line) for line in description.describe_data(resolved)]


def run_of(**overrides):
    keys = {name.replace("__", "."): value for name, value in overrides.items()}
    return resolve(load_experiment("demo", {"layout.tp": 1, "layout.pp": 1, **keys}), load_profile("local"))


@pytest.fixture
def text(tmp_path):
    (path := tmp_path / "text.txt").write_text("abcdefgh" * 5000)
    return path


def epochs_of(line):
    return float(re.search(r"; ([\d.,]+) epochs in ", line)[1].replace(",", ""))


@pytest.mark.parametrize("source", ["tokens", "megatron"])
def test_epochs_are_all_steps_samples_over_the_files(text, tmp_path, source):
    path = tmp_path / "made"
    (build_tokens if source == "tokens" else build_megatron)(text, path)
    given = {"data__source": source, "data__path": str(path), "model__seq": 100, "train__steps": 50}
    resolved = run_of(**given)
    line, note = describe_data(resolved)
    samples = open_samples(resolved)
    assert note.startswith(f"note: each token is read {epochs_of(line):g} times: above data.max_epochs = 4 ")
    assert len(describe_data(run_of(**{**given, "train__steps": 5}))) == 1
    assert line.startswith(f"data: {path}")
    assert f" {int(40001 * 0.95) + 1:,} tokens to train on; " in line
    assert epochs_of(line) == pytest.approx(50 * resolved.batch.global_batch / samples.train_size, rel=0.01)
    assert ("by tokenizer byte" in line) is (source == "tokens")  # Megatron's files do not say


@pytest.mark.parametrize(("source", "path"), [("stdlib", None), ("megatron", "stdlib"), ("stream", "stdlib")])
def test_standard_library_data_are_the_same_before_made(source, path):
    resolved = run_of(data__source=source, data__path=path)
    before = describe_data(resolved)
    ensure_data(resolved)
    after = describe_data(resolved)
    assert before[0].startswith("data: Python's own sources by tokenizer byte, ")
    assert epochs_of(after[0]) == pytest.approx(epochs_of(before[0]), rel=0.3 if source == "stream" else 1e-9)
    if source != "stream":
        assert before == after
        assert f"{stdlib_length() - int(stdlib_length() * 0.05):,} tokens" in before[0]


def test_shards_of_another_tokenizer_have_no_number_of_tokens(text):
    table = text.with_name("made.vocab.json")
    build_tokens(text, text.with_name("made"), "char")
    resolved = run_of(data__source="stream", data__path=str(text), data__tokenizer=str(table), data__eval_fraction=0.0,
                      train__eval_every=0, data__workers=0, layout__gpus=1)  # fmt: skip
    line, _ = describe_data(resolved)
    assert ", 1 shard to train on, about 40,000 bytes of text; " in line
    assert "epochs" not in line


@pytest.mark.parametrize(("vocab", "said"), [(2560, False), (2561, True), (50257, True)])
def test_a_vocabulary_used_by_less_than_a_tenth_is_said(vocab, said):
    _, *notes = describe_data(run_of(model__vocab=vocab))
    assert bool(notes) is said
    if said:
        assert (
            f"at most 256 different tokens, {25600 / vocab:.2g} % of the model's vocabulary of {vocab:,}; " in notes[0]
        )


def test_random_tokens_are_said_to_be_random():
    (line,) = describe_data(run_of(data__source="random"))
    assert line == "data: random tokens, to measure speed; nothing is learnt from them"


def test_the_token_that_ends_a_document_is_said():
    (line,) = describe_data(run_of(data__mask_documents=True))
    assert line.endswith("; attention within documents, which token 0 ends")
    (line,) = describe_data(run_of(data__source="random", data__mask_documents=True, data__end_token=7))
    assert line.endswith("; attention within documents, which token 7 ends")
