"""Checkpoints: bit-equal round trips, other meshes, real kills, damage, foreign directories."""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cuajax.checkpoint import MANIFEST, MARKER, CheckpointError, Checkpoints, Preemption
from cuajax.train import state as states

AXES = {"embed": ("vocab", "embed"), "w": ("layers", "embed", "ffn"), "odd": ("ffn",)}
OPTIMIZER = optax.adamw(1e-3)


def make_state(seed=0, wide=8):
    rng = np.random.default_rng(seed)
    shapes = {"embed": (16, wide), "w": (2, wide, 12), "odd": (7,)}
    params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
    state = states.create(params, OPTIMIZER)
    grads = jax.tree.map(jnp.cos, params)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, params)
    return dataclasses.replace(
        state, step=state.step + 5, params=optax.apply_updates(params, updates), opt_state=opt_state
    )


def save(checkpoints, step, state, **more):
    params, rest = states.split(state)
    return checkpoints.save(
        step, params=params, opt=rest, data={"cursor": 10 * step}, version=step + 100, config="f00d", **more
    )


def restore(checkpoints, abstract, **more):
    found = checkpoints.restore(*states.split(abstract), **more)
    return states.join(found.params, found.opt), found


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"


def test_round_trip_is_bit_equal(directory):
    state = make_state()
    writer = Checkpoints(directory, metric="success")
    assert save(writer, 3, state, metrics={"success": 0.5, "bad": float("nan")})
    writer.wait()
    assert not save(writer, 3, state)  # SIGTERM right after a periodic save
    writer.close()

    reader = Checkpoints(directory)
    got, found = restore(reader, jax.eval_shape(make_state))
    equal(got, state)
    assert (found.step, found.data) == (3, {"cursor": 30})
    assert found.meta == {"format": 1, "step": 3, "version": 103, "config": "f00d", "metrics": {"success": 0.5}}
    reader.close()


def test_a_save_survives_donation_of_the_state(directory):
    state = make_state()
    expected = jax.tree.map(np.array, state)
    writer = Checkpoints(directory)
    save(writer, 1, state)
    jax.tree.map(lambda x: x.delete(), state)
    writer.wait()
    equal(restore(writer, jax.eval_shape(make_state))[0], expected)
    writer.close()


def test_params_only(directory):
    writer = Checkpoints(directory)
    state = make_state()
    save(writer, 1, state)
    writer.wait()
    reader = Checkpoints(directory, read_only=True)  # beside a live writer
    params, meta = reader.restore_params(jax.eval_shape(make_state).params)
    equal(params, state.params)
    assert meta["version"] == 101
    save(writer, 2, make_state(1))
    writer.close()
    assert reader.latest() == 2
    equal(reader.restore_params(params)[0], make_state(1).params)
    reader.close()


def test_keeps_last_and_best(directory):
    writer = Checkpoints(directory, keep_last=2, keep_best=1, metric="success")
    for step, success in enumerate([0.1, 0.9, 0.3, float("nan"), None, 0.2]):
        save(writer, step, make_state(), metrics=None if success is None else {"success": success})
    writer.wait()
    assert writer.steps() == [1, 4, 5]
    assert (writer.best(), writer.latest()) == (1, 5)
    assert [c["cursor"] for c in writer.cursors()] == [10, 40, 50]
    writer.close()
    again = Checkpoints(directory, keep_last=2, keep_best=1, metric="success")
    save(again, 6, make_state(), metrics={"success": 0.8})
    again.wait()
    assert (again.steps(), again.best()) == ([1, 5, 6], 1)
    again.close()


def test_going_back_is_explicit(directory):
    writer = Checkpoints(directory, keep_last=3)
    for step in (1, 2, 3):
        save(writer, step, make_state(step))
    with pytest.raises(CheckpointError, match="step 2 is behind the newest checkpoint 3"):
        save(writer, 2, make_state())
    writer.drop_after(1)
    assert writer.steps() == [1]
    assert save(writer, 2, make_state(7))
    writer.wait()
    equal(restore(writer, jax.eval_shape(make_state))[0], make_state(7))
    writer.close()


def test_keeps_the_smallest_in_mode_min(directory):
    writer = Checkpoints(directory, keep_last=1, metric="loss", mode="min")
    for step, loss in enumerate([0.5, 0.1, 0.3]):
        save(writer, step, make_state(), metrics={"loss": loss})
    writer.wait()
    assert (writer.steps(), writer.best()) == ([1, 2], 1)
    writer.close()


def damage_flip(step):
    path = max(step.glob("params/**/d/*"), key=lambda p: p.stat().st_size)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    return "CRC-32"


def damage_truncate(step):
    path = max(step.glob("opt/**/d/*"), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-7])
    return "bytes, expected"


def damage_remove(step):
    for path in (step / "data").iterdir():
        path.unlink()
    (step / "data").rmdir()
    return "no data"


def damage_no_manifest(step):
    (step / MANIFEST).unlink()
    return f"no {MANIFEST}"


def damage_manifest(step):
    (step / MANIFEST).write_text("{")
    return MANIFEST


DAMAGES = [damage_flip, damage_truncate, damage_remove, damage_manifest, damage_no_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_passed_over_with_a_warning(directory, damage, caplog):
    writer = Checkpoints(directory, keep_last=2)
    save(writer, 1, make_state(1))
    save(writer, 2, make_state(2))
    writer.close()
    words = damage(directory / "2")
    reader = Checkpoints(directory)
    with caplog.at_level(logging.WARNING, logger="cuajax.checkpoint"):
        got, found = restore(reader, jax.eval_shape(make_state))
    assert found.step == 1
    equal(got, make_state(1))
    assert "ignored the damaged checkpoint 2" in caplog.text
    assert words in caplog.text
    with pytest.raises(CheckpointError, match=r"no usable step 2, expected one of \[1\]"):
        restore(reader, jax.eval_shape(make_state), step=2)
    assert save(reader, 2, make_state(3))  # the run comes by again
    reader.wait()
    equal(restore(reader, jax.eval_shape(make_state))[0], make_state(3))
    reader.close()


def test_empty_directory_holds_nothing(directory):
    reader = Checkpoints(directory)
    assert reader.latest() is None
    assert reader.best() is None
    with pytest.raises(CheckpointError, match="holds no usable checkpoint"):
        restore(reader, jax.eval_shape(make_state))
    reader.close()


def test_other_shapes_are_named(directory):
    writer = Checkpoints(directory)
    save(writer, 1, make_state())
    writer.wait()
    with pytest.raises(
        CheckpointError, match=r"1/params: embed is float32\[16, 8\] in the checkpoint, float32\[16, 6\]"
    ):
        restore(writer, jax.eval_shape(lambda: make_state(wide=6)))
    with pytest.raises(CheckpointError, match=r"1/params: extra is absent in the checkpoint"):
        writer.restore_params({**make_state().params, "extra": jnp.zeros(3)})
    writer.close()


def test_foreign_and_newer_directories_are_refused_by_name(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"photos is no checkpoint directory.* holds cat\.png"):
        Checkpoints(tmp_path / "photos")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / MARKER).write_text(json.dumps({"format": 2}))
    with pytest.raises(CheckpointError, match="format 2, this version reads format 1"):
        Checkpoints(tmp_path / "newer")
    with pytest.raises(CheckpointError, match="empty or missing"):
        Checkpoints(tmp_path / "nowhere", read_only=True)
    assert not (tmp_path / "nowhere").exists()


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="keep_last is 0"):
        Checkpoints(tmp_path / "a", keep_last=0)
    with pytest.raises(ValueError, match="mode is 'most', expected one of max, min"):
        Checkpoints(tmp_path / "a", mode="most")


# ------------------------------------------------------------------------------------------------ other processes
def run(script, *args, devices=1, timeout=120):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        env=environment(devices),
        check=True,
        timeout=timeout,
        capture_output=True,
        text=True,
    ).stdout


def environment(devices=1):
    root = str(Path(__file__).resolve().parents[1])
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    paths = os.pathsep.join([root, str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


OTHER_MESH = """
import sys, jax, numpy as np
from cuajax.checkpoint import Checkpoints
from cuajax.train import sharding
import test_checkpoint as t
abstract = jax.eval_shape(t.make_state)
def on(mesh):
    sh = sharding.state_shardings(mesh, abstract, t.AXES)
    return sh, jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, sh)
first, second = sharding.make_mesh(2, 2, 2), sharding.make_mesh(1, 4, 2)
writer = Checkpoints(sys.argv[1])
t.save(writer, 1, jax.device_put(t.make_state(), on(first)[0]))
writer.wait()
shardings, wanted = on(second)
got, _ = t.restore(writer, wanted)
t.equal(got, t.make_state())
assert all(x.sharding == s for x, s in zip(jax.tree.leaves(got), jax.tree.leaves(shardings), strict=True))
moments = got.opt_state[0].mu
assert moments["w"].sharding.spec == got.params["w"].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
assert moments["odd"].sharding.is_fully_replicated
writer.close()
print("ok")
"""


def test_restores_onto_another_mesh(directory):
    assert run(OTHER_MESH, directory, devices=8).strip() == "ok"
    reader = Checkpoints(directory)  # and onto one device
    equal(restore(reader, jax.eval_shape(make_state))[0], make_state())
    reader.close()


KILLED = """
import sys, jax, jax.numpy as jnp
from cuajax.checkpoint import Checkpoints
writer = Checkpoints(sys.argv[1])
def big(x):
    return {f"leaf{i}": jnp.full((1024, 1024), x + i, jnp.float32) for i in range(64)}
for step in (1, 2):
    writer.save(step, params=big(step), opt={"a": jnp.ones(3)}, data={}, version=step, config="")
    print("saving", step, flush=True)
    if step == 1:
        writer.wait()
        print("committed", flush=True)
import time
time.sleep(60)
"""


def test_kill_in_mid_save_leaves_the_previous(directory, caplog):
    process = subprocess.Popen([sys.executable, "-c", KILLED, directory], env=environment(), stdout=subprocess.PIPE)
    deadline = time.monotonic() + 90
    try:
        while not (torn := [p for p in directory.glob("2*") if p.name != "2"]):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.0005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    if not torn[0].exists():
        pytest.fail("the save was committed before the kill: make the state larger")
    with caplog.at_level(logging.WARNING, logger="cuajax.checkpoint"):
        reader = Checkpoints(directory)
    assert f"ignored the unfinished checkpoint {torn[0].name}" in caplog.text
    abstract = {f"leaf{i}": jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for i in range(64)}
    found = reader.restore(abstract, {"a": jax.ShapeDtypeStruct((3,), jnp.float32)})
    assert found.step == 1
    assert all(float(found.params[f"leaf{i}"][0, 0]) == 1 + i for i in range(64))
    assert reader.save(2, params=found.params, opt=found.opt, data={}, version=9, config="")
    reader.close()
    assert Checkpoints(directory).latest() == 2


FULL = """
import resource, signal, sys, jax.numpy as jnp
from cuajax.checkpoint import Checkpoints
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = Checkpoints(sys.argv[1])
tree = {"a": jnp.arange(1 << 20, dtype=jnp.float32)}
def save(step):
    writer.save(step, params=tree, opt=tree, data={}, version=step, config="")
    writer.wait()
save(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))  # as a disk that is full
try:
    save(2)
except (OSError, ValueError) as error:
    print("refused", type(error).__name__)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(writer.latest())
save(3)
print(writer.latest())
"""


def test_a_full_disk_is_an_error_and_leaves_the_previous(directory):
    assert run(FULL, directory).split()[-2:] == ["1", "3"]


def test_preemption_flag_is_set_by_sigterm_and_the_handler_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert not preemption.requested
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
        assert preemption.requested
    assert signal.getsignal(signal.SIGTERM) == before
