"""A run as one page a person reads: `report.html`, a single file without scripts or outside resources."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from cuajax.types import Task, Trajectory
from cuajax.viewer import screens
from cuajax.viewer.curve import Series, svg
from cuajax.viewer.text import told


@dataclass(frozen=True, slots=True)
class FamilyScore:
    """Held-out success of one task family, in [0,1]."""

    family: str
    tasks: int
    before: float | None  # None: not measured
    after: float


@dataclass(frozen=True, slots=True)
class Report:
    """What the page shows; an empty part is left out."""

    title: str
    headline: str  # the result in one sentence
    facts: Sequence[tuple[str, str]] = ()  # (name, value) under the headline
    curves: Series = field(default_factory=dict)
    families: Sequence[FamilyScore] = ()
    stages: Sequence[tuple[str, str, float, float]] = ()  # role, stage, seconds, share (metrics.breakdown)
    attempts: Sequence[tuple[Task, Trajectory]] = ()
    images: screens.Images = field(default_factory=dict)  # of screens.image_hashes(attempts)
    token_text: screens.TokenText = str
    config: Mapping[str, Any] = field(default_factory=dict)  # resolved, plain


def _policy(style: str) -> str:
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{told(title)}</h2>{body}</section>" if body else ""


def _bar(share: float) -> str:
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        '<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="100" height="6"/><rect class="fill" width="{width:.1f}" height="6"/></svg>'
    )


def _families(scores: Sequence[FamilyScore]) -> str:
    if not scores:
        return ""
    rows = []
    for score in scores:
        before = "–" if score.before is None else f"{score.before:.1%}"
        gain = "" if score.before is None else f"{100 * (score.after - score.before):+.1f}"
        rows.append(
            f"<tr><th>{told(score.family)}</th><td>{score.tasks}</td><td>{before}</td>"
            f'<td class="main">{score.after:.1%}</td><td class="gain">{gain}</td>'
            f'<td class="wide">{_bar(score.after)}</td></tr>'
        )
    head = "<tr><th>family</th><td>tasks</td><td>before</td><td>after</td><td>points</td><td></td></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _stages(stages: Sequence[tuple[str, str, float, float]]) -> str:
    parts = []
    for role in dict.fromkeys(role for role, *_ in stages):
        own = [(stage, seconds, share) for r, stage, seconds, share in stages if r == role]
        rects, legend, at = [], [], 0.0
        for rank, (stage, seconds, share) in enumerate(own):
            shade, name = "idle" if stage == "idle" else f"s{rank % 8}", told(stage)
            place = f'x="{at:.2f}" width="{100 * share:.2f}" height="8"'
            rects.append(f'<rect class="{shade}" {place}><title>{name}</title></rect>')
            legend.append(f'<li><i class="{shade}"></i>{name} <b>{share:.0%}</b> <small>{seconds:,.1f} s</small></li>')
            at += 100 * share
        strip = f'<svg class="strip" viewBox="0 0 100 8" preserveAspectRatio="none">{"".join(rects)}</svg>'
        parts.append(f'<h3>{told(role)}</h3>{strip}<ul class="legend">{"".join(legend)}</ul>')
    return "".join(parts)


def _attempts(report: Report) -> str:
    return "".join(screens.attempt(t, run, report.images, report.token_text) for t, run in report.attempts)


def render(report: Report) -> str:
    """The whole page as a string. Every text that came from outside is escaped; scripts cannot run in it."""
    style = importlib.resources.files("cuajax.viewer").joinpath("report.css").read_text(encoding="utf-8")
    facts = "".join(f"<div><dt>{told(name)}</dt><dd>{told(value)}</dd></div>" for name, value in report.facts)
    settings = escape(json.dumps(report.config, indent=2, default=str)) if report.config else ""
    body = [
        f"<header class='top'><p class='brand'>cuajax</p><h1>{told(report.title)}</h1>",
        f"<p class='headline'>{told(report.headline)}</p>{f'<dl>{facts}</dl>' if facts else ''}</header>",
        _section("Success", svg(report.curves)),
        _section("By task family", _families(report.families)),
        _section("Attempts, screen by screen", _attempts(report)),
        _section("Where the time went", _stages(report.stages)),
        _section(
            "Settings",
            f"<details><summary>resolved config</summary><pre>{settings}</pre></details>" if settings else "",
        ),
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{told(_policy(style))}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{told(report.title)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def write(report: Report, path: str | os.PathLike[str]) -> None:
    """Renders to `path`, whole or not at all. Raises OSError."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.draft")
    try:
        draft.write_text(render(report), encoding="utf-8")
        os.replace(draft, target)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
