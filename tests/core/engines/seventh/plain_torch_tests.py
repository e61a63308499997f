"""Engine plain-torch: every verb has it, and it trains. That it trains the right model is in tests/distributed."""

import json

import pytest

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.settings.model_shape import ModelShape
from tests.cli.command import error_of, hpc_gpt, in_process

GPT2 = ("--model", "gpt2", "--engine", "plain-torch", "-G", "8", "--cluster", "h100-80g-8")


@pytest.mark.parametrize(("dtype", "held"), [("fp32", 4 + 4 + 8), ("bf16", 2 + 4 + 12), ("fp16", 2 + 4 + 12)])
def test_a_rank_holds_the_whole_model(dtype, held):
    training = Training(ModelShape(64, 2, 2), engine="plain-torch", dtype=dtype, dp=4)
    states = engine_named("plain-torch").state_bytes(training)
    assert states.parameters + states.gradients + states.optimizer == held


def test_plan_and_render():
    page = json.loads(in_process("plan", *GPT2, "--json").stdout)
    assert {(each["engine"], each["layout"]) for each in page["candidates"]} == {("plain-torch", "tp1-pp1-dp8")}
    assert page["candidates"][0]["stages"][0]["optimizer_gib"] > 0
    assert page["next"].startswith("hpc-gpt submit")
    # It has no template of its own.
    assert "-m hpc_gpt.trainer" in in_process("render", *GPT2).stdout


def test_what_it_lacks_is_refused_with_what_has_it():
    message, hint = error_of(in_process("render", *GPT2, "--tp", "2", "--dp", "4"))
    assert "tp 2 cannot run on engine plain-torch" in message
    assert "--tp 1" in hint
    assert error_of(in_process("render", *GPT2, "--zero-stage", "2"))[1] == "use --engine deepspeed-zero"


def test_help_has_it():
    assert "plain-torch: cp x dp\n" in in_process("help", "engines").stdout
    assert "plain-torch" in in_process("help", "keys").stdout


def test_a_run_and_its_report():
    alone = ("--cluster", "local", "-G", "1", "--tp", "1", "--pp", "1", "--set", "data.source=random")
    hpc_gpt("submit", "demo", "--smoke", "--engine", "plain-torch", *alone, "--wait", code=0)
    (record,) = json.loads(in_process("report", "--json").stdout)["records"]
    assert (record["engine"], record["gpus"], record["ended"]) == ("plain-torch", 1, "done")
    assert record["loss_last"] > 0
