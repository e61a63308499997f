"""What launchers and shells say of processes that ended: torchelastic, deepspeed, bash, and this project's ranks."""

from __future__ import annotations

from hpc_gpt.readers.pattern import Dialect, Pattern, raised

DIALECT = Dialect(
    name="launchers",
    patterns=(
        # torchelastic's report: a line each for host, rank and exit code, joined by causes/blame.py
        Pattern("failure", "Root Cause", r"(?P<words>Root Cause \(first observed failure\))", ended="error", echo=True),
        Pattern("failure", "rror", raised("ChildFailedError"), ended="error", echo=True),
        Pattern(
            "failure",
            "host  ",
            r"^.{0,60}?(?P<words>host {2,10}: (?P<node>[A-Za-z][\w.-]{0,80}))\s{0,4}$",
            ended="error",
            echo=True,
        ),
        Pattern(
            "failure",
            "(local_rank",
            r"^.{0,60}?(?P<words>rank {2,10}: (?P<rank>\d{1,7}) \(local_rank: \d{1,7}\))",
            ended="error",
            echo=True,
        ),
        Pattern(
            "failure",
            "exit",
            r"^.{0,60}?(?P<words>exitcode {2,10}: (?!-15\b)-?\d{1,4} \(pid: \d{1,10}\))",
            ended="error",
            echo=True,
        ),
        Pattern(
            "failure",
            "exit",
            r"^.{0,60}?(?P<words>exitcode {2,10}: -15 \(pid: \d{1,10}\))",
            ended="cancelled",
            echo=True,
        ),
        Pattern(
            "failure",
            "exit",
            r"(?P<words>failed \(exitcode: -?\d{1,4}\) local_rank: \d{1,7} \(pid: "
            r"\d{1,10}\).{0,200})",
            ended="error",
            echo=True,
        ),
        Pattern(
            "failure",
            "ignal",
            r"(?P<words>Sending process \d{1,10} closing signal \w{1,20})",
            ended="cancelled",
            echo=True,
        ),
        Pattern(
            "failure",
            "ignal",
            r"(?P<words>(?:\w{1,60}\.){0,8}SignalException: Process \d{1,10} got signal: "
            r"\d{1,3})",
            ended="cancelled",
            echo=True,
        ),
        # deepspeed's
        Pattern(
            "failure",
            "exit",
            r"(?P<words>exits with return code = (?!0\b)-?\d{1,4})",
            ended="error",
            echo=True,
        ),
        Pattern("failure", "Kill", r"(?P<words>Killing subprocess \d{1,10})", ended="cancelled", echo=True),
        Pattern(
            "failure",
            "exit",
            r"pdsh@\S{1,80}: (?P<node>[\w.-]{1,80}): (?P<words>ssh exited with "
            r"exit code (?!0\b)\d{1,3})",
            ended="error",
            echo=True,
        ),
        # signals
        Pattern(
            "failure",
            "Segmentation fault",
            r"^(?:(?:ba|z)?sh: {1,8}\d{1,10} )?(?P<words>Segmentation fault\b.{0,200})",
            ended="error",
        ),
        Pattern(
            "failure",
            ": line ",
            r": line \d{1,6}: {1,8}(?P<words>\d{1,10} (?:Segmentation fault|Bus error"
            r"|Illegal instruction|Floating point exception).{0,200})",
            ended="error",
        ),
        Pattern(
            "failure",
            ": line ",
            r": line \d{1,6}: {1,8}(?P<words>\d{1,10} (?:Killed|Aborted).{0,200})",
            ended="error",
            echo=True,
        ),
        Pattern(
            "failure",
            ": line ",
            r": line \d{1,6}: {1,8}(?P<words>\d{1,10} Terminated.{0,200})",
            ended="cancelled",
            echo=True,
        ),
        Pattern(
            "failure",
            ": line ",
            r": line \d{1,6}: (?P<words>[^:]{1,200}: (?:command not found|No such file or "
            r"directory|Permission denied|unbound variable).{0,100})",
            ended="user_error",
        ),
        Pattern(
            "failure",
            "rror",
            r"(?P<words>Fatal Python error: (?:Segmentation fault|Bus error"
            r"|Illegal instruction|Floating|init|Py|none_dealloc|deallocating).{0,200})",
            ended="error",
        ),
        Pattern("failure", "rror", r"(?P<words>Fatal Python error: Aborted.{0,100})", ended="error", echo=True),
        Pattern("failure", "ignal", r"(?P<words>Caught signal (?:4|7|8|11) \(.{1,200})", ended="error"),
        Pattern(
            "failure",
            "ignal",
            r"(?P<words>Signal: (?:Segmentation fault|Bus error|Illegal instruction) \(\d{1,2}\))",
            ended="error",
        ),
        Pattern("failure", "ignal", r"(?P<words>Signal: Aborted \(6\))", ended="error", echo=True),
        Pattern(
            "failure",
            "SIGTERM",
            r"(?P<words>(?:[Rr]eceived|[Cc]aught|[Gg]ot) (?:signal )?(?:termination )?"
            r"(?:signal )?SIGTERM.{0,100})",
            ended="cancelled",
            echo=True,
        ),
        # mpirun's
        Pattern(
            "failure",
            "exit",
            r"(?P<words>process rank (?P<rank>\d{1,7}) with PID \d{1,10} on node (?P<node>[\w.-]{1,80}) exited on signal "
            r"(?!15\b)\d{1,3}.{0,60})",
            ended="error",
            echo=True,
        ),
        # Lightning's
        Pattern(
            "failure",
            "KeyboardInterrupt",
            r"(?P<words>Detected KeyboardInterrupt\b.{0,100})",
            ended="cancelled",
            echo=True,
        ),
        # this project's ranks
        Pattern(
            "failure",
            "lost another rank",
            r"^(?:\d{1,7}: )?(?P<words>rank (?P<rank>\d{1,7}) lost another rank: "
            r".{0,300})",
            ended="error",
            echo=True,
        ),
        Pattern(
            "failure",
            "rror",
            r"^(?:\d{1,7}: )?(?P<words>rank (?P<rank>\d{1,7}): Error: .{0,300})",
            ended="user_error",
        ),
    ),
    specimen="""\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
  host      : r6i4n5
  rank      : 3 (local_rank: 3)
  exitcode  : 1 (pid: 4711)
  exitcode  : -15 (pid: 4712)
ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 2 (pid: 4713) of binary: /usr/bin/python3
WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 4714 closing signal SIGTERM
torch.distributed.elastic.multiprocessing.api.SignalException: Process 4710 got signal: 15
[2021-05-28 22:29:50,309] [ERROR] [launch.py:321:sigkill_handler] ['/usr/bin/python3', '-u', 'train.py', '--local_rank=3'] exits with return code = 1
[2021-05-28 22:29:50,309] [INFO] [launch.py:315:sigkill_handler] Killing subprocess 4711
pdsh@r6i4n5: r6i4n6: ssh exited with exit code 1
/var/spool/slurmd/job1999618/slurm_script: line 43:  4711 Segmentation fault      (core dumped) python train.py
/var/spool/slurmd/job1999618/slurm_script: line 43:  4711 Killed                  python train.py
/var/spool/slurmd/job1999618/slurm_script: line 43:  4711 Terminated              python train.py
/var/spool/slurmd/job1999618/slurm_script: line 12: deepspeed: command not found
bash:  4711 Segmentation fault      python train.py
Fatal Python error: Segmentation fault
Fatal Python error: Aborted
[r6i4n5:4711 :0:4800] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x8)
[r6i4n5:04711] Signal: Segmentation fault (11)
[r6i4n5:04711] Signal: Aborted (6)
Received SIGTERM: 15
mpirun noticed that process rank 3 with PID 4711 on node r6i4n5 exited on signal 9 (Killed).
Detected KeyboardInterrupt, attempting graceful shutdown ...
rank 2 lost another rank: RuntimeError: Connection closed by peer
rank 0: Error: preset gpt9 is not known
""",
    seen="torch/distributed/elastic, deepspeed/launcher/launch.py, bash, glibc, UCX, Open MPI, Lightning, hpc-gpt",
)
