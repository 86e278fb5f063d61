"""The tiny policy: one log-probability for a token, however it is laid out, chunked, cached or truncated."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cuajax.data.pack import PackSpec, pack
from cuajax.inputs.grid import image_index, positions, vision_inputs
from cuajax.inputs.processor import ImageSpec
from cuajax.inputs.tokenizer import CompactTokenizer
from cuajax.models import layers, policy, presets
from cuajax.models.layers import tree_attention
from cuajax.types import Sample, VisionInputs

TOKENS = CompactTokenizer()
CFG = presets.get("tiny", vocab_size=TOKENS.vocab_size)
SPEC = PackSpec(
    length=128, loss_tokens=48, images_per_row=4, patches_per_image=64, rows=2, image=ImageSpec(),
    image_id=TOKENS.image_id, pad_id=TOKENS.pad_id,
)  # fmt: skip


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)  # perturbed, so that no bias is 0 and no norm 1
    made = jax.jit(policy.init, static_argnums=1)(jax.random.key(0), CFG)
    return jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape).astype(np.float32), made)


def screens(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"{i}" * 64: rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for i in range(count)}


def samples(images: dict[str, np.ndarray], *, per_image: int = 3) -> list[Sample]:
    rng = np.random.default_rng(1)
    made = []
    for i, digest in enumerate(images):
        words = rng.integers(3, TOKENS.vocab_size, 5 + i)
        words = np.where(words == TOKENS.image_id, 3, words)
        prompt = np.array([*[TOKENS.image_id] * 16, *words], np.int32)
        for j in range(per_image):
            k = 1 + (i + j) % 4
            answer = rng.integers(0, TOKENS.vocab_size, k).astype(np.int32)
            one = np.ones(k, np.float32)
            made.append(Sample(prompt, (digest,), answer, 0 * one, one, one * rng.random(), name=f"{i}/{j}"))
    return made


def score(params, batch, cfg=CFG, **options):
    fn = jax.jit(functools.partial(policy.token_logprobs, cfg=cfg, **options))
    parts = [fn(params, jax.tree.map(lambda a, m=m: a[m], batch)) for m in range(batch.tokens.shape[0])]
    return np.stack([logp for logp, _ in parts]), np.stack([entropy for _, entropy in parts])


def weighted(params, batch) -> float:
    """An order-free fingerprint: every sample has its own weight."""
    logp, _ = score(params, batch)
    return float((logp * batch.weight).sum())


def test_declared_once():
    made, abstract, axes = (
        jax.jit(policy.init, static_argnums=1)(jax.random.key(0), CFG),
        policy.abstract(CFG),
        policy.logical_axes(CFG),
    )
    assert jax.tree.map(lambda p: p.shape, made) == jax.tree.map(lambda p: p.shape, abstract)
    leaves = jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, tuple))
    assert [len(a) for a in leaves] == [p.ndim for p in jax.tree.leaves(made)]
    assert sum(p.size for p in jax.tree.leaves(made)) < 450_000


def test_tree_equals_plain(params):
    images = screens(3)
    chosen = samples(images)
    tree, merged = pack(chosen, images, spec=SPEC)
    plain, apart = pack(chosen, images, spec=dataclasses.replace(SPEC, merge_prefixes=False))
    assert merged.tokens < 0.6 * apart.tokens
    assert weighted(params, tree) == pytest.approx(weighted(params, plain), rel=1e-5)


def test_decode_equals_forward(params):
    images = screens(2)
    one = samples(images, per_image=1)
    batch, _ = pack(one, images, spec=SPEC)
    logp, _ = score(params, batch)
    forward = {float(w): float(p) for p, w in zip(logp[batch.weight > 0], batch.weight[batch.weight > 0], strict=True)}
    width, longest = 32, max(len(s.prompt_ids) for s in one)
    assert longest <= width
    ids, index = np.zeros((2, width), np.int32), np.full((2, width), -1, np.int32)
    place, after, lengths = np.zeros((2, 3, width), np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)
    for i, s in enumerate(one):
        n = lengths[i] = len(s.prompt_ids)
        ids[i, :n], (place[i, :, :n], after[i]) = s.prompt_ids, positions(s.prompt_ids, [(4, 4)], TOKENS.image_id)
        index[i, :n] = image_index(s.prompt_ids, TOKENS.image_id, [0])
    seen = vision_inputs(list(images.values()), ImageSpec(), patches=64)
    seen = VisionInputs(*(np.asarray(a)[:, None] for a in seen))
    prefill, decode = (jax.jit(f, static_argnames="cfg") for f in (policy.prefill, policy.decode))
    logits, cache = prefill(params, policy.PromptBatch(ids, place, lengths, index, seen), cfg=CFG)
    cache = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, 8), (0, 0), (0, 0))), cache)
    for step in range(max(len(s.response_ids) for s in one)):
        logp = np.asarray(jax.nn.log_softmax(logits))
        last = np.zeros(2, np.int32)
        for i, s in enumerate(one):
            if step < len(s.response_ids):
                last[i] = s.response_ids[step]
                # all tokens of a sample share its weight, so only one-token answers can be looked up by it
                if len(s.response_ids) == 1:
                    assert logp[i, last[i]] == pytest.approx(forward[float(s.weight[0])], abs=1e-5)
        logits, cache = decode(params, cache, last, after + step, lengths=lengths + step, cfg=CFG)
    assert np.isfinite(logits).all()


def test_a_decoded_token_gets_the_bits_of_a_training_row():
    """Attention of one query among many queries, and a norm of few rows among many, in float32 on a CPU."""
    rng = np.random.default_rng(0)
    q, k, v, x = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((32, 40, 4, 16), (32, 40, 2, 16), (32, 40, 2, 16), (64, 128, 16))
    )
    rows = layers.tree_mask(jnp.full((32, 40), 40), 0, 40)
    whole = jax.jit(layers.attend)(q, k, v, rows)
    for at in (0, 17, 39):
        row = slice(at, at + 1)
        seen = jnp.pad(rows[:, row], ((0, 0), (0, 0), (0, 8)))  # a decode cache has room for more
        longer = [jnp.pad(a, ((0, 0), (0, 8), (0, 0), (0, 0))) for a in (k, v)]
        assert np.array_equal(whole[:, row], jax.jit(layers.attend)(q[:, row], *longer, seen))
    norm = jax.jit(lambda x: layers.rms_norm(x, jnp.ones(16), 1e-6))
    assert np.array_equal(norm(x)[:, :1], norm(x[:, :1]))


def test_attention_in_blocks_equals_whole():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 64, h, 8)) for key, h in zip(keys, (4, 2, 2), strict=True))
    ends = np.minimum(64, np.arange(64) + np.random.default_rng(0).integers(1, 40, (2, 64))).astype(np.int32)
    whole = tree_attention(q, k, v, ends, block=64)
    np.testing.assert_allclose(tree_attention(q, k, v, ends, block=16), whole, atol=1e-6)
    with pytest.raises(ValueError, match="64 is not a multiple of the attention block 48"):
        tree_attention(q, k, v, ends, block=48)


def test_head_in_chunks_equals_whole(params):
    images = screens(3)
    batch, _ = pack(samples(images), images, spec=SPEC)
    whole = score(params, batch)
    chunked = score(params, batch, dataclasses.replace(CFG, logit_chunk=7))
    np.testing.assert_allclose(chunked[0], whole[0], atol=1e-5)
    np.testing.assert_allclose(chunked[1], whole[1], atol=1e-5)


def test_temperature_and_support_renormalise():
    scores = np.random.default_rng(0).normal(size=(3, 10)).astype(np.float32)
    target = np.array([1, 4, 7], np.int32)
    support = np.array([[1, 2, -1], [4, 5, 6], [-1, -1, -1]], np.int32)
    logp, entropy = policy._score(jnp.asarray(scores), target, support)
    for i in range(3):
        kept = [j for j in support[i] if j >= 0] or list(range(10))
        p = np.exp(scores[i, kept]) / np.exp(scores[i, kept]).sum()
        assert logp[i] == pytest.approx(np.log(p[kept.index(target[i])]), abs=1e-5)
        assert entropy[i] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)


def test_rows_past_the_tokenizer_are_never_scored(params):
    cfg = dataclasses.replace(CFG, valid_vocab=50)
    logits = policy.logits(params, jnp.ones((2, CFG.decoder.hidden)), cfg)
    assert (logits[:, 50:] < -1e29).all() and np.isfinite(jax.nn.log_softmax(logits)[:, :50]).all()


def test_every_parameter_gets_a_finite_gradient(params):
    images = screens(3)
    batch, _ = pack(samples(images), images, spec=SPEC)
    first = jax.tree.map(lambda a: a[0], batch)
    objective = jax.jit(jax.grad(lambda p: (policy.token_logprobs(p, first, cfg=CFG)[0] * first.weight).sum()))
    grads = objective(params)
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(g).all() and np.abs(g).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": dataclasses.replace(CFG.decoder, mrope=(4, 2, 1))}, "must sum to head_dim/2 = 8"),
        ({"decoder": dataclasses.replace(CFG.decoder, kv_heads=3)}, "not a multiple of kv_heads 3"),
        ({"valid_vocab": 10_000}, "outside 0.."),
    ],
)
def test_impossible_dimensions_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CFG, **change)


def test_unknown_preset_names_the_choices():
    with pytest.raises(ValueError, match="unknown policy preset 'huge'; choices: tiny"):
        presets.get("huge")
