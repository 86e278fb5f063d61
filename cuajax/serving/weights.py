"""(params, version) on its way from a learner to a policy server; leaves are named by their tree path."""

from __future__ import annotations

import asyncio
import difflib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from cuajax.serving.client import GrpcClient
from cuajax.serving.messages import BadWeights

Declared = dict[str, tuple[str, tuple[int, ...]]]  # leaf name -> dtype name, shape


@jax.jit
def _copy(params: Any) -> tuple[Any, jax.Array]:
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]
    return jax.tree.map(jnp.copy, params), jnp.array(finite)


def names(params: Any) -> list[str]:
    """Path names of the leaves, in tree order, e.g. "decoder/layers/q/w"."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def stage(params: Any) -> Any:
    """A private device copy of a parameter tree. Raises BadWeights naming the leaves that are not finite."""
    copy, finite = _copy(params)
    finite = np.asarray(finite)
    if not finite.all():
        bad = [name for name, ok in zip(names(params), finite, strict=True) if not ok]
        raise BadWeights(f"{len(bad)} leaves are not finite: {', '.join(bad[:5])}")
    return copy


def declared(params: Any) -> Declared:
    """Name, dtype and shape of every leaf, in tree order."""
    leaves = jax.tree.leaves(params)
    return {n: (np.dtype(leaf.dtype).name, tuple(leaf.shape)) for n, leaf in zip(names(params), leaves, strict=True)}


def check_declared(given: Declared, wanted: Declared) -> None:
    """Raises BadWeights unless the leaves are those wanted, by name, dtype and shape."""
    for name, (dtype, shape) in given.items():
        if name not in wanted:
            close = difflib.get_close_matches(name, wanted, 1)
            raise BadWeights(f"unknown leaf {name!r}" + (f", the nearest is {close[0]!r}" if close else ""))
        if (dtype, shape) != wanted[name]:
            want_dtype, want_shape = wanted[name]
            raise BadWeights(f"leaf {name} is {dtype}{list(shape)}, must be {want_dtype}{list(want_shape)}")
    missing = [name for name in wanted if name not in given]
    if missing:
        raise BadWeights(f"{len(missing)} leaves are missing: {', '.join(missing[:5])}")


def check(params: Any, like: Any) -> None:
    """Raises BadWeights unless two trees have the same leaves and structure."""
    check_declared(declared(params), declared(like))
    if jax.tree.structure(params) != jax.tree.structure(like):
        raise BadWeights(f"tree {jax.tree.structure(params)}, must be {jax.tree.structure(like)}"[:500])


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a leaf; `dtype` is the name of one of a served tree."""
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    return kind.itemsize * math.prod(shape)


def flatten(params: Any) -> dict[str, np.ndarray]:
    """Host copies of the leaves by path name."""
    return dict(zip(names(params), jax.device_get(jax.tree.leaves(params)), strict=True))


def unflatten(leaves: Mapping[str, np.ndarray], like: Any) -> Any:
    """The inverse of `flatten`, in the structure of `like`. Raises BadWeights on a missing or unknown name."""
    check_declared({n: (leaf.dtype.name, tuple(leaf.shape)) for n, leaf in leaves.items()}, declared(like))
    return jax.tree.structure(like).unflatten([leaves[name] for name in names(like)])


def publish(params: Any, version: int, to: Any, *, mode: str = "drain", token: str | None = None) -> None:
    """Makes `to` (a Scheduler, or the "host:port" of a PolicyServer) serve `params` as `version`; blocks until it does.

    Raises StaleVersion when `version` is not above the serving one, BadWeights when the tree does not fit or is not
    finite, Unavailable; the version before then keeps serving. Not for use inside an event loop.
    """
    if not isinstance(to, str):
        to.update(params, version, mode=mode)
        return

    async def send() -> None:
        client = GrpcClient(to, token=token)
        try:
            await client.set_weights(flatten(params), version, mode=mode)
        finally:
            await client.close()

    asyncio.run(send())
