"""Searches for the tests of what is made of them."""

from dataclasses import replace

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.planner.machine import machine_of
from hpc_gpt.planner.question import Question
from hpc_gpt.planner.search import search


def searched_for(name="48b", gpus=64, cluster="jean-zay-v100-32g", host_memory_gib=149.0, **fixed):
    profile = load_profile(cluster)
    model = preset(name)
    asked = Question(
        model, gpus, profile.gpus_per_node, "fp16", 1024,
        engines=("deepspeed-3d", "deepspeed-zero", "fsdp", "megatron-lm"), fixed=fixed,
    )  # fmt: skip
    return search(asked, replace(machine_of(profile), host_memory_gib=host_memory_gib)), model
