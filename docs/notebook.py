"""The tutorial as a notebook that has been run: ``notebook.py FILE``. It needs nbformat, nbclient and ipykernel.

SPDX-License-Identifier: MIT
"""

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def build(path):
    made = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    page = (Path(__file__).parent / "tutorial.md").read_text()
    for part in re.split(r"(^```python\n.*?^```$)", page, flags=re.M | re.S):
        if block := re.fullmatch(r"```python\n(.*?)```", part, re.S):
            made.cells.append(nbformat.v4.new_code_cell(block[1].strip()))
        elif part.strip():
            made.cells.append(nbformat.v4.new_markdown_cell(part.strip()))
    path.parent.mkdir(parents=True, exist_ok=True)
    NotebookClient(made, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    nbformat.write(made, path)


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
