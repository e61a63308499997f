"""What several clusters of one test session share: munge for trust, MariaDB and slurmdbd for accounting."""

import os
import secrets
import socket
import subprocess
from pathlib import Path

from tests.slurm.daemons import DaemonError, held_ports, start_daemon, stop_daemon, wait_until

_SBIN = "/usr/sbin:/sbin"


def daemon_environment() -> dict[str, str]:
    """PATH with sbin, and nothing of Slurm's or of an enclosing job."""
    keep = {key: text for key, text in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "SRUN"))}
    keep["PATH"] = f"{keep.get('PATH', '/usr/bin:/bin')}:{_SBIN}"
    return keep


class Services:
    """munged at once, accounting when first asked for. `stop` ends both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.munge_socket = folder / "munge.socket"
        self.dbd_port: int | None = None
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._held: socket.socket | None = None  # keeps slurmdbd's port
        self._slurmdbd: subprocess.Popen[bytes] | None = None
        self._dbd_environment: dict[str, str] = {}
        self._start_munge()

    def _start_munge(self) -> None:
        (key := self.folder / "munge.key").touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        log = self.folder / "munged.log"
        command = ["munged", "--foreground", f"--key-file={key}", f"--socket={self.munge_socket}"]
        command += [f"--{name}-file={self.folder}/munged.{name}" for name in ("log", "pid", "seed")]
        daemon = start_daemon(command, log, daemon_environment())
        self._daemons.append(daemon)
        wait_until("munged", self.munge_socket.exists, log, daemon)

    def start_accounting(self) -> int:
        """Starts MariaDB and slurmdbd unless they run; gives slurmdbd's port."""
        if self.dbd_port is None:
            self.dbd_port = self._first_slurmdbd(self._start_mariadb())
        return self.dbd_port

    def _start_mariadb(self) -> Path:
        data, database_socket, log = (
            self.folder / "mariadb",
            self.folder / "mariadb.socket",
            self.folder / "mariadb.log",
        )
        # Nothing here outlives the session, so nothing is flushed for the sake of a crash.
        settings = [
            "--no-defaults",
            "--user=root",
            f"--datadir={data}",
            f"--tmpdir={self.folder}",  # a server that starts removes the temporary tables of others in its own
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-log-file-size=8M",
            "--innodb-buffer-pool-size=32M",
            "--innodb-lock-wait-timeout=900",
            "--innodb-doublewrite=0",
        ]
        install = ["mariadb-install-db", *settings, "--auth-root-authentication-method=normal", "--skip-test-db"]
        environment = daemon_environment()
        made = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
        if made.returncode:
            raise DaemonError(f"mariadb-install-db: {made.stdout}\n{made.stderr}")
        command = ["mariadbd", *settings, "--skip-networking", f"--socket={database_socket}"]
        daemon = start_daemon([*command, f"--pid-file={self.folder}/mariadb.pid"], log, environment)
        self._daemons.append(daemon)
        wait_until("mariadbd", database_socket.exists, log, daemon)
        return database_socket

    def _first_slurmdbd(self, database_socket: Path) -> int:
        """Writes slurmdbd.conf and starts slurmdbd; gives its port."""
        conf = self.folder / "slurmdbd.conf"
        (self._held,) = held_ports(1)
        port = int(self._held.getsockname()[1])
        conf.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={self.munge_socket}\n"
            f"DbdHost={socket.gethostname()}\nDbdAddr=127.0.0.1\nDbdPort={port}\nSlurmUser=root\n"
            f"LogFile={self.folder}/slurmdbd.log\nPidFile={self.folder}/slurmdbd.pid\n"
            "StorageType=accounting_storage/mysql\nStorageHost=localhost\nStorageUser=root\nStorageLoc=slurm\n"
        )
        conf.chmod(0o600)
        # slurmdbd has no setting for the database's socket; the client library has this variable.
        self._dbd_environment = {
            **daemon_environment(),
            "MYSQL_UNIX_PORT": str(database_socket),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self.start_slurmdbd(port)
        return port

    def start_slurmdbd(self, port: int | None = None) -> None:
        """Starts slurmdbd, again after `stop_slurmdbd`; on the port of its configuration."""
        listening, log = port or self.dbd_port, self.folder / "slurmdbd.log"
        assert listening is not None
        daemon = self._slurmdbd = start_daemon(["slurmdbd", "-D"], log, self._dbd_environment)
        self._daemons.append(daemon)
        wait_until("slurmdbd", lambda: _listens(listening), log, daemon)

    def stop_slurmdbd(self) -> None:
        """slurmdbd goes away; the database stays."""
        assert self._slurmdbd is not None
        self._daemons.remove(self._slurmdbd)
        stop_daemon(self._slurmdbd)

    def stop(self) -> None:
        """Ends what was started, the last first."""
        for daemon in reversed(self._daemons):
            stop_daemon(daemon)
        self._daemons.clear()
        if self._held is not None:
            self._held.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
