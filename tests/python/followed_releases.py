"""Writes pyvmem/transformers/known.py: python tests/python/followed_releases.py FOLDER/transformers...

Each folder is the package of a release that `make test-transformers-releases` has passed.

SPDX-License-Identifier: MIT
"""

import sys
from pathlib import Path

from pyvmem.transformers.followed import digests

HEAD = '''"""Digests of the functions of transformers that `followed.py` names, in the releases that were tried.

"" if a release lacks it. Written by tests/python/followed_releases.py.

SPDX-License-Identifier: MIT
"""

DIGESTS: dict[str, tuple[str, ...]] = {
'''


def main(folders):
    found = [digests(Path(folder)) for folder in folders]
    text = HEAD
    for name in sorted({name for each in found for name in each}):
        known = tuple(dict.fromkeys(each.get(name, "") for each in found))
        shown = ", ".join(f'"{digest}"' for digest in known) + ("," if len(known) == 1 else "")
        text += f'    "{name}": ({shown}),\n'
    target = Path(__file__).parents[2] / "pyvmem" / "transformers" / "known.py"
    target.write_text(text + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
