"""Hosts of one machine, as namespaces: each has its own network address, name and mounts."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77  # exit status, as of automake's tests
_NETWORK = "10.77.0."
_INSIDE = "MTRAINING_INSIDE"  # set in the namespaces of the script


def enter_namespaces(programs: Sequence[str]) -> None:
    """Restarts the script in new namespaces, which end with it; exits where it cannot run."""
    missing = [name for name in ("ip", "nsenter", "unshare", *programs) if not shutil.which(name)]
    if os.geteuid() != 0 or missing:
        print(f"skipped: needs root and {', '.join(missing or ['namespaces'])}")
        sys.exit(SKIPPED)
    if _INSIDE in os.environ:
        return
    new = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    module = f"benchmarks.cluster.{Path(sys.argv[0]).stem}"
    command = ["unshare", *new, sys.executable, "-m", module, *sys.argv[1:]]
    sys.exit(subprocess.call(command, cwd=ROOT, env=os.environ | {_INSIDE: "1"}))


def run(*command: Any) -> str:
    """Runs a command to its end, and returns its output."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr}")
    return done.stdout


class Host:
    """A host of the network; its first process keeps its namespaces."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.address, self.port = name, f"{_NETWORK}{number}", f"port{number}"
        namespaces = ["unshare", "--net", "--uts", "--mount", "sleep", "infinity"]
        self._first = subprocess.Popen(namespaces)
        time.sleep(0.5)  # until it has its namespaces
        run("ip", "link", "add", self.port, "type", "veth", "peer", "eth0", "netns", self.pid)
        run("ip", "link", "set", self.port, "master", "bridge0", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self.run("ip", "link", "set", device, "up")
        self.run("hostname", name)

    @property
    def pid(self) -> int:
        return self._first.pid

    def command(self, *command: Any) -> list[str]:
        """A command that runs on this host."""
        enter = ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", "--root"]
        return [*enter, "env", f"--chdir={ROOT}", *map(str, command)]

    def run(self, *command: Any) -> str:
        return run(*self.command(*command))

    def unplug(self) -> None:
        """Cuts its network cable."""
        run("ip", "link", "set", self.port, "down")


def make_hosts(names: Sequence[str], folder: Path) -> list[Host]:
    """Connects hosts by a bridge, at 10.77.0.1 for the script itself, `control`."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "bridge0", "type", "bridge")
    run("ip", "addr", "add", f"{_NETWORK}1/24", "dev", "bridge0")
    run("ip", "link", "set", "bridge0", "up")
    run("hostname", "control")
    known = ["127.0.0.1 localhost", f"{_NETWORK}1 control"]
    known += [f"{_NETWORK}{number} {name}" for number, name in enumerate(names, 2)]
    (folder / "hosts").write_text("\n".join(known) + "\n")
    run("mount", "--bind", folder / "hosts", "/etc/hosts")
    return [Host(name, number) for number, name in enumerate(names, 2)]
