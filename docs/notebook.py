"""The tutorial as a program, and as a notebook that has been run.

    notebook.py run FOLDER       run the page's blocks in order, in FOLDER, as one program
    notebook.py build FILE       write the notebook with its output (needs nbformat, nbclient and ipykernel)

SPDX-License-Identifier: MIT
"""

import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def cells(page):
    """(kind, text) for each part of a page: "python" or "text". Pictures are left out: the notebook draws them."""
    for part in re.split(r"(^```python\n.*?^```$)", page, flags=re.M | re.S):
        block = re.fullmatch(r"```python\n(.*?)```", part, re.S)
        text = block[1] if block else re.sub(r"^!\[[^\]]*\]\([^)]*\)\n", "", part, flags=re.M)
        if text.strip():
            yield ("python" if block else "text"), text.strip()


def run(folder):
    code = "\n\n".join(text for kind, text in cells((HERE / "tutorial.md").read_text()) if kind == "python")
    os.chdir(folder)
    exec(compile(code, str(HERE / "tutorial.md"), "exec"), {"__name__": "__main__"})


def build(path):
    import nbformat
    from nbclient import NotebookClient

    made = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for kind, text in cells((HERE / "tutorial.md").read_text()):
        if kind == "text":
            made.cells.append(nbformat.v4.new_markdown_cell(text))
        else:
            drawn = re.sub(r'^Path\(".*?"\)\.write_text\((cache\.picture\(.*\))\)$', r"picture = \1", text, flags=re.M)
            if drawn != text:
                drawn += "\n\nfrom IPython.display import SVG\n\nSVG(picture)"
            made.cells.append(nbformat.v4.new_code_cell(drawn))
    path.parent.mkdir(parents=True, exist_ok=True)
    NotebookClient(made, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    nbformat.write(made, path)


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2]).resolve()
    {"run": run, "build": build}[what](where)
