# What every job of ours sources.
export NCCL_DEBUG=WARN
export NCCL_IB_HCA="mlx5_0,mlx5_1"
MEGATRON_PATH=/projects/llm/Megatron-LM
export HF_TOKEN=hf_AbCdEfGhIjKlMnOpQrStUvWx
