"""Where parameters, optimizer state and rows live on a mesh, decided by logical axis names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # a batch's rows are split over both

# Logical axis of a parameter -> mesh axis; None: never split.
RULES: Mapping[str, str | None] = {
    "layers": None,
    "embed": "fsdp",
    "vision_embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "ffn": "tensor",
    "vocab": "tensor",
    "patch": None,
    "position": None,
}


class ShardingError(ValueError):
    """A mesh, an axis name or a batch that does not fit."""


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh (data, fsdp, tensor) over all devices, or those given; one size may be -1: whatever is left.

    Axes are AxisType.Auto: arrays carry shardings and XLA places the rest. Raises ShardingError with sizes and count.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [data, fsdp, tensor]
    named = ", ".join(f"{n}={s}" for n, s in zip(MESH_AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise ShardingError(f"mesh {named}: sizes are >= 1, and at most one is -1 (whatever is left)")
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        raise ShardingError(
            f"mesh {named} needs {'a multiple of ' if -1 in sizes else ''}{known} devices, found {len(devices)}"
        )
    return jax.make_mesh(tuple(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


# ------------------------------------------------------------------------------------------------- parameters
def partition(
    mesh: Mesh | AbstractMesh,
    shape: Sequence[int],
    axes: Sequence[str | None] | None,
    *,
    rules: Mapping[str, str | None] = RULES,
) -> tuple[PartitionSpec, list[str]]:
    """(spec, reasons) of one leaf; a dimension its mesh axis does not divide is replicated, and a reason says so.

    A mesh axis splits one dimension of a leaf: the first that asks for it. Raises ShardingError on an unknown name.
    """
    if axes is None:
        return PartitionSpec(), []
    if len(axes) != len(shape):
        raise ShardingError(f"axes {tuple(axes)} name {len(axes)} dimensions of shape {tuple(shape)}")
    spec: list[str | None] = []
    reasons: list[str] = []
    for size, axis in zip(shape, axes, strict=True):
        if axis is not None and axis not in rules:
            raise ShardingError(f"logical axis {axis!r} has no rule, expected one of {', '.join(sorted(rules))}")
        target = rules[axis] if axis is not None else None
        if target is not None and target in spec:
            reasons.append(f"{axis} {size}: replicated, {target} already splits another dimension")
            target = None
        elif target is not None and size % mesh.shape[target]:
            reasons.append(f"{axis} {size}: replicated, {target} {mesh.shape[target]} does not divide it")
            target = None
        spec.append(target)
    return PartitionSpec(*spec), reasons


def shardings(mesh: Mesh, abstract: Any, axes: Any, *, rules: Mapping[str, str | None] = RULES) -> Any:
    """A tree of NamedSharding like `abstract` (arrays or ShapeDtypeStructs); axes: its logical axes, leaf by leaf."""
    leaves, tree = jax.tree.flatten(abstract)
    specs = [
        partition(mesh, leaf.shape, names, rules=rules)[0]
        for leaf, names in zip(leaves, tree.flatten_up_to(axes), strict=True)
    ]
    return tree.unflatten([NamedSharding(mesh, spec) for spec in specs])


def state_shardings(mesh: Mesh, state: Any, axes: Any, *, rules: Mapping[str, str | None] = RULES) -> Any:
    """Shardings of a TrainState (arrays or ShapeDtypeStructs): optimizer moments like their parameter, the rest whole.

    A moment is recognised by its path ending in the path of a parameter of the same shape.
    """
    params = shardings(mesh, state.params, axes, rules=rules)
    flat = jax.tree_util.tree_leaves_with_path(state.params)
    known = {path: (leaf.shape, sharding) for (path, leaf), sharding in zip(flat, jax.tree.leaves(params), strict=True)}
    whole = NamedSharding(mesh, PartitionSpec())

    def find(path, leaf):
        for start in range(len(path)):
            shape, sharding = known.get(path[start:], (None, whole))
            if shape == leaf.shape:
                return sharding
        return whole

    moments = jax.tree_util.tree_map_with_path(find, state.opt_state)
    return state.replace(step=whole, skipped=whole, params=params, opt_state=moments)


def plan(mesh: Mesh | AbstractMesh, abstract: Any, axes: Any, *, rules: Mapping[str, str | None] = RULES) -> list[str]:
    """Text lines: each leaf's shape, spec and bytes a device, what was replicated and why, and the total."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    lines, total = [], 0
    for (path, leaf), names in zip(leaves, tree.flatten_up_to(axes), strict=True):
        spec, reasons = partition(mesh, leaf.shape, names, rules=rules)
        size = math.prod(NamedSharding(mesh, spec).shard_shape(tuple(leaf.shape))) * leaf.dtype.itemsize
        total += size
        shape = ",".join(map(str, leaf.shape))
        split = (
            ", ".join(f"{n} over {m}" for n, m in zip(names or (), spec, strict=False) if m and mesh.shape[m] > 1)
            or "whole"
        )
        lines.append(f"{jax.tree_util.keystr(path)} {leaf.dtype.name}[{shape}] {split}, {_bytes(size)} a device")
        lines += [f"    {reason}" for reason in reasons]
    layout = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return [*lines, f"total {_bytes(total)} a device on {layout}"]


# ------------------------------------------------------------------------------------------------------ batches
def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of every leaf of microbatches [n_micro, B, ...]: rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(None, ROWS))


def place(batch: Any, mesh: Mesh) -> Any:
    """Host microbatches [n_micro, B, ...] as global arrays; with several processes B is this process's share.

    Raises ShardingError unless data * fsdp divides the rows.
    """
    sharding = batch_sharding(mesh)
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    count = jax.tree.leaves(batch)[0].shape[1] * jax.process_count()
    if count % ways:
        raise ShardingError(f"{count} rows in a microbatch, expected a multiple of data x fsdp = {ways}")
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
