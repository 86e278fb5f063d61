"""Named policy sizes. Real models carry their real dimensions; `tiny` is the same architecture in small."""

from __future__ import annotations

import dataclasses

from cuajax.models.policy import DecoderConfig, PolicyConfig, VisionConfig


def tiny(vocab_size: int = 128) -> PolicyConfig:
    """Qwen3-VL in small (about 0.4M parameters): learns a 64x64 desktop on two cores in minutes."""
    return PolicyConfig(
        vocab_size=vocab_size,
        vision=VisionConfig(
            hidden=64, depth=1, heads=4, ffn=128, patch=8, merge=2, temporal=2, position_side=8, deepstack=(0,)
        ),
        decoder=DecoderConfig(
            hidden=64,
            layers=4,
            heads=4,
            kv_heads=2,
            head_dim=16,
            ffn=192,
            rope_theta=1e3,
            mrope=(4, 2, 2),
            qk_gain=2.0,
        ),
        tied=False,
        embed_std=0.5,
        remat=False,
        unroll=True,
    )


PRESETS = {"tiny": tiny}


def get(name: str, **overrides: object) -> PolicyConfig:
    """The preset `name` with top-level fields of PolicyConfig replaced. Raises ValueError on an unknown name."""
    if name not in PRESETS:
        raise ValueError(f"unknown policy preset {name!r}; choices: {', '.join(sorted(PRESETS))}")
    return dataclasses.replace(PRESETS[name](), **overrides)  # type: ignore[arg-type]
