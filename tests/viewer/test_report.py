"""The report: one file, nothing runs in it, nothing leaves it, and what a sandbox or policy wrote is text."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cuajax.types import Action, Call, Completion, Outcome, Step, Task, Trajectory
from cuajax.viewer import curve, report, screens

HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=y>\x00\u202e"
VOID = {"meta", "img"}


class Tree(HTMLParser):
    """Checks that tags close in order and keeps every (tag, attributes) and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def step(index: int, action: Action | None, *, error: str | None = None, screen: str = "s0", text: str = "") -> Step:
    ids = np.array([1, 2, 3], np.int32)
    logprobs = np.log(np.array([0.999, 0.55, 0.02], np.float32))
    calls = () if action is None else (Call(action),)
    if text:
        calls = (Call(tool="search", result=text),)
    completion = Completion(ids, logprobs, np.full(3, 7 + index, np.int32), "stop")
    return Step(index, ids, (screen,), completion, calls, error, screen, {"policy": 0.012})


def attempt(*steps: Step, status: str = "success", reward: float = 1.0) -> tuple[Task, Trajectory]:
    task = Task("sim/press/1", "sim", "press", "press red")
    outcome = Outcome(status, reward, "goal met")  # type: ignore[arg-type]
    return task, Trajectory("t0", task.id, "g0", 0, steps, outcome)


@pytest.fixture
def screen() -> np.ndarray:
    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[10:20, 30:40] = (255, 0, 0)
    return pixels


def full(screen: np.ndarray) -> report.Report:
    return report.Report(
        title="stepo",
        headline="Success rose from 20% to 90%.",
        facts=[("updates", "120")],
        curves={"held-out": [(0, 0.2), (60, 0.7), (120, 0.9)], "training": [(0, 0.2), (120, 0.8)]},
        families=[report.FamilyScore("press", 32, 0.25, 0.9), report.FamilyScore("type", 32, None, 0.5)],
        stages=[("learner", "step", 6.0, 0.75), ("learner", "idle", 2.0, 0.25)],
        attempts=[attempt(step(0, Action("click", x=0.5, y=0.25)), step(1, Action("terminate", status="success")))],
        images={"s0": screen},
        token_text={1: "<x8>", 2: "<y4>", 3: "<click>"}.__getitem__,
        config={"train": {"updates": 120}},
    )


def test_a_page_shows_what_a_person_asks_for(screen: np.ndarray) -> None:
    tree = Tree(report.render(full(screen)))
    for words in (
        "Success rose from 20% to 90%.", "120", "press red", "success · reward 1.00", "click 0.50, 0.25", "goal met",
        "terminate: success", "<x8>", "-0.60", "policy versions 7 to 8", "press", "25.0%", "90.0%", "+65.0", "75%",
        "1 / 2", "policy 12 ms", '"updates": 120',
    ):  # fmt: skip
        assert words in tree.text, words


def test_the_page_is_one_file_in_which_nothing_runs(screen: np.ndarray) -> None:
    page = report.render(full(screen))
    tree = Tree(page)
    assert not tree.all("script")
    assert not tree.all("link")
    assert not any(name.startswith("on") or name == "style" for _, attrs in tree.tags for name in attrs)
    links = [v for _, attrs in tree.tags for k, v in attrs.items() if k in ("src", "href", "data", "action")]
    assert links
    assert all(link and link.startswith("data:image/png;base64,") for link in links)
    assert "http://" not in page.replace("http-equiv", "")
    assert "https://" not in page
    policy = next(a["content"] for a in tree.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy


def test_everything_from_outside_is_escaped(screen: np.ndarray) -> None:
    task = Task(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    steps = (
        step(0, Action("type", text=HOSTILE)),
        step(1, None, error=HOSTILE),
        step(2, None, text=HOSTILE + "\n"),
        step(3, Action("key", keys=(HOSTILE,)), screen="gone"),
    )
    run = Trajectory(HOSTILE, HOSTILE, "g", 0, steps, Outcome("failure", 0.0, HOSTILE))
    page = report.render(
        report.Report(
            title=HOSTILE, headline=HOSTILE, facts=[(HOSTILE, HOSTILE)], curves={HOSTILE: [(0, 0.5), (1, 0.6)]},
            families=[report.FamilyScore(HOSTILE, 1, None, 1.0)], stages=[(HOSTILE, HOSTILE, 1.0, 1.0)],
            attempts=[(task, run)], images={"s0": screen}, token_text=lambda _: HOSTILE, config={HOSTILE: HOSTILE},
        )
    )  # fmt: skip
    tree = Tree(page)
    assert not tree.all("script")
    assert all(img.get("src", "").startswith("data:") for img in tree.all("img"))  # type: ignore[union-attr]
    assert "\x00" not in page
    assert "\u202e" not in page
    assert "screen not kept" in tree.text


def test_screens_are_lossless_and_enlarged_pixel_by_pixel(screen: np.ndarray) -> None:
    image = Tree(report.render(full(screen))).all("img")[0]
    data = base64.b64decode((image["src"] or "").partition(",")[2])
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), screen)
    assert image["class"] == "pixels"


def test_a_large_screen_is_scaled_down() -> None:
    data = base64.b64decode(screens.data_uri(np.zeros((1080, 1920, 3), np.uint8)).partition(",")[2])
    assert Image.open(io.BytesIO(data)).size == (960, 540)


@pytest.mark.parametrize(
    ("action", "circles", "paths"),
    [
        (Action("click", x=0.5, y=0.25), 2, 0),
        (Action("drag", x=0.1, y=0.1, x2=0.9, y2=0.9), 2, 1),
        (Action("scroll", x=0.5, y=0.5, dy=3.0), 2, 1),
        (Action("key", keys=("ctrl", "a")), 0, 0),
    ],
)
def test_actions_are_drawn_where_they_happened(screen: np.ndarray, action: Action, circles: int, paths: int) -> None:
    made = screens.attempt(*attempt(step(0, action)), {"s0": screen}, str)
    ink = made.partition('class="ink"')[2]
    assert (ink.count("<circle"), ink.count("<path")) == (circles, paths)
    if circles and action.x is not None and action.y is not None:
        assert f'cx="{action.x * 64:.2f}" cy="{action.y * 48:.2f}"' in ink


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (Action("click", x=0.5, y=0.25), "click 0.50, 0.25"),
        (Action("drag", x=0.1, y=0.1, x2=0.9, y2=0.8), "drag 0.10, 0.10 → 0.90, 0.80"),
        (Action("type", text="cat"), "type “cat”"),
        (Action("key", keys=("ctrl", "a")), "key ctrl + a"),
        (Action("scroll", x=0.5, y=0.5, dy=-3), "scroll +0, -3 at 0.50, 0.50"),
        (Action("terminate", status="failure"), "terminate: failure"),
    ],
)
def test_actions_in_words(action: Action, said: str) -> None:
    assert screens.say(action) == said


def test_tokens_are_shaded_by_probability(screen: np.ndarray) -> None:
    made = screens.attempt(*attempt(step(0, Action("click", x=0.5, y=0.5))), {"s0": screen}, str)
    assert re.findall(r'class="token (p\d)"', made) == ["p9", "p5", "p0"]


def test_an_invalid_attempt_shows_no_reward() -> None:
    assert "reward" not in screens.badge(Outcome("invalid", 0.0, "sandbox lost"))


def test_an_empty_run_still_has_a_page() -> None:
    tree = Tree(report.render(report.Report("none", "Nothing ran.")))
    assert "Nothing ran." in tree.text
    assert not tree.all("section")


def test_needed_images_are_named(screen: np.ndarray) -> None:
    assert screens.image_hashes(full(screen).attempts) == {"s0"}


def test_the_file_is_written_whole(tmp_path: Path, screen: np.ndarray) -> None:
    report.write(full(screen), tmp_path / "report.html")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(OSError):
        report.write(full(screen), tmp_path / "missing" / "report.html")


def test_the_curve_as_a_file(tmp_path: Path) -> None:
    curve.png({"held-out": [(0, 0.2), (100, 0.9)], "training": [(0, 0.1)]}, tmp_path / "curve.png", title="stepo")
    with Image.open(tmp_path / "curve.png") as picture:
        assert picture.size == (1600, 800)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 120), (3, 4), (0, 1e6), (0.2, 0.9)])
def test_axis_ticks_are_few_and_inside(low: float, high: float) -> None:
    ticks = curve._ticks(low, high)
    assert 1 <= len(ticks) <= 8
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


def test_a_curve_needs_points() -> None:
    assert curve.svg({"held-out": []}) == ""
    assert "polyline" in curve.svg({"held-out": [(5, 0.5)]})
