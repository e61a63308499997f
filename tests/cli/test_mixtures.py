"""A mixture of two token files, as its user meets it: what is printed, what is refused, and a run that resumes."""

import pytest

from tests.cli.command import error_of, in_process

LAYOUT = ("--cluster", "local", "--tp", "1", "--pp", "1", "--gpus", "1")
SMALL = ("--seq", "16", "--mbs", "2", "--gas", "1")


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, words in (("web", "words of the web, "), ("code", "x = y + 1; ")):
        (tmp_path / f"{name}.txt").write_text(words * 200)
        in_process("data", f"{name}.txt", "-o", f"{name}.tokens", code=0)
    text = 'extends = "demo"\n'
    for name, weight in (("web", 0.75), ("code", 0.25)):
        text += f'[data.mix.{name}]\npath = "{name}.tokens"\nweight = {weight}\n'
    (tmp_path / "mixed.toml").write_text(text + "[train]\nsteps = 100\n")
    return "mixed.toml"


def test_each_sources_share_tokens_and_epochs_are_printed(mixed, tmp_path):
    options = (mixed, *LAYOUT, *SMALL)
    lines = [
        "a mixture of 2 sources, 3,200 tokens in 100 steps of 2 samples",
        f"code: 25 %, 800 tokens, 0.385 epochs of 2,080 in {tmp_path}/code.tokens",
        f"web: 75 %, 2,400 tokens, 0.704 epochs of 3,408 in {tmp_path}/web.tokens",
    ]
    dry = in_process("submit", *options, "--dry-run").stdout
    assert [line for line in lines if line not in dry] == []
    rendered = in_process("submit", *options, "--dry-run", "--script")
    assert "web.tokens" in rendered.stdout
    assert str(tmp_path) not in rendered.stdout


def test_too_many_epochs_are_refused_and_nothing_is_written(mixed, tmp_path):
    options = (mixed, *LAYOUT, *SMALL, "--set", "data.mix.web.weight=[0.75,0]", "--set", "data.phases=[320]",
               "--set", "data.mix.code.weight=[0.25,1]", "--set", "train.steps=500")  # fmt: skip
    for more in ((), ("--dry-run",)):
        message, hint = error_of(in_process("submit", *options, *more, code=2))
        assert message == (
            "500 steps read parts of the mixture more than data.max_epochs = 4 times: code 7.58 times, 15,760 of 2,080 "
            "tokens"
        )
        assert "--set data.max_epochs=0 removes the limit" in hint
    assert not (tmp_path / "logs").exists()
    in_process("submit", *options, "--set", "data.max_epochs=8", "--dry-run", code=0)


def test_it_can_be_tried_measured_and_asked_for_in_help(mixed):
    smoke = in_process("submit", mixed, *LAYOUT, "--smoke", "--dry-run")
    assert (smoke.code, "Python's own sources" in smoke.stdout) == (0, True)
    assert "data.mix.NAME.weight" in in_process("help", "keys", "data").stdout
    in_process("render", mixed, *LAYOUT, code=0)


def test_what_export_will_refuse_is_said_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'extends = "moe-tiny"\n[model]\nqk_norm = false\nnorm_topk = false\n'
    (tmp_path / "own.toml").write_text(text)
    shape = (
        "--hidden",
        "64",
        "--layers",
        "2",
        "--heads",
        "4",
        "--vocab",
        "256",
        "--seq",
        "64",
        "--gpus",
        "2",
        "--gbs",
        "8",
    )
    keys = {"experts": 8, "experts_per_token": 2, "expert_ffn": 64, "router": "sigmoid", "router_bias": "true",
            "mlp": "swiglu", "norm": "rmsnorm", "positions": "rope", "bias": "none"}  # fmt: skip
    options = (*shape, "--engine", "fsdp", *(f"--set=model.{key}={value}" for key, value in keys.items()))
    local = ("--cluster", "local", "--gpus", "1")
    for words, nearest in (
        (("plan", *options), "Glm4MoeForCausalLM is the nearest, with model.shared_ffn=64"),
        (("init", "new", *options), "Glm4MoeForCausalLM is the nearest, with model.shared_ffn=64"),
        (("render", "own.toml", *local), "MixtralForCausalLM is the nearest, with model.norm_topk=true"),
        (("submit", "own.toml", *local, "--dry-run"), "MixtralForCausalLM is the nearest, with model.norm_topk=true"),
    ):
        done = in_process(*words, code=0)
        assert (done.stdout + done.stderr).count(f"so export will refuse it: {nearest}") == 1, words
    assert "no class" not in in_process("render", "moe-tiny", *local, code=0).stderr
