"""Packing, padding, microbatching and sharding cannot change the gradient of the real policy (float32, 1e-5)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOUND = 1e-5  # of max|d| / max(max|ref|, 1e-3 x the largest leaf's max), per leaf


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ways", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_gradients_do_not_depend_on_the_batch_layout_or_the_mesh(ways):
    # Eight fake devices need a process of their own; without LLVM's optimisation it compiles in half the time.
    flags = (
        "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"
    )
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.train.gradients", ways]
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=880, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report.pop("changed") > 10 * BOUND
    assert {name: value for name, value in report.items() if not value <= BOUND} == {}
