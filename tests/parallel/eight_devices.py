"""Runs a script in another process, where the CPU counts as eight devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def on_eight_devices(script, *arguments):
    """Runs a script of this directory; returns what it prints."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE.parent}"}
    command = [sys.executable, str(HERE / script), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Involuntary full rematerialization" not in result.stderr
    return result.stdout


# Bounds for the difference of the loss, and for the relative differences of the whole gradient and of one parameter's.
# Rounding alone gives about 1e-13 in float64, and 2e-6 in float32.
TOLERANCES = {
    "float64": {"loss": 1e-12, "gradient": 1e-12, "leaf": 1e-11},
    "float32": {"loss": 1e-5, "gradient": 1e-5, "leaf": 1e-5},
}


def check_cases(cases):
    script = on_eight_devices("sharded_model.py", json.dumps([case._asdict() for case in cases]))
    rows = [json.loads(line) for line in script.splitlines()]
    assert [row.pop("case") for row in rows] == [case._asdict() | {"mesh": list(case.mesh)} for case in cases]
    for case, row in zip(cases, rows, strict=True):
        for name, most in TOLERANCES[case.type].items():
            assert row[name] < most, (case, row)
