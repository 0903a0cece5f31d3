"""Jobs of two processes on loopback, each of which runs `scripts/train.py`."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 400.0
"""Long, because test machines are slow and shared."""
HEARTBEAT_SECONDS = 20


def environment(devices, package=ROOT, **more):
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    return os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu"} | more


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    """Two processes, as a context manager that kills those still running at its end."""

    def __init__(self, directory, config, run, devices, *flags, of_process_1=(), package_of_process_1=ROOT):
        address = f"127.0.0.1:{free_port()}"
        self.run, self.logs = run, [directory / f"{run.name}.{index}.txt" for index in range(2)]
        self.processes = []
        for index, log in enumerate(self.logs):
            command = [sys.executable, str(ROOT / "scripts" / "train.py"), str(config), "--run", str(run), *flags]
            command += ["--distributed", address, "--process", str(index), "--processes", "2"]
            command += ["--heartbeat-seconds", str(HEARTBEAT_SECONDS), *(of_process_1 if index else ())]
            env = environment(devices, package_of_process_1 if index else ROOT)
            with log.open("wb") as output:
                self.processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def finish(self):
        """Waits for both processes; returns their exit statuses."""
        end = time.monotonic() + TIMEOUT_SECONDS
        return [process.wait(max(end - time.monotonic(), 1.0)) for process in self.processes]

    def output(self, index):
        """The output of a process, without Gloo's messages about its connections."""
        lines = self.logs[index].read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if "[Gloo]" not in line)

    def wait_for(self, condition):
        end = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert all(process.poll() is None for process in self.processes), self.output(0) + self.output(1)
            assert time.monotonic() < end, self.output(0) + self.output(1)
            time.sleep(0.02)

    def wait_for_step(self, step):
        self.wait_for(lambda: f'"step": {step},' in read(self.run / "metrics.jsonl"))

    def wait_for_checkpoint(self, step):
        """Waits for a checkpoint and a step after it."""
        self.wait_for(lambda: (self.run / "checkpoints" / str(step)).exists())
        self.wait_for_step(step + 1)

    def send(self, index, number=signal.SIGKILL):
        self.processes[index].send_signal(number)


def read(file):
    return file.read_text() if file.exists() else ""


def train_alone(config, run, devices, *flags):
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), str(config), "--run", str(run), *flags]
    result = subprocess.run(command, env=environment(devices), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
