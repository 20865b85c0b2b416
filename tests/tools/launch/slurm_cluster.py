"""A real Slurm of two nodes on this machine, from Debian's packages: no systemd, no cgroups, nothing left behind.

The nodes are two daemons with loopback addresses of their own. Slurm's timers have a grain of up to a minute, and a
job that is queued again waits two: `hurry` tells Slurm to start it now.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.env import GLOO_INTERFACE, LOCAL_RAY_ENVIRONMENT
from tests.packages import program
from tests.waiting import wait_until

NODES = {"n0": "127.0.0.1", "n1": "127.0.0.2"}
_START_TIMEOUT_S = 300.0
_PENDING_S = 10.0

CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
KillWait=10
SlurmdTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


@dataclass(frozen=True, kw_only=True)
class SlurmCluster:
    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]]

    @property
    def environment(self) -> dict[str, str]:
        # A Ray of one machine, as other tests start it, would let no other node join.
        outer = {name: value for name, value in os.environ.items() if name not in LOCAL_RAY_ENVIRONMENT}
        # The second node's address is one of loopback's, though no interface lists it: gloo would look elsewhere.
        return {**outer, "SLURM_CONF": str(self.folder / "slurm.conf"), GLOO_INTERFACE.name: "lo"}

    def ask(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=300, check=False)
        return done.stdout.strip()

    def submit(self, script: Path, *options: str) -> str:
        """The job's number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        words = dict(word.partition("=")[::2] for word in self.ask("scontrol", "show", "job", job).split())
        return words.get(name, "")

    def wait(self, job: str, *states: str, timeout_s: float) -> str:
        """Until the job is in one of the states."""
        self.wait_for(job, lambda: self.field(job, "JobState") in states, timeout_s=timeout_s)
        return self.field(job, "JobState")

    def wait_for(self, job: str, holds: Callable[[], bool], *, timeout_s: float) -> None:
        """A job that was queued again need not wait for its two minutes."""
        deadline = time.monotonic() + timeout_s
        last = time.monotonic()
        while not holds():
            assert time.monotonic() < deadline, f"after {timeout_s:g} s: {self.ask('scontrol', 'show', 'job', job)}"
            if self.field(job, "JobState") != "PENDING":
                last = time.monotonic()
            # Not at once: a node that still ends the attempt before refuses the next one.
            elif time.monotonic() - last > _PENDING_S:
                self.hurry(job)
                last = time.monotonic()
            time.sleep(0.5)

    def hurry(self, job: str) -> None:
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")


@contextmanager
def slurm_cluster(folder: Path, *, has_spare: bool = False) -> Iterator[SlurmCluster]:
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "state").mkdir()
    nodes = NODES | ({"n2": "127.0.0.3"} if has_spare else {})
    ports = _free_ports(1 + len(nodes))
    with ExitStack() as stack:
        daemons: dict[str, subprocess.Popen[bytes]] = {}
        cluster = SlurmCluster(folder=folder, daemons=daemons)
        _write_config(folder, ports[0], dict(zip(nodes.items(), ports[1:], strict=True)))
        stack.callback(_end_steps, folder)
        daemons["munged"] = stack.enter_context(_daemon(cluster, "munged", *_munge_words(folder)))
        _wait_for(lambda: (folder / "munge.socket").exists(), "munged")
        daemons["slurmctld"] = stack.enter_context(_daemon(cluster, "slurmctld", "-D", "-c"))
        for name in nodes:
            daemons[name] = stack.enter_context(_daemon(cluster, "slurmd", "-D", "-N", name))
        _wait_for(lambda: cluster.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(nodes)), "the nodes")
        yield cluster
        cluster.ask("scancel", "--full", "--user", str(os.getuid()))
        _wait_for(lambda: cluster.ask("squeue", "-h") == "", "the end of all jobs")


def _write_config(folder: Path, port: int, nodes: Mapping[tuple[str, str], int]) -> None:
    """Write the configuration of nodes with names and addresses, at their ports."""
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    user = psutil.Process().username()
    config = CONFIG.format(folder=folder, user=user, port=port)
    cpus = os.cpu_count()
    for (name, address), of_node in nodes.items():
        host = socket.gethostname()
        config += f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={of_node} CPUs={cpus}\n"
    (folder / "slurm.conf").write_text(config)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _munge_words(folder: Path) -> list[str]:
    options = {
        "--key-file": "munge.key",
        "--socket": "munge.socket",
        "--pid-file": "munged.pid",
        "--log-file": "munged.log",
        "--seed-file": "munged.seed",
    }
    return ["--foreground", "--force", *(f"{option}={folder / name}" for option, name in options.items())]


@contextmanager
def _daemon(cluster: SlurmCluster, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [program(words[0]), *words[1:]]
    with (cluster.folder / f"{words[0]}.out").open("ab") as output:
        process = subprocess.Popen(
            command,
            env=cluster.environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=60)


def _end_steps(folder: Path) -> None:
    """Step daemons outlive a daemon that was killed on purpose; theirs is the environment of this cluster."""
    for _ in range(3):
        left = [process for process in psutil.process_iter() if _is_of(process, folder)]
        for process in left:
            process.kill()
        if not left:
            return
        psutil.wait_procs(left, timeout=5)


def _is_of(process: psutil.Process, folder: Path) -> bool:
    """By the bytes: a step daemon has written its title over the first variables, and psutil reads no further."""
    try:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        return f"SLURM_CONF={folder}/slurm.conf\0".encode() in environment and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, OSError):
        return False


def _wait_for(holds: Callable[[], bool], what: str) -> None:
    wait_until(holds, within_s=_START_TIMEOUT_S, told=lambda: what)


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [listener.getsockname()[1] for listener in listeners]
