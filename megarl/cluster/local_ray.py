"""A Ray on this machine alone: one node for a private run, several for a rehearsal, with a network of their own.

It starts nodes and joins none.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megarl.config.recipe import ClusterConfig, RunConfig
from megarl.config.section import CPU_SLOT
from megarl.env import (
    LOCAL_RAY_ENVIRONMENT,
    RAY_AUTH_TOKEN_PATH,
    RAY_ENVIRONMENT,
    SEVERAL_NODES_ENVIRONMENT,
    current_environment,
    update_environment,
)
from megarl.errors import MachineError, PreemptedError
from megarl.system.guard import GuardLease, start_guarded, stop_guarded
from megarl.system.lease import (
    RAY_FOLDER,
    TOKEN_FILE,
    EarlyRay,
    LeasedGuard,
    PrivateLease,
    find_leased,
    remove_record,
    run_id_of,
)
from megarl.system.network import LOOPBACK
from megarl.system.run_lock import LOCKS_FOLDER

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 20.0
_START_TIMEOUT_S = 360.0
"""For one start; it begins with the imports of Ray."""
_RAY_TIMEOUT_S = 30.0
"""Time that Ray itself gives a node to register: a start that fails later than this was held up by a busy machine."""
_MAX_STARTS = 3
_MAX_SLOW_STARTS = 12
"""Starts of one node, of which at most `_MAX_STARTS` may fail for another reason than a busy machine."""
_POLL_S = 0.1
_AGENTS = ("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent")
_CLONE_NEWNET = 0x40000000
_BRIDGE = "nodes"
RAY_LOGS = "ray_logs"
"""The folder beside the log of the head that gets the logs of a Ray that failed."""
_RAY = "ray"
RAY_LOG = "ray.log"
"""That of the head."""
_KEPT_BYTES = 2**20
"""Bytes that are kept of each log of a Ray that failed."""
_STARTED = b"Ray runtime started"
"""A line in the output of `ray start`."""


class LocalRay:
    """The nodes of a Ray on this machine. All of them end with this process, or when the lease of it expires.

    Nodes are children in sessions of their own, not `ray.init()`: a signal to our process group must not end Ray before
    everything that runs on it is down. A single node listens on 127.0.0.1. Ray starts further nodes only beside a head
    with another address, so several have addresses in `network`, or loopback addresses of their own. The latter follow
    from the head's port, which no other Ray on this machine has: two rehearsals may run side by side.
    """

    def __init__(
        self,
        *,
        device: str,
        log_folder: Path,
        has_several_nodes: bool = False,
        network: NodeNetwork | None = None,
        lease: PrivateLease | None = None,
    ) -> None:
        self._lease = lease
        self._device = device
        self._network = network
        self.log_folder = log_folder
        self._has_several_nodes = has_several_nodes
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._last_words: list[str] = []
        # Only this user enters it: Ray makes its own folder in it, with sockets, writable for all.
        self.folder = private_folder() if lease is None else lease.of_guard.folder
        """Has the folder of Ray, and is removed with it."""
        (self._port,) = _free_ports(1)
        self.address = f"{self._address_of(0)}:{self._port}"
        """The head's, for processes that join."""

    def start_node(self, *, num_slots: int, num_gpus: int | None = None) -> str:
        """Start the head, or a further node after it; return the node's address. It may not have joined yet.

        `num_gpus` are declared whether they are there or not, to try a placement; without it Ray counts them.
        The object store takes what Ray takes by default: 30 % of the free memory, less where /dev/shm is smaller.
        """
        number = len(self._nodes)
        node = self._address_of(number)
        if number == 0:
            words = [
                "--head",
                "--port",
                self._port,
                "--include-dashboard",
                "false",
                "--no-monitor",  # of an autoscaler
                "--temp-dir",
                str(self.folder / _RAY),
            ]
        else:
            self.wait_started()
            words = ["--address", self.address]
        # A log monitor sends the output of workers to the driver, which does not want it.
        words += ["--node-ip-address", node, "--num-cpus", str(num_slots + 2), "--include-log-monitor", "false"]
        if self._device == "cpu":
            words += ["--resources", json.dumps({CPU_SLOT: num_slots})]
        if num_gpus is not None:
            words += ["--num-gpus", str(num_gpus)]
        self._last_words = words
        self._start(node, number)
        return node

    def _start(self, node: str, number: int) -> None:
        environment = {**current_environment(), **(SEVERAL_NODES_ENVIRONMENT if self._has_several_nodes else {})}
        inside = [] if self._network is None else self._network.entering(number)
        command = [*inside, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += [*self._last_words, *self._agent_ports()]
        lease = GuardLease(folder=self.folder, seconds=0) if self._lease is None else self._lease.of_guard
        with self.log_of(number).open("ab" if node in self._nodes else "wb") as log:
            self._nodes[node] = start_guarded(command, environment=environment, output=log, lease=lease)

    def _agent_ports(self) -> Iterator[str]:
        """Yield options that name a free port for each agent of a node, other ones at each start.

        Without them a raylet ends itself when an agent has not reported its port within 15 s, as on a busy machine.
        The head's own port is free until it listens, and may come back among them: Ray refuses a port named twice.
        """
        ports = [port for port in _free_ports(len(_AGENTS) + 1) if port != self._port]
        for agent, port in zip(_AGENTS, ports, strict=False):
            yield from (f"--{agent}-port", port)

    def log_of(self, number: int) -> Path:
        return self.log_folder / (RAY_LOG if number == 0 else f"ray_node_{number}.log")

    def as_early(self) -> EarlyRay:
        """Return the head as a process sees it that did not start it."""
        head = self._nodes[self._address_of(0)]
        assert head.stdin is not None, "it has a pipe to its guard"
        return EarlyRay(
            address=self.address,
            guard=LeasedGuard.of(self.folder, head.pid),
            log=self.log_of(0).absolute(),
            began=time.time(),
            pipe=head.stdin,
        )

    @property
    def addresses(self) -> list[str]:
        """The addresses of all nodes, lost ones included."""
        return list(self._nodes)

    def pid_of(self, node: str) -> int:
        """Return the process above all others of a node."""
        return self._nodes[node].pid

    def kill_node(self, node: str) -> None:
        """End every process of a node at once, as a power failure would."""
        stop_guarded(self._nodes[node], grace_s=0.0)

    def stop(self) -> None:
        """Stop all nodes, the head last; it alone ends in order, since nothing runs on the others any more."""
        if self._lease is not None and not self._lease.give_back():
            return
        for node, guard in reversed(self._nodes.items()):
            stop_guarded(guard, grace_s=_STOP_GRACE_S if node == self._address_of(0) else 0.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _address_of(self, number: int) -> str:
        if self._network is not None:
            return self._network.address_of(number)
        high, low = divmod(int(self._port), 256)
        return f"127.{high}.{low}.{number + 2}" if self._has_several_nodes else LOOPBACK

    def wait_started(self) -> None:
        """Wait until the last node has started: the next one would give up without a head, or take its ports."""
        number, began = len(self._nodes) - 1, time.monotonic()
        node, log = self._address_of(number), self.log_of(number)
        num_slow = num_failed = 0
        while _STARTED not in log.read_bytes():
            took_s = time.monotonic() - began
            if self._nodes[node].poll() is None and took_s < _START_TIMEOUT_S:
                time.sleep(_POLL_S)
                continue
            num_slow, num_failed = num_slow + (took_s > _RAY_TIMEOUT_S), num_failed + (took_s <= _RAY_TIMEOUT_S)
            what = f"node {number} of the local Ray {_why_not(took_s)}"
            if num_failed == _MAX_STARTS or num_slow == _MAX_SLOW_STARTS:
                raise MachineError(f"{what}, at the last of {num_slow + num_failed} tries; log: {log}")
            logger.warning("%s and is started again; log: %s", what, log)
            stop_guarded(self._nodes[node], grace_s=0.0)
            self._start(node, number)
            began = time.monotonic()
        if self._lease is not None:
            self._lease.started(self.address, self._nodes[node].pid)


def _why_not(seconds: float) -> str:
    """Return why a start that took so long failed, as the end of a sentence."""
    if seconds <= _RAY_TIMEOUT_S:
        return "does not start"
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return f"was not ready in time ({seconds:.0f} s; load {load:.0f} on {cores} cores: end what runs beside it)"


@contextmanager
def _keeping_logs(folder: Path, log_folder: Path) -> Iterator[None]:
    """Copy the logs of the Ray in `folder` if the block fails: its folder is removed with it."""
    try:
        yield
    except PreemptedError:
        raise
    except Exception:
        _copy_logs(folder, log_folder / RAY_LOGS)
        raise


def _copy_logs(folder: Path, into: Path) -> None:
    """Copy the last bytes of every log of a private Ray; one that cannot be read is left out."""
    logs = folder / _RAY / "session_latest" / "logs"
    for path in sorted(logs.rglob("*")):
        with suppress(OSError):
            if path.is_symlink() or not path.is_file() or not path.stat().st_size:
                continue
            copy = into / path.relative_to(logs)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _KEPT_BYTES))
                copy.write_bytes(file.read(_KEPT_BYTES))


def private_folder() -> Path:
    """Make a folder that only this user enters. In /tmp: the path of a socket must be short."""
    return Path(tempfile.mkdtemp(prefix=Path(RAY_FOLDER).name, dir=Path(RAY_FOLDER).parent))


@contextmanager
def running_ray(lease: PrivateLease, guard: LeasedGuard, log_folder: Path) -> Iterator[None]:
    """Use a Ray that another process has started, and end it after the block."""
    try:
        with _keeping_logs(lease.of_guard.folder, log_folder):
            yield
    finally:
        if lease.give_back():
            guard.end(grace_s=_STOP_GRACE_S)


def _free_ports(number: int) -> list[str]:
    """Return ports that are free on every address: a node with another address than 127.0.0.1 listens on all."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("", 0))) for _ in range(number)]
        return [str(listener.getsockname()[1]) for listener in listeners]


@contextmanager
def local_ray(nodes: LocalRay, *, num_slots: int, num_gpus: int | None = None) -> Iterator[LocalRay]:
    """Start the head and stop every node after the block."""
    try:
        with _keeping_logs(nodes.folder, nodes.log_folder):
            nodes.start_node(num_slots=num_slots, num_gpus=num_gpus)
            nodes.wait_started()
            yield nodes
    finally:
        nodes.stop()


@contextmanager
def early_ray(run: RunConfig, cluster: ClusterConfig, *, num_slots: int) -> Iterator[EarlyRay | None]:
    """Start the private Ray of a run; after the block it has ended, unless another driver of the run has it.

    None where an earlier driver has left one, or no folder can be made: the driver of the run then says why.
    """
    run_folder = run.folder / run.name
    if find_leased(run_folder) is not None:
        yield None
        return
    folder = _new_folder()
    # Beside the runs: that of an earlier one is moved once this one is checked, and a log can be renamed into it.
    logs = run_folder.parent / LOCKS_FOLDER / folder.name
    made = [each for each in (logs, *logs.parents) if not each.exists()]
    lease = PrivateLease(run_folder, folder=folder, program="", seconds=cluster.lease_s)
    nodes, is_started = LocalRay(device=run.device, log_folder=logs, lease=lease), False
    try:
        with suppress(OSError):
            logs.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            logs.mkdir(mode=0o700)
            _admit_us(folder)
            nodes.start_node(num_slots=num_slots)
            is_started = True
        yield nodes.as_early() if is_started else None
    finally:
        leased = find_leased(run_folder)
        if leased is None or leased.guard is None or leased.guard.folder != str(folder):
            if is_started:
                nodes.kill_node(LOOPBACK)
            shutil.rmtree(folder, ignore_errors=True)
        (logs / RAY_LOG).unlink(missing_ok=True)
        for each in made:
            with suppress(OSError):  # others use it meanwhile
                each.rmdir()


def take_early(lease: PrivateLease, log_folder: Path) -> LeasedGuard | None:
    """Wait until the Ray that was started early has started; return its guard.

    None if it did not start: the driver then starts one, and says why if that one does not start either.
    """
    early = lease.early
    if early is None:
        return None
    deadline = time.monotonic() + _START_TIMEOUT_S
    while _STARTED not in early.log.read_bytes():
        if not early.guard.is_running or time.monotonic() > deadline:
            logger.warning("the Ray that was started while the run was checked does not start")
            early.guard.end(grace_s=0.0)
            _admit_us(lease.of_guard.folder)
            return None
        time.sleep(_POLL_S)
    shutil.move(early.log, log_folder / RAY_LOG)
    lease.started(early.address, early.guard.pid)
    return early.guard


class NodeNetwork:
    """A network of nodes on this machine: each has a network namespace of its own, behind one bridge.

    All of it is in a namespace that this process enters for good, and is held by open files: nothing outside of it
    changes, and it is gone when its last process has ended, even by a kill. Needs root, `ip` and `nsenter`. Namespaces
    go by the number of their node; the head, number 0, is in that of this process.
    """

    def __init__(self) -> None:
        """Raise MachineError with the reason if this machine does not allow it; nothing has changed then."""
        missing = [program for program in ("ip", "nsenter") if shutil.which(program) is None]
        if missing:
            raise MachineError(f"there is no {' and no '.join(missing)}")
        # Tried in a thread first, whose namespace ends with it.
        with ThreadPoolExecutor(1) as thread:
            os.close(thread.submit(self._lay_bridge).result())
        self._files: dict[int, int] = {0: self._lay_bridge()}

    def address_of(self, number: int) -> str:
        return f"10.0.0.{number + 1}"

    def entering(self, number: int) -> list[str]:
        """Return the words that run a command in a node's namespace, which is made at its first use."""
        if number not in self._files:
            with ThreadPoolExecutor(1) as thread:
                self._files[number] = thread.submit(_new_namespace).result()
            self._connect(number)
        return ["nsenter", f"--net={self._path(number)}"]

    def close(self) -> None:
        """Give up the namespaces, which end with their last process."""
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def _lay_bridge(self) -> int:
        """Put the calling thread into a namespace with a bridge; return the file that holds it."""
        file = _new_namespace()
        _ip("link", "set", "lo", "up")
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("address", "add", f"{self.address_of(0)}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        return file

    def _connect(self, number: int) -> None:
        inside = self.entering(number)
        port = f"node{number}"
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", self._path(number))
        _ip("link", "set", port, "master", _BRIDGE, "up")
        _ip("link", "set", "lo", "up", inside=inside)
        _ip("address", "add", f"{self.address_of(number)}/24", "dev", "eth0", inside=inside)
        _ip("link", "set", "eth0", "up", inside=inside)

    def _path(self, number: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self._files[number]}"


def _new_namespace() -> int:
    """Put the calling thread into a network namespace of its own; return a file that holds it."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise MachineError(f"a network namespace is refused: {os.strerror(ctypes.get_errno())}")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _ip(*words: str, inside: list[str] | None = None) -> None:
    done = subprocess.run([*(inside or []), "ip", *words], capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    if done.returncode:
        raise MachineError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def run_lease(
    run_folder: Path, program: str, cluster: ClusterConfig, *, is_continued: bool, early: EarlyRay | None = None
) -> PrivateLease:
    """Return the lease of a run's private Ray, with the one that an earlier driver left if it can be adopted.

    One that cannot is ended, and `early` is used if it still runs. `program` is a digest. The caller holds the run's
    lock: no other driver uses it.
    """
    seconds = cluster.lease_s
    leased = find_leased(run_folder)
    if leased is not None and leased.guard is not None:
        folder = Path(leased.guard.folder)
        is_same = (leased.program, leased.run_id) == (program, run_id_of(run_folder))
        if is_continued and seconds and is_same and _may_use_token(folder):
            lease = PrivateLease(run_folder, folder=folder, program=program, seconds=seconds, adopted=leased)
            with suppress(OSError):
                lease.renew()  # until Ray is joined
            return lease
        leased.guard.end(grace_s=_STOP_GRACE_S)
    if early is not None and early.guard.is_running:
        return PrivateLease(run_folder, folder=Path(early.guard.folder), program=program, seconds=seconds, early=early)
    return PrivateLease(run_folder, folder=_new_folder(), program=program, seconds=seconds)


def _new_folder() -> Path:
    """Return a name for the folder of a Ray. It is made when it is used; the guard of Ray removes it."""
    return Path(f"{RAY_FOLDER}{secrets.token_hex(4)}")


def end_left(run_folder: Path) -> None:
    """End what a driver left that was killed behind its last step, where no other one adopts it.

    The caller holds the run's lock. On a Ray that was joined it ends with its lease.
    """
    leased = find_leased(run_folder)
    if leased is not None and leased.guard is not None:
        leased.guard.end(grace_s=_STOP_GRACE_S)
    remove_record(run_folder)


@contextmanager
def private_ray(lease: PrivateLease | None = None) -> Iterator[None]:
    """Set the environment for a private Ray, with its token in a file that only this user can read.

    The folder of the file is removed at the end. That of an adopted Ray has a token already.
    """
    own = private_folder() if lease is None else lease.of_guard.folder
    _admit_us(own, is_made=lease is None or lease.adopted is not None or lease.early is not None)
    try:
        yield
    finally:
        if lease is None or lease.is_ours:
            shutil.rmtree(own, ignore_errors=True)


def _admit_us(folder: Path, *, is_made: bool = False) -> None:
    """Set the environment for the Ray in a folder, which has its token; `is_made`: the folder is there already."""
    if not is_made:
        folder.mkdir(mode=0o700)
    token = folder / TOKEN_FILE
    if not token.exists():
        token.touch(mode=0o600)
        token.write_text(_token())
    update_environment({**RAY_ENVIRONMENT, **LOCAL_RAY_ENVIRONMENT, RAY_AUTH_TOKEN_PATH.name: str(token)})


_tokens: list[str] = []
"""The token of this process: Ray reads it once, and a second Ray with another token would refuse us."""


def _token() -> str:
    if not _tokens:
        _tokens.append(secrets.token_hex(32))
    return _tokens[0]


def _may_use_token(folder: Path) -> bool:
    """Whether this process can use the token of a Ray; it then uses no other one."""
    try:
        token = (folder / TOKEN_FILE).read_text()
    except OSError:
        return False
    if not _tokens:
        _tokens.append(token)
    return _tokens == [token]
