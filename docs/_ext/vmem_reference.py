"""The reference, from what it is about: public headers, Python's public names, and the command line's own help.

SPDX-License-Identifier: MIT
"""

import argparse
import importlib
import inspect
import os
import re
from pathlib import Path

from docutils import nodes

TOP = Path(__file__).resolve().parents[2]
OUT = TOP / "docs/reference"

PYTHON = {
    "Pages and addresses": ("pyvmem.core", ("Context", "Reservation", "Pages", "Info", "PageInfo", "Stats", "backends",
                                       "probe", "default_context")),
    "Tensors": ("pyvmem", ("VirtualTensor", "virtual_empty")),
    "The KV cache": ("pyvmem", ("KVCache", "KVCacheOptions", "Spare", "TensorSpec", "model_specs", "Shortage",
                                "KVPool")),
    "Runs": ("pyvmem.kv.types", ("Run",)),
    "Prefixes": ("pyvmem.kv.prefix", ("PrefixCache", "block_hashes")),
    "Leases": ("pyvmem", ("torch_pool",)),
    "Errors": ("pyvmem", ("VmemError", "InvalidArgument", "OutOfMemory")),
    "Attention": ("pyvmem.attention", None),
    "transformers": ("pyvmem.transformers", None),
}  # fmt: skip


def write(path, text):
    """Only what has changed: Sphinx reads what is newer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def python():
    public = dict.fromkeys(importlib.import_module("pyvmem").__all__, "pyvmem")  # as users import them
    listed = {name for _, names in PYTHON.values() if names for name in names}
    missing = {n for n in importlib.import_module("pyvmem").__all__ if not n.startswith("__")} - listed
    assert not missing, f"no page lists {missing}"
    out = [
        "The Python package",
        "==================",
        "",
        "*For users of the Python package. Generated from its docstrings.*",
        "",
    ]
    for title, (module, names) in PYTHON.items():
        out += [title, "-" * len(title), ""]
        found = importlib.import_module(module)
        if names is None:
            names = found.__all__
            out += [".. automodule:: " + module, "   :no-index:", ""]
        for name in names:
            thing, where = getattr(found, name), public.get(name, module)
            if inspect.isclass(thing):
                foreign = "Exception, ValueError, MemoryError, RuntimeError, OSError, Cache, nn.Module"
                out += [f".. autoclass:: {where}.{name}", "   :members:", f"   :inherited-members: {foreign}", ""]
            else:
                out += [f".. autofunction:: {where}.{name}", ""]
    write(OUT / "python.rst", "\n".join(out))


def c(header):
    """A header as a page: its comments as text, its declarations as code, a heading for each of its sections."""
    text = header.read_text(encoding="utf-8")
    body = text[text.index('extern "C"') :]
    intro = re.match(r"(?://[^\n]*\n)+", text)[0]
    out = [
        f"# {header.name}",
        "",
        f"*For authors of programs in C and C++. Generated from `libvmem/include/{header.name}`.*",
        "",
    ]
    out += prose(intro.splitlines())
    body = body[body.index("#endif") + len("#endif") : body.rindex("#ifdef __cplusplus")]
    for block in re.split(r"\n\s*\n", body):
        lines = block.strip("\n").splitlines()
        if lines and (section := re.match(r"// ---- (.*?) -+$", lines[0])):
            out += [f"## {section[1][0].upper() + section[1][1:]}", ""]
            lines = lines[1:]
            while lines and lines[0] == "//":
                lines = lines[1:]
        comment = 0
        while comment < len(lines) and lines[comment].startswith("//"):
            comment += 1
        for name in re.findall(r"^[a-z][\w \*]*?\b(vMem\w+|vmem_\w+)\(", block, re.M):
            out += [f"({name})=", ""]
        out += prose(lines[:comment])
        if lines[comment:]:
            out += ["```c", *lines[comment:], "```", ""]
    write(OUT / f"{header.stem}.md", "\n".join(out) + "\n")


def prose(lines):
    """Comment lines as Markdown: paragraphs, and lists where the comment has them."""
    out = []
    for line in lines:
        line = re.sub(r"^// ?", "", line)
        if "SPDX" in line:
            continue
        if not line.startswith(" "):
            line = re.sub(r"([*_<])", r"\\\1", line)
            out.append(line)
        elif re.match(r" +- ", line):
            out += ([""] if out and out[-1] and not out[-1].lstrip().startswith("-") else []) + [
                re.sub(r"([*_<])", r"\\\1", line[2:])
            ]
        else:
            out.append(re.sub(r"([*_<])", r"\\\1", line[2:] if line.startswith("    ") else line.strip()))
    return [*out, ""] if out else []


def cli():
    os.environ["COLUMNS"] = "100"
    from pyvmem.tools import cli as command

    parser = command._parser()
    out = [
        "The command line",
        "================",
        "",
        "*For everybody with a shell. Generated from the command's own help.*",
        "",
    ]

    def describe(parser, level):
        nonlocal out
        if level:
            out += [parser.prog, "-~^"[level - 1] * len(parser.prog), ""]
        out += [".. code-block:: text", ""]
        out += [("   " + line).rstrip() for line in parser.format_help().splitlines()] + [""]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for child in dict.fromkeys(action.choices.values()):
                    describe(child, level + 1)

    describe(parser, 0)
    out += ["Variables", "---------", ""]
    for name, what in VARIABLES.items():
        out += [f"``{name}``", f"   {what}", ""]
    out += [
        "Exit status",
        "-----------",
        "",
        "0; 1 with one line on standard error; 2 for wrong arguments; 130 after Ctrl-C.",
        "",
    ]
    write(OUT / "cli.rst", "\n".join(out))


VARIABLES = {
    "VMEM_BACKEND": "The backend of contexts that name none: uvm, stock, cuda or host.",
    "VMEM_VLLM": "1 runs vLLM's KV cache on vMem.",
    "XDG_RUNTIME_DIR": "The folder under which caches publish their state for ``pyvmem top``.",
}


def without_dead_links(app, doctree, _):
    """A man page cannot lead to another page of the manual: the writer would put `<>` behind the words."""
    if app.builder.name == "man":
        for link in list(doctree.findall(nodes.reference)):
            if "://" not in link.get("refuri", ""):
                link.replace_self(link.children)


def setup(app):
    app.connect("doctree-resolved", without_dead_links)
    python()
    cli()
    for header in sorted((TOP / "libvmem/include").glob("*.h")):
        c(header)
    return {"parallel_read_safe": True}
