"""An actor host needs no accelerator stack: these rooms load neither jax nor TensorFlow."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import importlib, sys
importlib.import_module(sys.argv[1])
heavy = {"jax", "jaxlib", "tensorflow", "grain", "orbax"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("module", ["images", "store", "journal", "lease", "pack"])
def test_loads_without_jax(module):
    done = subprocess.run(
        [sys.executable, "-c", CODE, f"cuajax.data.{module}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
