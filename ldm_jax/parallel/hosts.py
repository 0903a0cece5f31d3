"""A job of several processes: how they connect, and how the failure of one ends all."""

import contextlib
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from ldm_jax.errors import UserError
from ldm_jax.options import check, check_at_least, check_option_types

AUTO = "auto"
FAILURE = "ldm_jax/failure"
POLL_SECONDS = 1.0
"""Time between two checks whether another process has failed."""
LOST_CONNECTION = r"Gloo \w+ failed|Connection (closed|reset)|UNAVAILABLE"
"""What JAX and Gloo say of a lost connection, in errors of any type."""
GRACE_SECONDS = 3.0
"""How long a failed process stays alive, so that the others read its error before they lose the connection to it."""


@dataclass(frozen=True)
class Hosts:
    """How the processes of a job connect."""

    coordinator: str
    """HOST:PORT of process 0, or auto: JAX detects the cluster."""
    process: int | None = None
    """Index of this process."""
    processes: int | None = None
    heartbeat_seconds: int = 60
    """After so many seconds without a heartbeat, a process is considered dead and all others exit."""
    join_seconds: int = 300
    """Seconds to wait for all processes to join."""

    def __post_init__(self) -> None:
        check_option_types(self)
        numbered = self.process is not None and self.processes is not None
        if self.coordinator == AUTO:
            check(
                self.process is None and self.processes is None,
                "--distributed auto gets --process and --processes from the cluster: leave them out.",
            )
        else:
            host, _, port = self.coordinator.rpartition(":")
            check(
                bool(host) and port.isdecimal() and 0 < int(port) < 65536,
                f"--distributed is {self.coordinator}, but it must be auto, or HOST:PORT of process 0 with a port "
                "from 1 to 65535.",
            )
            check(numbered, f"--distributed {self.coordinator} also needs --process and --processes.")
        if self.process is not None and self.processes is not None:
            check(
                0 <= self.process < self.processes,
                f"--process is {self.process}, but it must be between 0 and --processes - 1 = {self.processes - 1}.",
            )
        check_at_least(self, 1, "heartbeat_seconds", "join_seconds")


def is_leader() -> bool:
    """Whether this is process 0, which writes and prints."""
    return jax.process_index() == 0


def join(hosts: Hosts) -> None:
    """Connects this process to the job. Must be called before any JAX computation.

    Raises:
        UserError: no cluster is detected, or the address of process 0 cannot be used.
    """
    explicit = hosts.coordinator != AUTO
    if explicit:
        _check_address(hosts)
    # The training loop handles SIGTERM itself, so that all processes stop after the same step.
    jax.config.update("jax_enable_preemption_service", False)
    awaited = f"{hosts.processes} processes at {hosts.coordinator}" if explicit else "the cluster's processes"
    print(f"waiting for {awaited}, at most {hosts.join_seconds} seconds", file=sys.stderr, flush=True)
    try:
        jax.distributed.initialize(
            hosts.coordinator if explicit else None,
            hosts.processes,
            hosts.process,
            cluster_detection_method="deactivate" if explicit else None,
            initialization_timeout=hosts.join_seconds,
            heartbeat_timeout_seconds=hosts.heartbeat_seconds,
        )
    except ValueError as error:
        raise UserError(
            f"JAX detects no cluster here ({str(error).rstrip('.')}): give --distributed HOST:PORT --process N "
            "--processes M instead of auto."
        ) from error
    except jax.errors.JaxRuntimeError as error:
        advice = " Give another port in --distributed." if explicit else ""
        raise UserError(f"the job cannot be joined: {str(error).partition(chr(10))[0]}.{advice}") from error
    _watch.start()


def _check_address(hosts: Hosts) -> None:
    """Raises UserError for an unknown host or a port in use, for which JAX would wait silently or abort."""
    host, _, port = hosts.coordinator.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError as error:
        raise UserError(f"the host of --distributed {hosts.coordinator} is unknown: {error.strerror}.") from error
    if hosts.process == 0:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen at {hosts.coordinator}: {error.strerror}. Give another port in --distributed."
            ) from error


class _Watch:
    """A thread that exits this process when another process has failed.

    It is needed because a process that waits in a collective operation waits in native code, without a timeout.
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._exiting = threading.Lock()
        """Held by the thread that exits this process; never released."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def publish(self, why: str) -> None:
        """Sends this process's error to the others; the first error of the job is kept. The caller must then exit."""
        self._exiting.acquire()
        with contextlib.suppress(Exception):  # another process has failed first, or process 0 is gone
            _client().key_value_set(FAILURE, f"{jax.process_index()} {why}")

    def failure(self) -> str | None:
        """The error of another process, as a sentence."""
        try:
            process, _, why = _client().key_value_try_get(FAILURE).partition(" ")
        except Exception:  # no process has failed, or process 0 is gone
            return None
        return f"process {process} has failed: {why}" if int(process) != jax.process_index() else None

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            if (failure := self.failure()) is not None and self._exiting.acquire(blocking=False):
                _exit(f"error: {failure}")


_watch = _Watch()


def _client() -> Any:
    """JAX's connection to process 0. It has no public name; Orbax uses this one, too."""
    from jax._src import distributed

    return distributed.global_state.client


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Makes an error on this process end all processes of the job within seconds, each with a line that says why.

    The process exits without the usual clean-up, which would wait for the other processes. A process that is not part
    of a job raises as usual.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized() or (isinstance(error, SystemExit) and error.code in (0, None)):
            raise
        try:
            _exit(_explain(error))
        finally:  # also if Ctrl-C interrupts it
            os._exit(1)
    _watch.stop()


def _explain(error: BaseException) -> str:
    """The last line that this process prints. The error is sent to the others, unless one of them has caused it."""
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        sentence = error.code.strip()
        _watch.publish(sentence.removeprefix("error: "))
        return sentence
    if (failure := _wait_for_failure()) is not None:
        _watch.publish("")
        return f"error: {failure}"
    lost, from_jax = re.search(LOST_CONNECTION, str(error)), isinstance(error, jax.errors.JaxRuntimeError)
    if lost and (from_jax or "Gloo" in str(error)):
        print(str(error).partition("\n")[0], file=sys.stderr)
    else:  # a connection to storage can be lost as well
        traceback.print_exception(error)
    _watch.publish(f"{type(error).__name__}: {error}")
    if lost or from_jax:
        return (
            "error: the connection to another process is lost; most likely that process has died. Run the same command "
            "on all hosts again to resume from the last checkpoint."
        )
    return "error: this process has failed with the error above, and ends the other processes."


def _wait_for_failure() -> str | None:
    """The failure of another process; a lost connection can be noticed before its cause is published."""
    for _ in range(3):
        if (failure := _watch.failure()) is not None:
            return failure
        time.sleep(POLL_SECONDS / 2)
    return None


def _exit(message: str) -> None:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
