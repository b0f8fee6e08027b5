"""Files of ``pyvmem models`` with whatever a person or a program may put there: they are refused, or each program that
reads what is rendered finds exactly the file's texts.

VMEM_FUZZ_SECONDS sets how long the fuzzer runs (1). A failure names its seed.

SPDX-License-Identifier: MIT
"""

import os
import random
import re
import shlex
import time
from dataclasses import replace

import pytest

from pyvmem.tools import models_file, models_render

yaml = pytest.importorskip("yaml")
try:
    import kubernetes_validate
except ImportError:
    kubernetes_validate = None

SECONDS = float(os.environ.get("VMEM_FUZZ_SECONDS", "1"))
RELEASES = ("1.34", "1.35", "1.36", "1.37")
# What YAML, shells, systemd, Kubernetes and the renderers give a meaning to; what is no text; and ends of lines.
PIECES = ["on", "No", "null", "~", "1e3", "0x1f", "012", "1:30", ".inf", "2024-01-01", "=", "<<", "!!str", "!", "&a",
          "*a", "-", "- ", "?", "? ", ":", ": ", ",", "#", " #", "|", ">", "@", "`", "{", "}", "[", "]", "{{x}}", "'",
          '"', "''", '\\"', "\\", "\\n", "\\u2028", "%", "%n", "%%", "%YAML", "$", "$$", "$HOME", "$(HOME)", "$$(HOME)",
          "${x}", "`id`", ";", "&&", " ", "  ", "...", "---", "--", "--port", "--api-key", "\u00e9", "\U0001f600",
          "\u0301", "a", "chat", "x" * 300]  # fmt: skip
HIDDEN = ["\0", "\t", "\n", "\r", "\x1b[2J", "\x7f", "\x85", "\u00a0", "\u2028", "\u2029", "\ufeff", "\u200b", "\u202e",
          "\ud83d", "\uffff", "\U000e0001"]  # fmt: skip
NAMES = [
    "on",
    "null",
    "1e3",
    "0x1f",
    "chat",
    "a-b",
    "a.b",
    "_",
    "-",
    "x" * 60,
    "x" * 61,
    "",
    ".",
    "..",
    "a/b",
    "a b",
    "é",
]


def text(draw):
    chosen = draw.choices(PIECES, k=draw.choice((1, 1, 2, 4)))
    return "".join(chosen + draw.choices(HIDDEN, k=draw.random() < 0.06))


def name(draw):
    return draw.choice(NAMES) if draw.random() < 0.06 else draw.choice("abcdefgh") + str(draw.randrange(99))


def model(draw, pools):
    texts = [text(draw) for _ in range(draw.randrange(4))]
    made = dict(path=text(draw) if draw.random() < 0.7 else f"/m/{text(draw)}", outside="1M", args=texts,
                pools=draw.sample(pools, draw.randint(1, len(pools))))  # fmt: skip
    more = dict(env={draw.choice(("A", "B_1", "HOME", "VLLM_API_KEY", "a-b")): text(draw)}, image=text(draw), idle=1e-6,
                engine="sglang", adapters={name(draw): text(draw)}, weights="1G", rate=draw.choice((0, 1e-7, 3)),
                queue=draw.choice((0, 0.1, 999999)), standby=True)  # fmt: skip
    return {**made, **{key: more[key] for key in draw.sample(list(more), draw.choice((0, 1, 3)))}}


def table(draw):
    pools = {name(draw): dict(size="9G", device=i, **({"node": text(draw)} if draw.random() < 0.1 else {}))
             for i in range(draw.choice((1, 2)))}  # fmt: skip
    return dict(pools=pools, models={name(draw): model(draw, list(pools)) for _ in range(draw.choice((1, 2, 3)))})


def of_kubelet(value, environ):
    """As the kubelet expands a text: $$ is $, and $(NAME) a variable that there is."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else environ.get(m[1], m[0]), value)


def check(file):
    """Read all that is rendered by its programs' parsers."""
    for what, render in models_render.RENDERERS.items():
        try:
            rendered = render(file)
        except ValueError as error:  # which names a key
            assert re.match(r"(models|pools)\.", str(error)) and str(error).isprintable(), str(error)
            continue
        assert rendered.isascii() or rendered.encode()
        READERS[what](file, list(yaml.safe_load_all(rendered)))


def read_llama_swap(file, documents):
    (document,) = documents
    here = [r for r in file.replicas if not r.pool.elsewhere]
    assert set(document["models"]) == {r.model.name for r in here} == set(document["groups"]["vmem"]["members"])
    for r in here:
        found = document["models"][r.model.name]
        assert shlex.split(found["cmd"]) == file.command(r, here=True)
        assert found["env"] == [f"{k}={v}" for k, v in file.environment(r).items()]


def read_ray_serve(file, documents):
    ((application,),) = [document["applications"] for document in documents]
    assert models_file.made(application["args"]["file"]) == file


def read_kubernetes(file, documents):
    pods = [d["spec"]["template"]["spec"] for d in documents if d["kind"] == "Deployment"]
    assert len(pods) == len(file.replicas)
    assert len(documents) == len(file.pools) + len(file.replicas) + 2 * len(file.models)
    assert len({(d["kind"], d["metadata"]["name"]) for d in documents}) == len(documents)
    for r, pod in zip(file.replicas, pods):
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and container["image"] == (
            r.model.image or f"{r.model.engine}-vmem"
        )
        environ = {e["name"]: of_kubelet(e.get("value", "KEY"), {}) for e in container["env"]}
        wanted = {"HOME": "/tmp", **file.environment(r, devices=False)}
        assert wanted.items() <= environ.items() and len(environ) == len(container["env"])
        command = [of_kubelet(part, environ) for part in container["command"]]
        expected = file.command(replace(r, port=container["ports"][0]["containerPort"]), "0.0.0.0")
        assert command == [*expected, *(["--api-key", "KEY"] if r.model.engine == "sglang" else [])]
    for document in documents if kubernetes_validate else ():
        kubernetes_validate.validate(document, random.choice(RELEASES), strict=True)


READERS = {"llama-swap": read_llama_swap, "ray-serve": read_ray_serve, "kubernetes": read_kubernetes}


@pytest.mark.parametrize("piece", [*sorted({*PIECES} - {"--port"}), "x" * 70000], ids=lambda piece: ascii(piece)[:20])
def test_a_text_reaches_the_servers_as_it_stands(piece):
    """Also one that YAML 1.1 or 1.2 takes for something else, and in a model whose name is no boolean."""
    model = dict(path=f"m/{piece}", args=[piece], env={"A": piece}, outside="1M")
    check(models_file.made(dict(pool="a", size="9G", gpu="20G", models={"on": model})))


def test_whatever_a_file_says_is_refused_or_reaches_the_servers_as_it_stands(monkeypatch):
    monkeypatch.setattr(models_file, "_gpus", dict)
    seed = random.randrange(1 << 30)
    draw, end, made = random.Random(seed), time.monotonic() + SECONDS, 0
    while time.monotonic() < end or not made:
        contents = table(draw)
        try:
            file = models_file.made(contents)
        except ValueError as error:
            assert str(error).isprintable() and 0 < len(str(error)) < 700, (seed, contents)
            continue
        made += 1
        try:
            check(file)
        except Exception as error:
            raise AssertionError((seed, contents)) from error
