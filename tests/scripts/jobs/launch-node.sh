#!/bin/bash
# Started once a node, with the config as its argument.
export NODE_RANK=$SLURM_NODEID
echo "$HOSTNAME: node $NODE_RANK"
torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 --node_rank=$NODE_RANK \
  --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT finetune.py --config "$1" "${@:2}"
