"""Settings from files and the command line: what is wrong is named, with the nearest right thing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuajax import config, program
from cuajax.config import ConfigError

GOOD = """
from cuajax import config

def get_config(arg=""):
    given = config.parse_arg(arg, debug=False, seed=0)
    suite = config.suite(families=("a", "b"))
    made = config.experiment("small", seed=given.seed, algo=config.algo("stepo"), suite=suite)
    if given.debug:
        made.train.updates = 2
    return made
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(GOOD)
    return str(path)


def test_a_file_its_argument_and_overrides(file: str) -> None:
    made = program.load(f"{file}:debug,seed=4", {"optimizer.learning_rate": "1", "suite.families": "a,c"})
    assert (made.seed, made.train.updates, made.optimizer.learning_rate) == (4, 2, 1.0)
    assert made.suite.families == ("a", "c")
    assert made.is_locked


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"train.updtes": 3}, "unknown config key 'train.updtes'; did you mean 'train.updates'?"),
        ({"updates": 3}, "did you mean 'train.updates'?"),
        ({"train.updates": "three"}, "train.updates takes int (now 100), not 'three'"),
        ({"train.updates": 3.5}, "train.updates takes int (now 100), not 3.5"),
        ({"train.updates": True}, "train.updates takes int (now 100), not True"),
        ({"data.merge_prefixes": "maybe"}, "data.merge_prefixes takes bool (now True), not 'maybe'"),
        ({"algo": "grpo"}, "algo is a section; set one of its keys: credit, loss, name"),
        ({"train.updates.more": 1}, "unknown config key 'train.updates.more'"),
        ({"rollout.group_size": 1}, "rollout.group_size = 1 is outside 2 .. 1024"),
        ({"optimizer.learning_rate": "nan"}, "optimizer.learning_rate = nan is outside 0.0 .. 1.0"),
    ],
)
def test_a_wrong_override_is_named(file: str, overrides: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        program.load(file, overrides)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("    made.train.updtes = 2\n", ":10: unknown config key 'updtes'; did you mean 'updates'?"),
        ("    made.train.updates = 'two'\n", ":10: TypeError: "),
        ("    config.train(updtes=3)\n", ":10: unknown config key 'train.updtes'; did you mean 'train.updates'?"),
        ("    config.algo('grpo', credit=dict(agregate='token'))\n", "did you mean 'algo.credit.aggregate'?"),
        ("    return (\n", ":10: SyntaxError: "),
        ("    import no_such_module\n", ":10: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_wrong_file_is_told_by_line(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(GOOD.replace("    return made\n", line + "    return made\n"))
    with pytest.raises(ConfigError) as caught:
        program.load(str(path))
    assert told in str(caught.value).replace(str(path), "")


def test_a_missing_file_suggests_its_neighbour(file: str) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        program.load(file.replace("small.py", "smal.py"))


def test_an_argument_typo_is_named(file: str) -> None:
    with pytest.raises(ConfigError, match="unknown config key 'debg'; did you mean 'debug'"):
        program.load(f"{file}:debg")


def test_an_algorithm_of_ones_own_brings_its_arguments() -> None:
    mine = config.algo("mine", credit=dict(decay=0.5))
    assert mine.credit.decay == 0.5
    assert dict(mine.loss) == {}


def test_every_section_is_locked_and_limits_hold_by_default() -> None:
    made = config.experiment("all", algo=config.algo("grpo"), warmup=config.warmup())
    config.check(made)
    known = dict(config.leaves(made)) | dict(config.leaves(config.scoring()))
    assert set(config.LIMITS) <= set(known), "a limit without its setting"
    with pytest.raises(AttributeError):
        made.train.nothing = 1


def test_a_sweep_is_a_list_of_overrides(tmp_path: Path, file: str) -> None:
    path = tmp_path / "sweep.py"
    path.write_text(f"CONFIG = {file!r}\ndef get_sweep():\n    return [{{'seed': s}} for s in range(3)]\n")
    base, points = program.load_sweep(path)
    assert [program.load(base, point).seed for point in points] == [0, 1, 2]


def test_a_missing_extra_names_its_install() -> None:
    config.require_extra("json", "nothing")
    for module in ("no_such_package", "no_such_package.inner"):
        with pytest.raises(ConfigError, match=r"pip install 'cuajax\[jetstream\]'"):
            config.require_extra(module, "jetstream")


def test_a_page_tells_a_typo_before_jax_loads(tmp_path: Path, file: str) -> None:
    page = tmp_path / "page.py"
    page.write_text(
        "import sys\nfrom cuajax import program\n"
        "def main(config, workdir):\n    raise AssertionError('reached')\n"
        "import atexit; atexit.register(lambda: print('jax' in sys.modules))\n"
        "program.run(main, doc='A page.', workdir='')\n"
    )
    command = [sys.executable, str(page), f"--config={file}", "--config.train.updtes=3"]
    root = {"PYTHONPATH": str(Path(config.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | root)
    assert done.returncode == 2
    assert done.stdout == "False\n"
    assert done.stderr == "error: unknown config key 'train.updtes'; did you mean 'train.updates'?\n"
