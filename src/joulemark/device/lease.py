"""Leases of GPUs: two sessions on one machine never measure on one GPU at once.

A lease is an operating-system lock on a file that is named after the GPU's UUID, in a folder that the users of a
machine share. The system frees it with the process that holds it, however that ends, so no lease goes stale. Beside
the lock stand the holder's name, process and start, for whoever has to wait.

A measuring process may outlive its session for a moment. It keeps a shared lock on a second file (``.users``), and
a new session that finds one there goes on waiting.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from joulemark.errors import ConfigurationError, DeviceError, GpuLeased
from joulemark.records import Json

if TYPE_CHECKING:
    from joulemark.device.gpu import Gpu

FOLDER_VARIABLE = "JOULEMARK_LEASE_DIR"
DEFAULT_FOLDER = Path("/tmp/joulemark-leases")  # not TMPDIR, which differs between users
JOIN_VARIABLE = "JOULEMARK_WORKER_LEASE"

_EVERYONE_FILE, _EVERYONE_FOLDER = 0o666, 0o777
_POLL_S, _TELL_S, _ARBITER_S, _JOIN_S = 0.5, 30.0, 10.0, 10.0


@dataclass(frozen=True)
class Holder:
    """Who holds a lease.

    Args:
        user: login name.
        pid: of the session.
        started_utc: when it got the lease, seconds since the Unix epoch.
        token: of this lease alone.
    """

    user: str
    pid: int
    started_utc: float
    token: str

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.started_utc))
        return f"{self.user} (pid {self.pid}, since {since} UTC)"


@dataclass(frozen=True)
class Claim:
    """What must be held to measure on one GPU.

    Args:
        uuid: of the GPU or MIG instance.
        name: for people.
        keys: UUIDs whose locks are needed, its own among them.
    """

    uuid: str
    name: str
    keys: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.uuid})"


def claim_of(gpu: Gpu, gpus: Sequence[Gpu], power: bool) -> Claim:
    """The locks that measuring on a GPU needs.

    A partitioned board has one power sensor, one power limit and one clock for all of its MIG instances. Who measures
    power on an instance therefore needs the board with every instance; who only times needs the instance, whose
    SMs and memory are its own, and gets in nobody's way but a holder of the whole board.

    Args:
        gpu: to measure on.
        gpus: all of this machine.
        power: whether power is measured.
    """
    board = gpu.parent_uuid or gpu.uuid
    if gpu.parent_uuid is not None and not power:
        return Claim(gpu.uuid, gpu.name, (gpu.uuid,))
    instances = sorted(one.uuid for one in gpus if one.parent_uuid == board)
    return Claim(gpu.uuid, gpu.name, (board, *instances))


@dataclass
class Leases:
    """What one session holds; released by :meth:`close`, or by the system when the process ends.

    Args:
        claims: GPUs that are held.
        folder: of the locks.
        token: that a measuring process of this session shows.
    """

    claims: tuple[Claim, ...]
    folder: Path
    token: str
    _locks: dict[str, FileLock] = field(default_factory=dict, repr=False)

    def described(self, *uuids: str) -> dict[str, Json]:
        """What another process must know to share the lease of these GPUs."""
        keys = dict.fromkeys(key for claim in self.claims if claim.uuid in uuids for key in claim.keys)
        return {"folder": str(self.folder), "keys": list(keys), "token": self.token}

    def pass_on(self, *uuids: str) -> dict[str, str]:
        """Environment of a measuring process for these GPUs, several where ranks share them: see :func:`join_lease`."""
        return {JOIN_VARIABLE: json.dumps(self.described(*uuids))}

    def close(self) -> None:
        """Give the GPUs free; call it when no process of the session uses them any more."""
        for key, lock in self._locks.items():
            with suppress(OSError):
                os.truncate(self.folder / f"{key}.json", 0)
            lock.release()
        self._locks.clear()


def every(free: Sequence[Claim], wanted: Sequence[Claim]) -> Sequence[Claim] | None:
    """All that is wanted, or nothing."""
    return wanted if len(free) == len(wanted) else None


Choice = Callable[[Sequence[Claim], Sequence[Claim]], "Sequence[Claim] | None"]
"""Of the free claims among those wanted, the ones to keep; None when they are not enough."""


class LeaseFolder:
    """The folder of the locks.

    Args:
        path: by default what ``JOULEMARK_LEASE_DIR`` says, else ``/tmp/joulemark-leases``. It is made for every user
            to write to; an existing folder stays as it is.
        sleep: waits some seconds.
    """

    def __init__(self, path: Path | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self.path = path or Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
        self._sleep = sleep

    def acquire(
        self, wanted: Sequence[Claim], limit_s: float, tell: Callable[[str], None], choose: Choice = every
    ) -> Leases:
        """Lease all GPUs that are wanted, or those that ``choose`` takes of the free ones; none while they are too few.

        Args:
            wanted: in order of preference.
            limit_s: how long to wait; 0 refuses at once.
            tell: called with who is waited for, at first and twice a minute.
            choose: see :data:`Choice`.

        Raises:
            GpuLeased: they are held by others; the message names them.
            ConfigurationError: the folder cannot be used.
        """
        begin, told = time.monotonic(), -_TELL_S
        while True:
            held, busy = self._round(wanted, choose)
            if held is not None:
                return held
            waited = time.monotonic() - begin
            said = "; ".join(f"{claim} is held by {who}" for claim, who in busy)
            if waited >= limit_s:
                raise GpuLeased(
                    said + (f" (waited {waited:.0f} s)" if limit_s else ""),
                    "wait for it (--bench-lease wait), choose another GPU (--bench-gpus), or measure beside it "
                    "(--bench-lease off)",
                )
            if waited - told >= _TELL_S:
                tell(f"waiting up to {limit_s - waited:.0f} s: {said}")
                told = waited
            # Two sessions that begin together must not go on meeting.
            self._sleep(min(_POLL_S * random.uniform(0.8, 1.2), max(0.01, limit_s - waited)))

    def holder(self, key: str) -> Holder | None:
        """Who wrote a name beside this lock last; None when nobody did or it cannot be read."""
        try:
            return Holder(**json.loads((self.path / f"{key}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _round(self, wanted: Sequence[Claim], choose: Choice) -> tuple[Leases | None, list[tuple[Claim, str]]]:
        """One try for everything at once: two sessions that each hold a part would wait for each other for ever."""
        free: list[Claim] = []
        busy: list[tuple[Claim, str]] = []
        locks: dict[str, _Locks] = {}
        with self._arbiter():
            try:
                for claim in wanted:
                    blocked = self._lock_into(locks, claim)
                    if blocked is None:
                        free.append(claim)
                    else:
                        busy.append((claim, str(self.holder(blocked) or "a process that left no name")))
                chosen = choose(free, wanted)
                if not chosen:
                    return None, busy
                keys = dict.fromkeys(key for claim in chosen for key in claim.keys)
                token = self._sign(keys)
                kept = {key: locks.pop(key) for key in keys}
            finally:
                for one in locks.values():
                    one.release()
            for one in kept.values():
                one.users.release()
        return Leases(tuple(chosen), self.path, token, {key: one.session for key, one in kept.items()}), busy

    def _lock_into(self, locks: dict[str, _Locks], claim: Claim) -> str | None:
        """Lock what a claim needs and is not in ``locks`` yet; the key that another process holds, or None."""
        for key in claim.keys:
            if key in locks:
                continue
            session, users = self._lock(f"{key}.lock"), self._lock(f"{key}.users")
            try:
                session.acquire(timeout=0)
            except Timeout:
                return key
            try:
                users.acquire(timeout=0)
            except Timeout:
                session.release()
                return key
            locks[key] = _Locks(session, users)
        return None

    def _sign(self, keys: Iterable[str]) -> str:
        """Leave this process' name beside the locks."""
        holder = Holder(_login(), os.getpid(), time.time(), secrets.token_hex(8))
        text = json.dumps(asdict(holder)).encode()
        for key in keys:
            # Not replaced by a new file: in a folder with the sticky bit, another user's file cannot be.
            fd = _open_for_everyone(self.path / f"{key}.json", os.O_WRONLY | os.O_TRUNC)
            try:
                os.write(fd, text)
            finally:
                os.close(fd)
        return holder.token

    @contextmanager
    def _arbiter(self) -> Iterator[None]:
        """Rounds of two sessions come one after the other, so that neither sees the other's tries as leases."""
        try:
            self._make()
            with self._lock("arbiter.lock").acquire(timeout=_ARBITER_S):
                yield
        except (OSError, Timeout) as error:
            raise ConfigurationError(
                f"GPU leases cannot use the folder {self.path} ({getattr(error, 'strerror', None) or error})",
                f"name another that all users may write to (--bench-lease-dir, {FOLDER_VARIABLE}), or switch leases "
                "off (--bench-lease off)",
            ) from error

    def _make(self) -> None:
        with suppress(FileExistsError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
            self.path.chmod(_EVERYONE_FOLDER)  # mkdir's own mode is cut by the umask

    def _lock(self, name: str) -> FileLock:
        path = self.path / name
        if path.is_symlink():  # in a folder that all may write to it could lead anywhere
            raise OSError(f"{name} is a symbolic link")
        return FileLock(path, mode=_EVERYONE_FILE, thread_local=False)


@dataclass(frozen=True)
class _Locks:
    """Of one GPU: the session's, and that against measuring processes of an ended session."""

    session: FileLock
    users: FileLock

    def release(self) -> None:
        self.users.release()
        self.session.release()


def join_lease(environ: Mapping[str, str]) -> list[int]:
    """In a measuring process: share its session's lease until this process ends.

    Args:
        environ: with what :meth:`Leases.pass_on` gave; without it nothing is leased.

    Returns:
        open files that hold the lease; they stay open with the process.

    Raises:
        DeviceError: the session has ended and the GPU may be another's by now.
    """
    text = environ.get(JOIN_VARIABLE)
    if text is None:
        return []
    given = json.loads(text)
    folder, held = LeaseFolder(Path(given["folder"])), []
    for key in given["keys"]:
        fd = _open_for_everyone(folder.path / f"{key}.users", os.O_RDONLY)
        held.append(fd)
        _share(fd, key)
        holder = folder.holder(key)
        if holder is None or holder.token != given["token"]:
            raise DeviceError(f"the lease of {key} has ended with the session that held it", "start the session again")
    return held


def _share(fd: int, key: str) -> None:
    """A shared lock; a session that looks whether the file is free may hold it for a moment."""
    deadline = time.monotonic() + _JOIN_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise DeviceError(f"the lease of {key} is another session's", "start the session again") from error
            time.sleep(0.02)
        else:
            return


def _open_for_everyone(path: Path, flags: int) -> int:
    """Open a file that all users of the folder share, made where it is missing; never through a symbolic link."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # nor wait for the other end of a pipe
    try:
        return os.open(path, flags)  # without O_CREAT, which Linux may refuse for another user's file
    except FileNotFoundError:
        fd = os.open(path, flags | os.O_CREAT, _EVERYONE_FILE)
        with suppress(PermissionError):
            os.fchmod(fd, _EVERYONE_FILE)  # open's own mode is cut by the umask
        return fd


def _login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return f"uid {os.getuid()}"
