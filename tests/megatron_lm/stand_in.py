"""pretrain_gpt.py of a stand-in for Megatron-LM: its arguments, lines, checkpoints and signals, and nothing learnt.

Copied into a checkout of the tests' own. Its "weights" are one number that every iteration changes, so that a resume
that begins at the wrong one shows. What it does as Megatron-LM does: it parses its arguments by megatron/training/
arguments.py; its last rank prints the iterations, a line for each --log-interval and for the first; a SIGTERM to any
rank makes all save and leave at the end of the iteration (--exit-signal-handler); it saves every --save-interval and
at the end, and writes latest_checkpointed_iteration.txt last.

STAND_IN_STEP_S: seconds an iteration takes. STAND_IN_FAIL: an iteration in which rank 1 fails, and its words.
STAND_IN_LOG_LATE: no line before this iteration. STAND_IN_HANG: an iteration in which rank 1 stands still.
STAND_IN_AWAIT: an iteration in which each rank waits for SIGTERM.
"""

import argparse
import json
import os
import signal
import socket
import sys
import time
from datetime import datetime
from pathlib import Path

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
START = 8.0


def meet():
    """Connections between rank 0 and the others, at MASTER_ADDR and MASTER_PORT as torch's env:// would be."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if RANK == 0:
        server = socket.create_server(address)
        peers = [server.accept()[0] for _ in range(WORLD - 1)]
        return [peer.makefile("rw") for peer in peers]
    for _ in range(6000):  # five minutes
        try:
            return [socket.create_connection(address).makefile("rw")]
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise RuntimeError("rank 0 did not listen")


def any_rank(peers, flag):
    """Whether the flag is up on any rank."""
    if RANK == 0:
        flag = any([flag, *(hear(peer) for peer in peers)])
    for peer in peers:
        peer.write(f"{int(flag)}\n")
        peer.flush()
    return flag if RANK == 0 else hear(peers[0])


def hear(peer):
    word = peer.readline()
    if not word:
        raise RuntimeError("Connection closed by peer")
    return bool(int(word))


def save(args, iteration, weight):
    if RANK == 0:
        (folder := Path(args.save) / f"iter_{iteration:07d}").mkdir(parents=True, exist_ok=True)
        (folder / "model.json").write_text(json.dumps(weight))
        (Path(args.save) / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def main():
    from megatron.training.arguments import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    args = parser.parse_args()
    received = []
    if args.exit_signal_handler:
        signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    tracker = Path(args.load) / "latest_checkpointed_iteration.txt"
    iteration, weight = int(tracker.read_text()) if tracker.exists() else 0, START
    if iteration:
        weight = json.loads((Path(args.load) / f"iter_{iteration:07d}" / "model.json").read_text())
    if args.data_path:
        for prefix in args.data_path[1::2] or args.data_path:  # of several each follows its weight
            assert Path(f"{prefix}.idx").is_file()
        print("reads", *args.data_path, flush=True)
    peers = meet()
    if RANK == 0:
        print(f"[before the start of training step] datetime: {datetime.now()}", flush=True)
    fail_at, _, fail_words = os.environ.get("STAND_IN_FAIL", "0:").partition(":")
    late = int(os.environ.get("STAND_IN_LOG_LATE", "0"))
    first = iteration + 1
    while iteration < args.train_iters:
        began = time.perf_counter()
        time.sleep(float(os.environ.get("STAND_IN_STEP_S", "0.01")))
        iteration += 1
        weight *= 0.99
        while iteration == int(os.environ.get("STAND_IN_HANG", "0")) and RANK == 1:
            time.sleep(0.1)
        while iteration == int(os.environ.get("STAND_IN_AWAIT", "0")) and not received:
            time.sleep(0.05)
        if iteration == int(fail_at) and RANK == 1:
            raise RuntimeError(fail_words)
        stop = any_rank(peers, bool(received))
        if RANK == WORLD - 1 and iteration >= late and (iteration % args.log_interval == 0 or iteration == first):
            print(
                f" [{datetime.now()}] iteration {iteration:8d}/{args.train_iters:8d} |"
                f" consumed samples: {iteration * args.global_batch_size:12d} |"
                f" elapsed time per iteration (ms): {1000 * (time.perf_counter() - began):.1f} |"
                f" learning rate: {args.lr:.6E} | global batch size: {args.global_batch_size:5d} |"
                f" lm loss: {weight:.6E} | loss scale: 1.0 | grad norm: 1.300 |"
                f" number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |",
                flush=True,
            )
        if stop:
            save(args, iteration, weight)
            if RANK == 0:
                print(f"[exiting program after receiving SIGTERM.] datetime: {datetime.now()}", flush=True)
            sys.exit()
        if args.save_interval and iteration % args.save_interval == 0:
            save(args, iteration, weight)
    save(args, iteration, weight)


if __name__ == "__main__":
    main()
