"""Placement rules. Meshes of eight come from fake devices in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from cuajax.models import policy, presets
from cuajax.train import sharding

ROOT = Path(__file__).resolve().parents[2]


def abstract_mesh(data, fsdp, tensor):
    """Shapes without devices: what `partition` needs."""
    return AbstractMesh((data, fsdp, tensor), sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((4, 64, 192), ("layers", "embed", "ffn"), (None, "fsdp", "tensor")),
        ((128, 64), ("vocab", "embed"), ("tensor", "fsdp")),
        ((4, 4, 16, 64), ("layers", "heads", "head_dim", "embed"), (None, "tensor", None, "fsdp")),
        ((64,), (None,), (None,)),
        ((64, 48), ("position", "vision_embed"), (None, "fsdp")),
    ],
)
def test_partition_follows_the_rules(shape, axes, spec):
    assert sharding.partition(abstract_mesh(2, 2, 2), shape, axes) == (PartitionSpec(*spec), [])


def test_what_does_not_divide_is_replicated_and_said():
    mesh = abstract_mesh(1, 4, 8)
    got, reasons = sharding.partition(mesh, (64, 20), ("embed", "heads"))
    assert got == PartitionSpec("fsdp", None)
    assert reasons == ["heads 20: replicated, tensor 8 does not divide it"]
    got, reasons = sharding.partition(mesh, (64, 64), ("vision_embed", "embed"))
    assert got == PartitionSpec("fsdp", None)
    assert reasons == ["embed 64: replicated, fsdp already splits another dimension"]


def test_errors_name_the_choices():
    mesh = abstract_mesh(1, 1, 1)
    with pytest.raises(sharding.ShardingError, match="'hidden' has no rule, expected one of embed, ffn"):
        sharding.partition(mesh, (4,), ("hidden",))
    with pytest.raises(sharding.ShardingError, match=r"name 1 dimensions of shape \(4, 4\)"):
        sharding.partition(mesh, (4, 4), ("embed",))
    count = len(jax.devices())
    with pytest.raises(sharding.ShardingError, match=f"data={count + 1}, fsdp=1, tensor=1 needs {count + 1} devices"):
        sharding.make_mesh(count + 1)
    with pytest.raises(sharding.ShardingError, match="at most one is -1"):
        sharding.make_mesh(-1, -1)
    with pytest.raises(sharding.ShardingError, match="sizes are >= 1"):
        sharding.make_mesh(0)
    with pytest.raises(sharding.ShardingError, match="a multiple of 64 devices"):
        sharding.make_mesh(-1, 64)


def test_every_parameter_of_the_policy_has_a_rule():
    cfg = presets.get("tiny")
    lines = sharding.plan(abstract_mesh(2, 2, 2), policy.abstract(cfg), policy.logical_axes(cfg))
    assert lines[-1].endswith("a device on data 2 x fsdp 2 x tensor 2")
    assert any("embed over fsdp, ffn over tensor" in line for line in lines)
    total = sum(a.size * 4 for a in jax.tree.leaves(policy.abstract(cfg))) / 2**10
    assert lines[-1].split()[2] == "KiB"
    assert float(lines[-1].split()[1]) < 0.4 * total  # of four ways; norms and the like stay whole


def test_plan_golden():
    abstract = {"w": jax.ShapeDtypeStruct((4, 64, 20), "float32"), "norm": jax.ShapeDtypeStruct((64,), "float32")}
    axes = {"w": ("layers", "embed", "heads"), "norm": (None,)}
    assert sharding.plan(abstract_mesh(1, 4, 8), abstract, axes) == [
        "['norm'] float32[64] whole, 256 B a device",
        "['w'] float32[4,64,20] embed over fsdp, 5 KiB a device",
        "    heads 20: replicated, tensor 8 does not divide it",
        "total 5.25 KiB a device on data 1 x fsdp 4 x tensor 8",
    ]


PLACED = """
import jax, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from cuajax.train import optimizer, sharding, state
from tests.train import toys
mesh = sharding.make_mesh(-1, 2, 2)
assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2} and set(mesh.axis_types) == {AxisType.Auto}
for name in ("adamw", "muon"):
    tx = optimizer.make_optimizer(1e-2, name=name, axes=toys.AXES)
    abstract = jax.eval_shape(lambda: state.create(toys.params(), tx))
    sh = sharding.state_shardings(mesh, abstract, toys.AXES)
    assert sh.params["w"].spec == P(None, "fsdp", "tensor") and sh.params["embed"].spec == P("tensor", "fsdp")
    flat = jax.tree_util.tree_leaves_with_path(abstract.opt_state)
    for (path, leaf), s in zip(flat, jax.tree.leaves(sh.opt_state), strict=True):
        key = str(path[-1].key) if hasattr(path[-1], "key") else ""
        want = sh.params[key].spec if key in sh.params else P()
        assert s.spec == want, (path, s)
    placed = jax.device_put(state.create(toys.params(), tx), sh)
    assert placed.params["w"].addressable_shards[0].data.shape == (2, 4, 4)
batch = sharding.place(toys.microbatches(count=2, rows=8), mesh)
assert batch.tokens.addressable_shards[0].data.shape == (2, 2, 6)
try:
    sharding.place(toys.microbatches(rows=6), mesh)
except sharding.ShardingError as error:
    assert "6 rows in a microbatch, expected a multiple of data x fsdp = 4" in str(error)
else:
    raise SystemExit("6 rows on 4 ways were accepted")
print("ok")
"""


def run_on_eight(script, *args, timeout=200):
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script, *args], env=env, timeout=timeout, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_state_and_batch_are_placed():
    assert run_on_eight(PLACED).strip() == "ok"
