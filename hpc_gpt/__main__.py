"""The start of the program, as `hpc-gpt` and as `python -m hpc_gpt`."""

import signal
import sys


def main() -> None:
    """Runs the command and exits. Ctrl-C prints a line and gives exit code 130, also while modules are imported."""
    code: str | int | None = 130
    try:
        from hpc_gpt.cli import main as command

        command()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
    # Python's own shutdown has nothing more to interrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


if __name__ == "__main__":
    main()
