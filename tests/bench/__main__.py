"""`python -m tests.bench NAME [ARGS]` runs the `main(argv)` of tests/bench/NAME.py; without a name it lists them.

A benchmark prints a table for a person and returns a dict, which is printed last as one line of JSON.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent


def names() -> dict[str, str]:
    """Benchmark -> the first line of its docstring, read without importing it."""
    files = sorted(path for path in HERE.glob("*.py") if not path.stem.startswith("_"))
    docs = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in files}
    return {name: doc.partition("\n")[0] for name, doc in docs.items()}


def main(argv: list[str]) -> int:
    known = names()
    if not argv or argv[0] in ("-h", "--help"):
        print("python -m tests.bench NAME [ARGS]\n")
        print("\n".join(f"  {name:<16} {doc}" for name, doc in known.items()) or "  (none yet)")
        return 0
    if argv[0] not in known:
        print(f"error: no benchmark {argv[0]!r}; choices: {', '.join(known) or 'none'}", file=sys.stderr)
        return 2
    result = importlib.import_module(f"tests.bench.{argv[0]}").main(argv[1:])
    sys.stdout.flush()
    print(json.dumps({"bench": argv[0], **(result or {})}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
