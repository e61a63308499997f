"""PyTorch's FSDP as others run it: it holds what our engine holds, with another loss."""

from hpc_gpt.engines.fsdp import Fsdp


class OthersFsdp(Fsdp):
    pass


STATES = OthersFsdp()
