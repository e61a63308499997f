"""The program's first lines: `hpc-gpt`, and `python -m hpc_gpt`, which is the same."""

import signal
import sys


def main() -> None:
    """Runs the command and exits. A Ctrl-C is a line and exit code 130, also while modules are imported."""
    code: str | int | None = 130
    try:
        from hpc_gpt.cli import main as command

        command()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
    # Python's own end has nothing more to interrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


if __name__ == "__main__":
    main()
