"""The one train step: it sums gradients over microbatches and never learns which algorithm it serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cuajax.train.sharding import batch_sharding
from cuajax.train.state import TrainState
from cuajax.types import PackedBatch

Logprobs = Callable[[Any, PackedBatch], tuple[jax.Array, jax.Array]]  # params, batch -> logp, entropy f32[B,K]
Loss = Callable[[jax.Array, jax.Array, PackedBatch], tuple[jax.Array, dict[str, Any]]]


def make_train_step(
    logprobs: Logprobs,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    state_shardings: Any = None,
    compute_dtype: Any = None,
) -> Callable[[TrainState, PackedBatch], tuple[TrainState, dict[str, Any]]]:
    """Builds the jitted step(state, microbatches) -> (state, metrics); state is donated.

    microbatches: PackedBatch with leading [n_micro, B]; each n_micro is one compilation.
    loss returns a sum whose denominators already sit in the weights, and metrics {"sums": {..}, "maxima": {..}}.
    state_shardings: a TrainState of NamedShardings; with a mesh alone everything but the batch is replicated.
    compute_dtype: float parameters are cast to it for the forward pass; gradients and masters stay float32.
    A non-finite loss or gradient leaves params and opt_state bitwise unchanged and adds 1 to `skipped`.
    metrics: loss, grad_norm (before clipping), update_norm, skipped, sums, maxima.
    """

    def objective(params, batch):
        logp, entropy = logprobs(cast(params, compute_dtype), batch)
        return loss(logp, entropy, batch)

    gradient = jax.value_and_grad(objective, has_aux=True)
    inner = None if state_shardings is None else state_shardings.params

    def step(state: TrainState, microbatches: PackedBatch) -> tuple[TrainState, dict[str, Any]]:
        (total, metrics), grads = _accumulate(gradient, state.params, microbatches, inner)
        norm = optax.tree.norm(grads)
        good = jnp.isfinite(total) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        keep = lambda new, old: jnp.where(good, new, old)  # noqa: E731
        report = {
            "loss": total,
            "grad_norm": norm,
            "update_norm": jnp.where(good, optax.tree.norm(updates), 0.0),
            "skipped": jnp.where(good, 0, state.skipped + 1),
            **metrics,
        }
        new = TrainState(
            step=state.step + 1,
            params=jax.tree.map(keep, params, state.params),
            opt_state=jax.tree.map(keep, opt_state, state.opt_state),
            skipped=report["skipped"],
        )
        return new, report

    if mesh is None:
        return jax.jit(step, donate_argnums=0)
    everywhere = NamedSharding(mesh, PartitionSpec())
    states = everywhere if state_shardings is None else state_shardings
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(states, batch_sharding(mesh)),
        out_shardings=(states, everywhere),
    )


def make_score_step(
    logprobs: Logprobs, *, mesh: Mesh | None = None, params_shardings: Any = None, compute_dtype: Any = None
) -> Callable[[Any, PackedBatch], jax.Array]:
    """Builds the jitted score(params, microbatches) -> logp float32[n_micro,B,K], for prox_logp and ref_logp."""

    def score(params, microbatches: PackedBatch) -> jax.Array:
        params = cast(params, compute_dtype)
        return jax.lax.map(lambda batch: logprobs(params, batch)[0].astype(jnp.float32), microbatches)

    if mesh is None:
        return jax.jit(score)
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = everywhere if params_shardings is None else params_shardings
    return jax.jit(score, in_shardings=(params, batch_sharding(mesh)), out_shardings=batch_sharding(mesh))


def cast(params: Any, dtype: Any) -> Any:
    """Params with every float leaf in dtype; unchanged when dtype is None."""
    if dtype is None:
        return params
    return jax.tree.map(lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p, params)


def _accumulate(gradient, params, microbatches, shardings):
    """((loss, metrics), grads) summed over the leading axis."""

    def pinned(grads):
        return grads if shardings is None else jax.lax.with_sharding_constraint(grads, shardings)

    def one(batch):
        (total, metrics), grads = gradient(params, batch)
        return (total, metrics["sums"]), metrics["maxima"], pinned(grads)

    if jax.tree.leaves(microbatches)[0].shape[0] == 1:  # a loop body is compiled less well than straight code
        (total, sums), maxima, grads = one(jax.tree.map(lambda x: x[0], microbatches))
        return (total, {"sums": sums, "maxima": maxima}), grads

    def body(carry, batch):
        added, largest, grads = one(batch)
        plus = jax.tree.map(jnp.add, (carry[0], carry[2]), (added, grads))
        return (plus[0], jax.tree.map(jnp.maximum, carry[1], largest), plus[1]), None

    first = jax.eval_shape(one, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), microbatches))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
    floor = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), first[1])
    (summed, maxima, grads), _ = jax.lax.scan(body, (zero[0], floor, pinned(zero[2])), microbatches)
    return (summed[0], {"sums": summed[1], "maxima": maxima}), grads
