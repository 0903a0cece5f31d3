"""A job of several processes, on one host or more: how they find each other, and how they end together."""

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
"""Between two looks for the failure of another process."""
LOST_CONNECTION = r"Gloo \w+ failed|Connection (closed|reset)|UNAVAILABLE"
"""In JAX's words, of errors of any type."""
GRACE_SECONDS = 3.0
"""That a process which has failed stays, so that the others read why before they lose their connections to it."""


@dataclass(frozen=True)
class Hosts:
    """How the processes of a job find each other."""

    coordinator: str
    """HOST:PORT of process 0, or auto: JAX asks the cluster."""
    process: int | None = None
    """Index of this one."""
    processes: int | None = None
    heartbeat_seconds: int = 60
    """After so many without a sign of life a process is taken for dead, and the others end."""
    join_seconds: int = 300
    """That the processes wait for each other at the start."""

    def __post_init__(self) -> None:
        check_option_types(self)
        numbered = self.process is not None and self.processes is not None
        if self.coordinator == AUTO:
            check(
                self.process is None and self.processes is None,
                "--distributed auto asks the cluster for --process and --processes: leave them out.",
            )
        else:
            host, _, port = self.coordinator.rpartition(":")
            check(
                bool(host) and port.isdecimal() and 0 < int(port) < 65536,
                f"--distributed is {self.coordinator}, but it must be auto, or HOST:PORT of process 0, with a port "
                "from 1 to 65535.",
            )
            check(numbered, f"--distributed {self.coordinator} needs --process and --processes, too.")
        if self.process is not None and self.processes is not None:
            check(
                0 <= self.process < self.processes,
                f"--process is {self.process}, but with --processes {self.processes} it must be at least 0 and less.",
            )
        check_at_least(self, 1, "heartbeat_seconds", "join_seconds")


def leads() -> bool:
    """Whether this is the process that writes and prints."""
    return jax.process_index() == 0


def join(hosts: Hosts) -> None:
    """Joins the job. Before anything else is asked of JAX.

    Raises:
        UserError: there is no cluster, or the address of process 0 cannot be used.
    """
    explicit = hosts.coordinator != AUTO
    if explicit:
        _check_address(hosts)
    # The signals are ours: the loop over steps lets all processes stop at the same one.
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
            f"JAX finds no cluster here ({str(error).rstrip('.')}): give --distributed HOST:PORT --process N "
            "--processes M instead of auto."
        ) from error
    except jax.errors.JaxRuntimeError as error:
        advice = " Give another port of process 0 in --distributed." if explicit else ""
        raise UserError(f"the job cannot be joined: {str(error).partition(chr(10))[0]}.{advice}") from error
    _watch.start()


def _check_address(hosts: Hosts) -> None:
    """Raises UserError unless there is such a host, and process 0 can listen there; JAX waits in silence, or dies."""
    host, _, port = hosts.coordinator.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError as error:
        raise UserError(f"the host of --distributed {hosts.coordinator} is not found: {error.strerror}.") from error
    if hosts.process == 0:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            raise UserError(
                f"the job at {hosts.coordinator} cannot be joined: {error.strerror}. Give another port of process 0 in "
                "--distributed."
            ) from error


class _Watch:
    """Looks for the failure of another process, and ends this one with it.

    A process that is waiting for another in a collective operation waits for ever in native code, where no exception
    reaches it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._failing = threading.Lock()
        """Held by the thread that ends this process."""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def fail(self, why: str) -> None:
        """Tells the others; the first failure is kept. Once this has returned, this process is to end at once."""
        self._failing.acquire()  # never given back: the watch has nothing to say any more
        with contextlib.suppress(Exception):  # another was first, or process 0 is gone
            _client().key_value_set(FAILURE, f"{jax.process_index()} {why}")

    def of_another(self) -> str | None:
        """The failure of another process, as a sentence."""
        try:
            process, _, why = _client().key_value_try_get(FAILURE).partition(" ")
        except Exception:  # there is none, or process 0 is gone
            return None
        return f"process {process} has failed: {why}" if int(process) != jax.process_index() else None

    def _run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            if (failure := self.of_another()) is not None and self._failing.acquire(blocking=False):
                _end(f"error: {failure}")


_watch = _Watch()


def _client() -> Any:
    """JAX's connection to process 0. It has no public name; Orbax takes it from here, too."""
    from jax._src import distributed

    return distributed.global_state.client


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """What ends this process with an error ends all of the job within seconds, and they say why; alone, as always.

    It ends at once, without the usual clean-up: that would wait for the other processes.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized() or (isinstance(error, SystemExit) and error.code in (0, None)):
            raise
        try:
            _end(_explanation(error))
        finally:  # Ctrl-C comes in the midst of it, too
            os._exit(1)
    _watch.stop()


def _explanation(error: BaseException) -> str:
    """The last line of this process. The others are told, unless they are the reason."""
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        sentence = error.code.strip()
        _watch.fail(sentence.removeprefix("error: "))
        return sentence
    if (failure := _awaited_failure()) is not None:
        _watch.fail("")
        return f"error: {failure}"
    lost, of_jax = re.search(LOST_CONNECTION, str(error)), isinstance(error, jax.errors.JaxRuntimeError)
    if lost and (of_jax or "Gloo" in str(error)):
        print(str(error).partition("\n")[0], file=sys.stderr)
    else:  # a connection to storage, say, can be lost, too
        traceback.print_exception(error)
    _watch.fail(f"{type(error).__name__}: {error}")
    if lost or of_jax:
        return (
            "error: most likely another process has died, and the connection to it is lost. The same command on all "
            "hosts goes on from the last checkpoint."
        )
    return "error: this process has failed, as is said above, and ends the others."


def _awaited_failure() -> str | None:
    """A lost connection is noticed before its reason is read."""
    for _ in range(3):
        if (failure := _watch.of_another()) is not None:
            return failure
        time.sleep(POLL_SECONDS / 2)
    return None


def _end(message: str) -> None:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
