"""One stand-in, as a process: hands its words, its folder and its files to the rehearsal and prints what that says.

Started as `python -I -S command.py FOLDER NAME WORDS…`, so it imports nothing of hpc-gpt. Exit 1 where there is no
rehearsal any more.
"""

import json
import os
import signal
import socket
import sys


def main() -> int:
    folder, name = sys.argv[1:3]
    connection = socket.socket(socket.AF_UNIX)
    try:
        # By way of a descriptor: a socket's own path may have 107 bytes.
        place = os.open(folder, os.O_PATH)
        connection.connect(f"/proc/self/fd/{place}/socket")
    except OSError:
        sys.stderr.write(f"{name}: error: the rehearsal is over\n")
        return 1
    # What srun is sent goes to its ranks; a Ctrl-C never comes here, as a job has no terminal.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        if name == "srun":
            signal.signal(number, lambda number, _frame: connection.sendall(f"{int(number)}\n".encode()))
    asked = {"name": name, "words": sys.argv[3:], "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(connection, [b"\n"], [0, 1, 2])
    connection.sendall(json.dumps(asked).encode() + b"\n")
    answer = b""
    while piece := connection.recv(1 << 16):
        answer += piece
    if not answer:
        sys.stderr.write(f"{name}: error: the rehearsal is over\n")
        return 1
    said = json.loads(answer)
    for stream, words in ((sys.stdout, said["out"]), (sys.stderr, said["err"])):
        stream.buffer.write(words.encode("utf-8", "surrogateescape"))
        stream.flush()
    return int(said["code"])


if __name__ == "__main__":
    sys.exit(main())
