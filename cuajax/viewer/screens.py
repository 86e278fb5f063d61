"""One attempt, screen by screen: what the policy saw, where it acted, what it said and how sure it was."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from PIL import Image as Picture

from cuajax.types import Action, Outcome, Step, Task, Trajectory
from cuajax.viewer.text import told, visible

MAX_SIDE = 960  # pixels; a larger screenshot is scaled down for the page
PIXELATED_BELOW = 320  # pixels of width: small screens are shown enlarged, pixel by pixel
Images = Mapping[str, np.ndarray]  # screen hash -> uint8[H,W,3]
TokenText = Callable[[int], str]


def image_hashes(attempts: Iterable[tuple[Task, Trajectory]]) -> set[str]:
    """The screens a report of these attempts shows: what to load before rendering it."""
    return {_screen(step) for _, trajectory in attempts for step in trajectory.steps} - {""}


def _screen(step: Step) -> str:
    return step.screen_hash or (step.image_hashes[-1] if step.image_hashes else "")


def data_uri(pixels: np.ndarray) -> str:
    """uint8[H,W,3] -> a PNG data URI, scaled down to MAX_SIDE."""
    picture = Picture.fromarray(np.ascontiguousarray(pixels))
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# ------------------------------------------------------------------------------------------------------ actions
def say(action: Action) -> str:
    """One action in words: `click 0.43, 0.71`."""
    at = "" if action.x is None or action.y is None else f" {action.x:.2f}, {action.y:.2f}"
    to = "" if action.x2 is None or action.y2 is None else f" → {action.x2:.2f}, {action.y2:.2f}"
    words = {
        "type": f" “{action.text}”",
        "key": f" {' + '.join(action.keys)}",
        "scroll": f" {action.dx:+g}, {action.dy:+g} at",
        "wait": f" {action.seconds:g} s",
        "terminate": f": {action.status or 'done'}",
    }.get(action.kind, "")
    return f"{action.kind.replace('_', ' ')}{words}{at}{to}"


def _overlay(actions: Iterable[Action], height: int, width: int) -> str:
    """SVG over the screenshot, in its pixels: rings where it clicked, an arrow where it dragged or scrolled."""
    unit = max(height, width) / 64
    marks = []
    for action in actions:
        if action.x is None or action.y is None:
            continue
        x, y = action.x * width, action.y * height
        marks += [f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius * unit:.2f}"/>' for radius in (1.2, 3.8)]
        if action.x2 is not None and action.y2 is not None:
            marks.append(_arrow((x, y), (action.x2 * width, action.y2 * height), unit))
        elif action.kind == "scroll":
            reach = 10 * unit
            marks.append(_arrow((x, y), (x + reach * np.sign(action.dx), y + reach * np.sign(action.dy)), unit))
    if not marks:
        return ""
    drawn = "".join(marks)
    halo, ink = (
        f'<g class="{name}" stroke-width="{w * unit:.2f}">{drawn}</g>' for name, w in (("halo", 1.8), ("ink", 0.8))
    )
    return f'<svg class="marks" viewBox="0 0 {width} {height}" aria-hidden="true">{halo}{ink}</svg>'


def _arrow(start: tuple[float, float], end: tuple[float, float], unit: float) -> str:
    angle = math.atan2(end[1] - start[1], end[0] - start[0])
    barbs = [(end[0] - 3 * unit * math.cos(angle + t), end[1] - 3 * unit * math.sin(angle + t)) for t in (0.5, -0.5)]
    path = f"M{start[0]:.2f},{start[1]:.2f} L{end[0]:.2f},{end[1]:.2f}"
    head = "".join(f" M{bx:.2f},{by:.2f} L{end[0]:.2f},{end[1]:.2f}" for bx, by in barbs)
    return f'<path d="{path}{head}"/>'


# ---------------------------------------------------------------------------------------------------- the answer
def _tokens(step: Step, token_text: TokenText) -> str:
    """Each sampled token, shaded by its probability (classes `p0` unlikely ... `p9` certain)."""
    chips = []
    for token, logprob in zip(step.completion.token_ids.tolist(), step.completion.logprobs.tolist(), strict=True):
        chance = math.exp(min(logprob, 0.0)) if math.isfinite(logprob) else 0.0
        title = f"id {token}, logprob {logprob:.3f}, probability {chance:.1%}"
        shade = min(9, int(chance * 10))
        text = visible(token_text(token))
        chips.append(f'<span class="token p{shade}" title="{told(title)}">{text}<sub>{logprob:.2f}</sub></span>')
    return f'<p class="tokens">{"".join(chips)}</p>'


def _figure(step: Step, total: int, images: Images, token_text: TokenText) -> str:
    actions = [call.action for call in step.calls if call.action is not None]
    pixels = images.get(_screen(step))
    if pixels is None:
        screen = '<div class="absent">screen not kept</div>'
    else:
        height, width = pixels.shape[:2]
        small = ' class="pixels"' if width <= PIXELATED_BELOW else ""
        picture = (
            f'<img{small} src="{data_uri(pixels)}" width="{width}" height="{height}" alt="screen {step.index + 1}">'
        )
        screen = picture + _overlay(actions, height, width)
    said = [f"<b>{told(say(action))}</b>" for action in actions]
    said += [f"<b>{told(call.tool)}</b> {visible(call.result)}" for call in step.calls if call.action is None]
    if step.parse_error is not None:
        said.append(f'<span class="error">not an action: {told(step.parse_error)}</span>')
    times = " · ".join(f"{told(name)} {1000 * seconds:.0f} ms" for name, seconds in step.timings.items())
    return (
        f'<figure><div class="screen">{screen}</div><figcaption>'
        f'<span class="place">{step.index + 1} / {total}</span> {", ".join(said) or "no action"}'
        f'{_tokens(step, token_text)}<p class="times">{times}</p></figcaption></figure>'
    )


def badge(outcome: Outcome) -> str:
    """Status and reward."""
    text = outcome.status if outcome.status == "invalid" else f"{outcome.status} · reward {outcome.reward:.2f}"
    return f'<span class="badge {outcome.status}">{text}</span>'


def attempt(task: Task, trajectory: Trajectory, images: Images, token_text: TokenText) -> str:
    """One attempt as an `<article>`; everything that came from a task, a policy or a sandbox is escaped."""
    versions = [int(v) for step in trajectory.steps for v in step.completion.versions]
    span = f"policy version {min(versions)}" if versions else "no policy call"
    if versions and max(versions) > min(versions):
        span = f"policy versions {min(versions)} to {max(versions)}"
    figures = "".join(_figure(step, len(trajectory.steps), images, token_text) for step in trajectory.steps)
    reason = f'<p class="reason">{told(trajectory.outcome.reason)}</p>' if trajectory.outcome.reason else ""
    return (
        f"<article><header><h3>{told(task.instruction)}</h3>{badge(trajectory.outcome)}</header>"
        f'<p class="about">{told(task.family)} · {told(trajectory.id)} · {len(trajectory.steps)} '
        f"{'decision' if len(trajectory.steps) == 1 else 'decisions'} · {span}</p>{reason}"
        f'<div class="film">{figures}</div></article>'
    )
