"""What every test sees: which services this machine has, and steady property tests.

A test says what it needs with a marker (`@pytest.mark.docker`). A missing service deselects its tests with one printed
line; under CI=true it is a failure. Slow tests run with `--slow`, and under CI=true.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

# Before jax is imported anywhere, and for the processes that tests start. No flag that changes numbers is set here.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")  # a test must not read what an earlier run compiled
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

CI = os.environ.get("CI", "").lower() in ("1", "true")

settings.register_profile(
    "steady", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("wide", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def _docker() -> str:
    try:
        import docker
        from docker.errors import DockerException
    except ModuleNotFoundError:
        return "the docker package is not installed"
    try:
        client = docker.from_env(timeout=5)
        client.ping()
        client.close()
    except DockerException as error:
        return f"no Docker daemon answers: {error}"
    return ""


def _chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome")
    return "" if any(shutil.which(name) for name in names) else f"none of {', '.join(names)} is on PATH"


def _jetstream() -> str:
    return "" if importlib.util.find_spec("jetstream") else "google-jetstream is not installed"


# Marker -> (what it means, a probe that says what is missing, "" when nothing is).
SERVICES: dict[str, tuple[str, Callable[[], str]]] = {
    "docker": ("needs a Docker daemon", functools.cache(_docker)),
    "chromium": ("needs a Chromium browser", functools.cache(_chromium)),
    "jetstream": ("needs the `jetstream` extra", functools.cache(_jetstream)),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than about 20 s; runs with --slow")
    for name, (meaning, _) in SERVICES.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons: dict[str, str] = {} if config.getoption("--slow") or CI else {"slow": "run them with --slow"}
    for name, (_, probe) in SERVICES.items():
        if any(item.get_closest_marker(name) for item in items) and (missing := probe()):
            if CI:
                raise pytest.UsageError(f"CI=true and {name} tests cannot run: {missing}")
            reasons[name] = missing
    left_out = {name: [i for i in items if i.get_closest_marker(name)] for name in reasons}
    lines = [f"{len(tests)} {name} tests deselected: {reasons[name]}" for name, tests in left_out.items() if tests]
    dropped = {item for tests in left_out.values() for item in tests}
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]
        config.stash[_LINES] = lines


_LINES = pytest.StashKey[list[str]]()


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return config.stash.get(_LINES, [])
