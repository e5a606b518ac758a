"""Make the golden stores of format 1: ``python tools/make_golden.py [DIRECTORY]``, by default tests/golden.

They are committed: a released format is frozen, and readers of all times have to read them. Make them again only
together with a change of docs/spec.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"


def main(directory: Path) -> None:
    sys.path.insert(0, str(TESTS))
    from golden import history, maintained, several

    stores, expected = history.make()
    stores[several.STORE], expected_of_several = several.make()
    stores[maintained.STORE], expected_of_maintained = maintained.make()
    for name, files in stores.items():
        shutil.rmtree(directory / name, ignore_errors=True)
        for key, data in files.items():
            (directory / name / key).parent.mkdir(parents=True, exist_ok=True)
            (directory / name / key).write_bytes(data)
        print(f"{directory / name}: {len(files)} files, {sum(map(len, files.values()))} bytes")
    (directory / "expected.json").write_bytes(history.to_json(expected))
    (directory / "expected-writers.json").write_bytes(history.to_json(expected_of_several))
    (directory / "expected-history.json").write_bytes(history.to_json(expected_of_maintained))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TESTS / "golden")
