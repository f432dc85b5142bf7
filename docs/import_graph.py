"""Print which rooms of the package import which: one line per room, in the order of ``tests/test_package.py``.

python docs/import_graph.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from test_package import ROOMS, imports, modules, room_of


def graph() -> dict[str, list[str]]:
    """Return the rooms that each room imports from, both in the order of the list."""
    edges: dict[str, set[str]] = {}
    for name, path in modules().items():
        room = room_of(name)
        edges.setdefault(room, set()).update(room_of(imported) for imported in imports(path))
    return {
        room: [other for other in ROOMS if other in edges[room] and other != room] for room in ROOMS if room in edges
    }


if __name__ == "__main__":
    for room, others in graph().items():
        print(f"{room:<14} {', '.join(others)}".rstrip())
