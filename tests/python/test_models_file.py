"""``pyvmem models``: the file, its errors, and what is rendered from it.

SPDX-License-Identifier: MIT
"""

import http.client
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from pyvmem.engine import control
from pyvmem.engine.pools import number_of
from pyvmem.kv.view import view_folder
from pyvmem.sleep.checkpoint import weight_bytes
from pyvmem.tools import cli, models, models_file, models_place, models_render
from pyvmem.tools.models_file import read
from pyvmem.vllm.plugin import settings

pytest.importorskip("tomllib")

FILE = """
pool = "gpu0"
size = "70G"
gpu = "80G"

[models.chat]
path = "/models/llama"
min = "4G"
priority = 1
idle = 60
args = ["--max-model-len", 8192]

[models.code]
path = "org/name with space"
port = 9001
env = {VLLM_API_KEY = "it's"}
"""


def test_a_file_gives_commands_and_variables():
    pool = read(FILE)
    chat, code = pool.models
    assert ([r.port for r in pool.replicas], chat.min) == ([8001, 9001], 4 << 30)
    command = pool.command(pool.one("chat"))
    assert command[:3] == ["vllm", "serve", "/models/llama"] and command[-2:] == ["--max-model-len", "8192"]
    env = pool.environment(pool.one("chat"))
    assert env["VMEM_VLLM_MIN"] == str(4 << 30) and env["VMEM_VLLM_IDLE"] == "60"
    from pyvmem.vllm import plugin

    made = plugin.settings(env)  # every variable is one that vMem knows
    assert (made.pool, made.weights, made.sleep, made.idle, made.priority) == ("gpu0", True, "keep", 60, 1)


def test_the_manuals_file_is_read_and_fits_a_gpu_of_80_gb(monkeypatch):
    monkeypatch.setattr(models_file, "_gpu", lambda _: 81559 << 20)  # of an H100
    manual = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    pool = read(textwrap.dedent(re.findall(r"```toml\n(.*?)```", manual, re.DOTALL)[0]))
    assert [m.name for m in pool.models] == ["chat", "code", "night"] and pool.models[0].idle
    for key in models_file._MODEL:  # each is in the manual's table
        assert f"`{key}`" in manual or f"models.NAME.{key}" in manual


def test_the_servers_are_started_with_the_vllm_of_this_environment(tmp_path, monkeypatch):
    """llama-swap and systemd may have another PATH."""
    (tmp_path / "vllm").write_text("#!/bin/sh")
    monkeypatch.setattr(models_file.sys, "executable", str(tmp_path / "python"))
    pool = read(FILE)
    assert f"{tmp_path}/vllm serve" in models_render.llama_swap(pool)
    assert str(tmp_path) not in models_render.ray_serve(pool)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_that_other_machines_reach_has_a_key(tmp_path, monkeypatch, capsys, engine):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    became = []
    monkeypatch.setattr(models.os, "execvpe", lambda *what: became.append(what))
    file, plain = tmp_path / "models.toml", FILE.replace("priority = 1", f"engine = '{engine}'")
    file.write_text(plain)
    serve = ["models", str(file), "serve", "chat", "--host", "0.0.0.0"]
    assert cli.main(serve) == 1 and not became
    assert "chat: at 0.0.0.0, others than this machine reach its server, which has no key" in capsys.readouterr().err
    assert cli.main(serve[:4]) == 0 and len(became) == 1
    monkeypatch.setenv("VLLM_API_KEY", "K")
    assert cli.main(serve) == (0 if engine == "vllm" else 1)  # SGLang takes none from there
    file.write_text(plain.replace('"--max-model-len", 8192', '"--api-key", "K"'))
    assert cli.main(serve) == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_process_becomes_a_models_server(tmp_path, monkeypatch, host):
    monkeypatch.setenv("VMEM_VLLM_POOL", "of somebody's shell")
    became = []
    monkeypatch.setattr(models.os, "execvpe", lambda *what: became.append(what))
    (tmp_path / "models.toml").write_text(FILE)
    options = [] if host == "127.0.0.1" else ["--host", host]
    assert cli.main(["models", str(tmp_path / "models.toml"), "serve", "code", *options]) == 0
    ((program, command, environment),) = became
    pool = read(FILE)
    assert command == pool.command(pool.one("code"), host, here=True) and program == command[0]
    assert environment.items() >= pool.environment(pool.one("code")).items() and "PATH" in environment
    assert environment["VMEM_VLLM_POOL"] == "gpu0"
    assert cli.main(["models", str(tmp_path / "models.toml"), "serve", "other"]) == 1 and len(became) == 1


DEPLOY = (Path(__file__).parents[2] / "docs" / "models-deploy.md").read_text()


def test_the_manuals_compose_file_serves_every_model_of_the_manual_on_this_machine_alone():
    yaml = pytest.importorskip("yaml")
    (text,) = re.findall(r"```yaml\n(# compose.*?)```", DEPLOY, re.DOTALL)
    services = yaml.safe_load(text)["services"]
    manual = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    pool = read(re.sub("^   ", "", re.findall(r"```toml\n(.*?)```", manual, re.DOTALL)[0], flags=re.M))
    assert list(services) == [m.name for m in pool.models]
    for r in pool.replicas:
        service = services[r.name]
        assert service["command"] == [r.name] and service["ports"] == [f"127.0.0.1:{r.port}:{r.port}"]
        assert service["entrypoint"][:4] == ["pyvmem", "models", "/models.toml", "serve"]
        assert service["pid"] == "host" and service["environment"]["XDG_RUNTIME_DIR"] == "/run/vmem"
        # No root, and no server that other containers reach without a key.
        assert service["user"] == "1000:1000" and service["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_reads_the_manuals_unit(tmp_path):
    (text,) = re.findall(r"```ini\n(.*?)```", DEPLOY, re.DOTALL)
    assert "User=vmem" in text
    unit = tmp_path / "vmem@chat.service"
    unit.write_text(text.replace("/opt/vllm/bin/pyvmem", "/usr/bin/env"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("code", [*range(32), 127, *range(128, 160), 0x2028, 0x2029, 0xFEFF, 0x200B, 0xFFFE])
def test_what_ends_a_line_for_somebody_is_refused(code):
    text = json.dumps(f"a{chr(code)}b")
    for line in (f"path={text}", f"path='x'\nargs=[{text}]", f"path='x'\nenv={{A={text}}}", f"path='x'\nimage={text}"):
        with pytest.raises(ValueError, match=rf"^models.c.(path|args|env.A|image) must .* U\+{code:04X}$"):
            read(f"{FILE}[models.c]\n{line}")


def test_llama_swaps_macros_are_refused():
    pool = read(FILE + "[models.c]\npath='x'\nenv={A='pa$word-${HOME}'}")
    with pytest.raises(ValueError, match=r"models.c: llama-swap takes \$\{ for a macro"):
        models_render.llama_swap(pool)


def test_llama_swap_has_every_model_of_this_machine():
    yaml = pytest.importorskip("yaml")
    told = yaml.safe_load(models_render.llama_swap(read(FILE)))
    assert shlex.split(told["models"]["code"]["cmd"])[:3] == [models_file._vllm(), "serve", "org/name with space"]
    assert told["groups"]["vmem"] == {"swap": False, "exclusive": False, "members": ["chat", "code"]}
    assert told["models"]["chat"]["concurrencyLimit"] > 256 and told["hooks"]["on_startup"]["preload"]
    assert "VLLM_API_KEY=it's" in told["models"]["code"]["env"]
    nodes = NODES.replace('pools = ["gpu0", "gpu1"]', 'pools = ["gpu0", "far"]')
    told = yaml.safe_load(models_render.llama_swap(read(nodes)))["models"]
    assert list(told) == ["chat", "code"] and told["code"]["aliases"] == ["sql"]
    assert "CUDA_VISIBLE_DEVICES=0,1" in told["chat"]["env"] and "CUDA_VISIBLE_DEVICES=GPU-2" in told["code"]["env"]
    with pytest.raises(ValueError, match="models.chat.pools: llama-swap has one server for a model"):
        models_render.llama_swap(read(NODES))


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(models_file.socket, "gethostname", lambda: "here.example.org")


# Two pools of this machine and one of another; a model with two replicas, one with adapters, one of SGLang's.
NODES = """
gpu = "80G"
[pools.gpu0]
size = "60G"
node = "here"
device = [0, 1]
[pools.gpu1]
size = "60G"
node = "here"
device = "GPU-2"
[pools.far]
size = "30G"
node = "another-host"
device = 0
[models.chat]
path = "/models/llama"
pools = ["gpu0", "gpu1"]
rate = 2
[models.code]
path = "org/code"
pools = ["gpu1"]
weights = "15G"
adapters = {sql = "/adapters/a=b, c"}
[models.night]
path = "org/night"
pools = ["far"]
engine = "sglang"
adapters = {fr = "/adapters/fr"}
"""


def test_a_model_has_a_server_in_each_of_its_pools():
    file = read(NODES)
    assert [(r.name, r.port) for r in file.replicas] == [
        ("chat@gpu0", 8001), ("chat@gpu1", 8002), ("code", 8003), ("night", 8004)]  # fmt: skip
    first, second, code, night = file.replicas
    assert file.one("chat@gpu1") is second and file.here("chat") == [first, second]
    for name, error in (("chat", "several servers here: chat@gpu0, chat@gpu1"), ("night", "but on another-host")):
        with pytest.raises(ValueError, match=error):
            file.one(name)
    env = file.environment(second)
    assert (env["VMEM_VLLM_POOL"], env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == (
        "gpu1",
        "GPU-2",
        "PCI_BUS_ID",
    )
    assert json.loads(file.command(code)[file.command(code).index("--lora-modules") + 1]) == dict(
        name="sql", path="/adapters/a=b, c")  # fmt: skip
    assert file.command(night)[file.command(night).index("--lora-paths") + 1] == "fr=/adapters/fr"
    assert file.models[2].names == ["night", "night:fr"]  # as SGLang takes them
    for model in file.models[:1]:
        ports = [r.port for r in read(NODES.replace("rate = 2", "port = 9001")).replicas if r.model.name == model.name]
        assert ports == [9001, 9002]


@pytest.mark.parametrize("old, new, error", [
    ('node = "another-host"', "", "pools.far.node is missing: other pools name theirs"),
    ('node = "another-host"', 'nod = "a"', "pools.far.nod is not a key of the file: the keys are size, gpu, node"),
    ('size = "30G"\n', "", "pools.far.size is missing"),
    ("device = [0, 1]", "device = [0, 0]", "pools.gpu0.device must be the number of a GPU"),
    ("device = [0, 1]", "device = []", "pools.gpu0.device must be the number of a GPU"),
    ("device = [0, 1]", "device = true", "pools.gpu0.device must be the number of a GPU"),
    ("device = [0, 1]", 'device = "0,1"', "pools.gpu0.device must be the number of a GPU"),
    ('"GPU-2"', "1", "pools.gpu1.device: 1 is also the device of pools.gpu0"),
    ("rate = 2", "rate = -1", "models.chat.rate must be a number of requests a second"),
    ("rate = 2", "rate = nan", "models.chat.rate must be a number of requests a second"),
    ("rate = 2", "args = ['-tp=2']", "models.chat.args: it is divided among 2 GPUs, and pools.gpu1.device names 1"),
    ("rate = 2", "env = {CUDA_VISIBLE_DEVICES = '3'}", "env: CUDA_VISIBLE_DEVICES is what the key 'device' of"),
    ("rate = 2", "port = 65535", "models.chat.port: chat@gpu1 would have port 65536"),
    ('["gpu0", "gpu1"]', '["gpu0", "gpu0"]', "models.chat.pools has a name twice"),
    ('["gpu0", "gpu1"]', '["gpu9"]', "models.chat.pools: the file has no [pools.gpu9]"),
    ('["gpu0", "gpu1"]', "[]", "models.chat.pools must be a list of names"),
    ('["gpu0", "gpu1"]', '"gpu0"', "models.chat.pools must be a list of names"),
    ('{sql =', '{chat =', "models.code: chat is also a name of chat"),
    ('{sql = "/adapters/a=b, c"}', '{sql = 3}', "models.code.adapters.sql must be a non-empty string"),
    ('{sql = "/adapters/a=b, c"}', '{"a b" = "x"}', "models.code.adapters must be at most 60 letters"),
    ('gpu = "80G"', 'size = "80G"', "size is a key of a file with one pool"),
    ('"60G"\nnode = "here"\ndevice = "GPU-2"', '"14G"\nnode = "here"\ndevice = "GPU-2"', "exceed pools.gpu1.size, 14"),
    ('gpu = "80G"', 'gpu = "62G"', "pools.gpu1.size: 60.0 GiB, and 2.5 GiB outside"),
    ("rate = 2", '"a\\u001b[2Jb" = 3', "models.chat.'a\\x1b[2Jb' is not a key of the file"),
    ("[models.chat]", '[models."a\\u001bb"]\nrate=2\n[models.chat]', "models.'a\\x1bb' must be at most 60 letters"),
    ('[pools.gpu0]', '[pools.""]\nsize=1\n[pools.gpu0]', "pools.'' must be at most 60 letters"),
])  # fmt: skip
def test_an_error_of_pools_names_the_key(old, new, error):
    assert old in NODES
    with pytest.raises(ValueError, match=re.escape(error)) as raised:
        read(NODES.replace(old, new))
    assert str(raised.value).isprintable() and len(str(raised.value)) < 300


def test_pools_of_a_node_need_devices_where_no_driver_chooses_them(tmp_path, capsys):
    (tmp_path / "models.toml").write_text(NODES.replace('device = "GPU-2"\n', ""))
    for what in ("llama-swap", "ray-serve"):
        assert cli.main(["models", str(tmp_path / "models.toml"), "render", what]) == 1
        assert "pools.gpu1.device is missing" in capsys.readouterr().err
    assert cli.main(["models", str(tmp_path / "models.toml"), "render", "kubernetes"]) == 0


def test_kubernetes_has_a_claim_for_each_pool_and_a_pod_for_each_replica():
    yaml = pytest.importorskip("yaml")
    text = models_render.kubernetes(read(NODES))
    documents: dict = {}
    for document in yaml.safe_load_all(text):
        documents.setdefault(document["kind"], {})[document["metadata"]["name"]] = document
    assert {kind: list(names) for kind, names in documents.items()} == dict(
        ResourceClaim=["vmem-gpu0", "vmem-gpu1", "vmem-far"], Deployment=["chat-gpu0", "chat-gpu1", "code", "night"],
        Service=["chat", "code", "night"], PodDisruptionBudget=["chat", "code", "night"])  # fmt: skip
    gpus = documents["ResourceClaim"]["vmem-gpu0"]["spec"]["devices"]["requests"][0]["exactly"]
    assert gpus["count"] == 2 and f"quantity('{(60 << 30) + models_file.OUTSIDE}')" in str(gpus["selectors"])
    for name, deployment in documents["Deployment"].items():
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
        for kind in ("Service", "PodDisruptionBudget"):  # which find every replica
            chosen = documents[kind][name.partition("-")[0]]["spec"]["selector"]
            assert chosen.get("matchLabels", chosen).items() <= labels.items()
        assert pod["resourceClaims"][0]["resourceClaimName"] == f"vmem-{labels['vmem.io/pool']}"
        assert pod["securityContext"]["runAsNonRoot"] and not container["securityContext"]["allowPrivilegeEscalation"]
        env = {e["name"]: e for e in container["env"]}
        assert env["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"] == dict(name="vmem", key="api-key")
        assert "CUDA_VISIBLE_DEVICES" not in env  # the driver chooses
        assert ("$(VLLM_API_KEY)" in container["command"]) == (container["name"] == "sglang")
        assert [m["name"] for m in container["volumeMounts"]] == [v["name"] for v in pod["volumes"]]
        ports = {container["ports"][0]["containerPort"], *(container[f"{kind}Probe"]["httpGet"]["port"] for kind in
                                                           ("startup", "readiness", "liveness"))}  # fmt: skip
        assert ports == {documents["Service"][name.partition("-")[0]]["spec"]["ports"][0]["targetPort"]}
        assert str(*ports) in container["command"]
    assert documents["Deployment"]["night"]["spec"]["template"]["spec"]["nodeSelector"] == {
        "kubernetes.io/hostname": "another-host"
    }


def test_what_kubernetes_does_not_take_is_refused():
    plain = FILE.replace('env = {VLLM_API_KEY = "it\'s"}', "")
    models_render.kubernetes(read(plain))
    for name in ("Chat", "llama-3.1", "a_b", "3b", "chat-"):
        with pytest.raises(ValueError, match=f"models.{name}: Kubernetes takes no {name}"):
            models_render.kubernetes(read(plain.replace("models.chat", f'models."{name}"')))
    with pytest.raises(ValueError, match="pools.GPU_0: Kubernetes takes no vmem-GPU_0"):
        models_render.kubernetes(read(plain.replace("gpu0", "GPU_0")))
    with pytest.raises(ValueError, match="two Deployments would have the name chat-gpu0"):
        models_render.kubernetes(read(NODES.replace("models.code", "models.chat-gpu0")))
    for key in ('args = ["--api-key=K"]', 'env = {VLLM_API_KEY = "K"}'):
        with pytest.raises(ValueError, match="models.chat: its key would stand in the pod's description"):
            models_render.kubernetes(read(NODES.replace("rate = 2", key)))


def test_kubernetes_own_schemas_take_what_is_rendered():
    yaml = pytest.importorskip("yaml")
    try:
        import kubernetes_validate
    except ImportError:
        pytest.skip("not installed: kubernetes-validate")
    for document in yaml.safe_load_all(models_render.kubernetes(read(NODES))):
        for release in ("1.34", "1.35", "1.36", "1.37"):
            kubernetes_validate.validate(document, release, strict=True)


def test_pools_are_proposed_by_rate_and_weights():
    def file(*rates, size=60):
        pools = "".join(f"[pools.gpu{i}]\nsize='{size}G'\ndevice={i}\n" for i in range(2))
        return read(pools + "".join(f"[models.m{i}]\npath='x'\nweights='{weights}G'\nrate={rate}\n"
                                    for i, (rate, weights) in enumerate(rates)))  # fmt: skip

    def chosen(file):
        return [pool.name for _, pool in sorted(models_place.propose(file).items())]

    assert chosen(file((9, 15), (8, 15), (1, 15), (1, 15))) == ["gpu0", "gpu1", "gpu1", "gpu0"]
    assert chosen(file((2, 15), (0, 40), (0, 14))) == ["gpu0", "gpu1", "gpu1"]  # all of a pool are awake at once
    assert sorted(chosen(file(*[(1, 25)] * 6))) == ["gpu0"] * 3 + ["gpu1"] * 3  # their weights exceed the pools
    with pytest.raises(ValueError, match="models.m0: no pool has room for its weights"):
        models_place.propose(file((1, 61)))
    many = file(*[(i % 7, 5 + i % 11) for i in range(200)])
    assert len(models_place.propose(many)) == 200


def test_the_check_tells_what_is_left_and_what_runs_otherwise(folder, tmp_path, capsys, monkeypatch):
    path = tmp_path / "models.toml"
    path.write_text(NODES.replace('pools = ["gpu1"]\n', ""))
    assert cli.main(["models", str(path), "ls"]) == 1
    assert "models.code.pools is missing: `pyvmem models FILE check` proposes pools" in capsys.readouterr().err
    assert cli.main(["models", str(path), "check"]) == 0
    told = capsys.readouterr().out
    assert '[models.code]\npools = ["far"]' in told  # where nobody asks for anything
    path.write_text(NODES)
    file = read(NODES)
    chat = file.one("chat@gpu1")
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    for change, keys in (({}, None), ({"VMEM_VLLM_IDLE": "7"}, "idle"), ({"VMEM_VLLM_MAX": "9"}, "max"),
                         ({"CUDA_VISIBLE_DEVICES": "5"}, "device"), ("--seed", "args")):  # fmt: skip
        command = [sys.executable, "-c", code, *file.command(chat, "0.0.0.0")[1:]] + ["--seed"] * (change == "--seed")
        environ = {**os.environ, **file.environment(chat), **(change if change != "--seed" else {})}
        process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with process:
            process.stdout.readline()
            page = control.open_page("e", 0)
            control.claim(page, "chat")
            page[control.PID], page[control.POOL] = process.pid, number_of("gpu1")
            assert cli.main(["models", str(path), "check"]) == 0
            process.stdin.close()
        told = capsys.readouterr().out
        assert ("start it again" in told) == (keys is not None)
        assert keys is None or f"chat@gpu1 runs with other settings than the file's ({keys}): start it again" in told


def test_a_model_of_sglang_has_a_server_of_sglang():
    pool = read(FILE.replace("port = 9001", 'port = 9001\nengine = "sglang"\nqueue = 5'))
    chat, code = pool.models
    command = pool.command(pool.one("code"))
    assert command[:4] == ["python3", "-m", "sglang.launch_server", "--model-path"]
    assert command[-2:] == ["--page-size", "64"] and "--middleware" not in command
    from pyvmem.sglang import settings as sglang

    made = sglang.read(pool.environment(pool.one("code")))  # every variable is one that vMem knows
    assert (made.on, made.pool, made.weights, made.queue) == (True, "gpu0", True, 5)
    assert "VMEM_VLLM" in pool.environment(pool.one("chat")) and "VMEM_VLLM" not in pool.environment(pool.one("code"))
    both = models_render.kubernetes(read(NODES))
    assert "sglang-vmem" in both and "vllm-vmem" in both
    assert models_file.sys.executable in models_render.llama_swap(pool)
    with pytest.raises(ValueError, match=r'models.chat.engine must be "vllm" or "sglang"'):
        read(FILE.replace("priority = 1", 'engine = "llama.cpp"'))


def test_a_standby_is_a_second_server_of_the_same_weights(monkeypatch, folder):
    file = read(FILE.replace("priority = 1", "priority = 1\nstandby = true"))
    one, other = file.one("chat"), file.one("code")
    assert settings(file.environment(one)).common == 600 and "VMEM_VLLM_COMMON" not in file.environment(other)
    command = file.command(one, "0.0.0.0", here=True)
    assert command[1:5] == ["-m", "pyvmem.tools.pair", "0.0.0.0", "8001"]
    assert command[5:] == file.server(one, "0.0.0.0", here=True) and command[command.index("--port") + 1] == "0"
    rendered = models_render.llama_swap(file)
    assert "--port 0" in rendered and '"proxy": "http://127.0.0.1:8001"' in rendered
    alone = read(FILE.replace("idle = 60", "common = 5"))
    assert settings(alone.environment(alone.one("chat"))).common == 5
    outlive = read(FILE.replace("idle = 60", 'prefixes = "8G"'))
    told = settings(outlive.environment(outlive.one("chat")))
    assert (told.prefixes, told.common) == (8 << 30, 600)
    pages = {port: control.open_page(f"e{port}", 0) for port in (0, 8001)}  # who stands by, and who serves
    for port, page in pages.items():
        control.claim(page, "chat", port)
        page[control.POOL], page[control.STATE] = number_of("gpu0"), control.State.ASLEEP
    assert [row["state"] for row in models.listing(file)] == ["stands by", "asleep", "stopped"]
    monkeypatch.setattr(models_file, "_gpu", lambda _: 72 << 30)
    with pytest.raises(ValueError, match="3.8 GiB outside of it for the servers of 2 models"):
        read(FILE.replace('gpu = "80G"\n', "").replace("priority", "standby = true\npriority"))


@pytest.mark.parametrize("wrong, error", [
    ("size = 1", "pool is missing"),
    (FILE + "[models.c]\npath='x'\nstandby = 1", "models.c.standby must be true or false, not 1"),
    (FILE + "[models.c]\npath='x'\nengine = 'sglang'\nstandby = true", "models.c.standby: SGLang's servers"),
    (FILE + "[models.c]\npath='x'\nengine = 'sglang'\ncommon = 5", "models.c.common: SGLang's servers have weights"),
    (FILE + "[models.c]\npath='x'\nengine = 'sglang'\nprefixes = '1G'", "models.c.prefixes: SGLang's servers"),
    (FILE + "[models.c]\npath='x'\nprefixes = '1G'\ncommon = 0", "models.c.prefixes: only those of servers with"),
    (FILE + "[models.c]\npath='x'\nstandby = true\nargs = ['--uds=x']", "models.c.standby: '--uds=x' in args"),
    (FILE + "[models.c]\npath='x'\nenv={VMEM_VLLM_COMMON='9'}", "VMEM_VLLM_COMMON is what the key 'common' sets"),
    (FILE + "[models.c]\nport = 9001\npath='x'", "models.c.port: 9001 is also the port of code"),
    (FILE + "[models.c]\nport = true\npath='x'", "models.c.port must be a whole number"),
    (FILE + "[models.c]\npath='x'\nidel = 3", "models.c.idel is not a key of the file: the keys are path, pools, port"),
    (FILE + "[models.c]\nmin='80G'\npath='x'", "min: the minimums of all models add up to 84.0 GiB"),
    (FILE + "[models.c]\nidle='x'\npath='x'", "models.c.idle must be a number"),
    (FILE + "[models.c]\nmin='4G'\nmax='2G'\npath='x'",
     "models.c.min, 4294967296 bytes, is over its max, 2147483648"),
    (FILE + "[models.c]\n", "models.c.path is missing"),
    ("pool='a'\nsize='7X'\n[models.a]\npath='x'", "size must be a size"),
    ("pool='a b'\nsize='7G'\n[models.a]\npath='x'", "pool must be at most 60"),
    ("pool='a'\nsize='7G'\nmodels=3", "models must have a table"),
    ("pool='a'\nsize='7G'\nmodels={}", "models must have a table"),
    ("pool='a'\nsize='7G'\n[models]\nchat=3", "models.chat must be a table, not 3"),
    ("pool='a'\nsize='1000T'\n[models.a]\npath='x'", "size must be from 0 to 999999999999999 bytes, not '1000T'"),
    ("pool='a'\nsize=-1\n[models.a]\npath='x'", "size must be from 0 to"),
    (FILE + "[models.c]\npath='x'\nmax='1e9T'", "models.c.max must be from 0 to 999999999999999 bytes"),
    (FILE + "[models.c]\npath='--port'", "models.c.path must be a non-empty string"),
    (FILE + '[models.c]\npath="a\\u0000"', "models.c.path must have no control characters"),
    (FILE + '[models.c]\npath="x"\nargs=["a\\u0000"]', "models.c.args must have no control characters"),
    (FILE + '[models.c]\npath="x"\nenv={A="\\u0000"}', "models.c.env.A must have no control characters"),
    (FILE + "[models.c]\npath='x'\nenv={'A=B'='1'}", "models.c.env: 'A=B' must be the name of a variable"),
    (FILE + "[models.c]\npath='x'\nenv={VMEM_VLLM_POOL='b'}", "models.c.env: VMEM_VLLM_POOL is what the key"),
    (FILE + "[models.c]\npath='x'\nenv={VMEM_VLLM_MIN='99G'}", "models.c.env: VMEM_VLLM_MIN is what the key"),
    (FILE + "[models.c]\npath='x'\nargs=['--port', 9000]", "models.c.args: --port is what the key 'port' sets"),
    (FILE + "[models.c]\npath='x'\nargs=['--port=9000']", "models.c.args: --port is what the key 'port' sets"),
    (FILE + "[models.llama-3.1]\npath='x'", 'a name with a dot needs quotes: [models."llama-3.1"]'),
    ("pool='a'\nsize='9M'\n[models.a]\nmin='20M'\npath='x'", "add up to 20.0 MiB, more than size, 9.0 MiB"),
])  # fmt: skip
def test_an_error_names_the_key(wrong, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        read(wrong)


def test_a_long_value_does_not_fill_the_error():
    for line in ("path=%s", "path='x'\nport=%s", "path='x'\nargs=%s", "path='x'\nmin=%s"):
        with pytest.raises(ValueError, match=r"^models.c.\w+ must be") as error:
            read(f"{FILE}[models.c]\n{line % repr('-' + 5000 * 'x')}")
        assert len(str(error.value)) < 250


def test_what_the_file_takes_the_servers_take():
    for text in (f"size={10**15 - 1}", "size='72G'\nslice=-0.0", "size='72G'\nslice=999999"):
        pool = read(f"pool='a'\n{text}\n[models.a]\npath='x'\npriority=999999999999999\nmax={10**15 - 1}")
        settings(pool.environment(pool.replicas[0]))


def test_the_command_names_the_file(tmp_path, capsys):
    for text in (b"not TOML", b"size = 1", b"\0", b"\xff", b"\xef\xbb\xbfsize = 1"):
        (tmp_path / "models.toml").write_bytes(text)
        assert cli.main(["models", str(tmp_path / "models.toml"), "ls"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"pyvmem: {tmp_path / 'models.toml'}")
        assert not text.endswith(b"size = 1") or line.endswith(": pool is missing")  # also behind a byte-order mark
        assert text != b"\xff" or line.endswith("is not text in UTF-8: byte 0 is wrong")


def test_weights_that_do_not_fit_are_refused_before_anything_starts(tmp_path):
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(ValueError, match=r"models.big: its weights of 8.0 GiB"):
        read(f"pool='a'\nsize='8G'\n[models.big]\npath={json.dumps(str(tmp_path))}")
    two = f"pool='a'\nsize='8G'\n[models.big]\npath={json.dumps(str(tmp_path))}\nargs=['--tensor-parallel-size', 2]"
    assert read(two).models[0].weights == 4 << 30  # on each GPU


def test_weights_are_found_in_the_cache_of_hugging_face_and_counted_once(tmp_path):
    pytest.importorskip("huggingface_hub")
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc")
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors"):
        (snapshot / name).write_bytes(bytes(5))
    assert weight_bytes("org/name", cache=str(tmp_path)) == 10
    assert weight_bytes(str(snapshot)) == 10
    (snapshot / "model-00002-of-00002.safetensors").unlink()  # it was not loaded to its end
    (snapshot / "model-00002-of-00002.safetensors").symlink_to("nowhere")
    assert weight_bytes(str(snapshot)) == 5 and weight_bytes(300 * "x") == weight_bytes(3000 * "x/") == 0
    assert weight_bytes("org/other", cache=str(tmp_path)) == weight_bytes("no name/at all/") == 0


def test_what_each_server_needs_besides_is_counted_against_the_gpu(monkeypatch):
    monkeypatch.setattr(models_file, "_gpu", lambda _: 72 << 30)  # it is asked where the file does not say it
    wrong = FILE.replace('gpu = "80G"\n', "")
    with pytest.raises(
        ValueError, match=r"size: 70\.0 GiB, and 2\.5 GiB .* 2 models, .* 72\.0 GiB; size can be at most 69\.5 GiB"
    ):
        read(wrong)
    assert read(wrong.replace("priority", 'outside = "700M"\npriority')).pools[0].gpu == 72 << 30
    monkeypatch.setattr(models_file, "_gpu", lambda _: 0)  # no GPU here
    assert read(wrong).pools[0].gpu == 0


@pytest.mark.parametrize("script, size", [
    ("echo 0, GPU-a, 81559; echo 1, GPU-b, 24564", 24564 << 20),
    ("echo 0, GPU-a, 81559; exit 9", 0),  # it says so if there is no driver, in whatever words
    ("printf '\\377'", 0),
    ("exec sleep 600", 0),
    (None, 0),
])  # fmt: skip
def test_the_gpu_is_unknown_where_nvidia_smi_fails(tmp_path, monkeypatch, script, size):
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    monkeypatch.setattr(models_file, "SMI_SECONDS", 1.0 if script and "sleep" in script else 60.0)
    models_file._gpus.cache_clear()
    try:
        assert models_file._gpu() == size and models_file._gpu(("GPU-a",)) == (81559 << 20 if size else 0)
        assert models_file._gpu(("0", "7")) == 0  # one of them is not known
    finally:
        models_file._gpus.cache_clear()


def test_a_server_that_ended_well_is_started_again():
    """vLLM's server exits with status 0 after its engine was killed."""
    assert "\nRestart=always\n" in DEPLOY and "\n  restart: unless-stopped\n" in DEPLOY


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of control pages in which nobody else's servers are."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_model_of_another_pool_with_the_same_name_is_not_touched(folder):
    files = {name: folder / f"{name}.toml" for name in ("gpu0", "gpu1")}
    pages = {}
    for name, file in files.items():
        file.write_text(FILE.replace("gpu0", name))
        pages[name] = control.open_page(name, 0)
        control.claim(pages[name], "chat")
        pages[name][control.POOL] = number_of(name)
    for name, file in files.items():
        assert [e.name for e, _ in models.running(read(file.read_text()))["chat"]] == [name]
    assert cli.main(["models", str(files["gpu1"]), "limit", "chat", "8G"]) == 0
    assert {name: page[control.LIMIT] for name, page in pages.items()} == {"gpu0": control.NO_LIMIT, "gpu1": 8 << 30}


def test_the_command(folder, tmp_path, capsys):
    file = tmp_path / "models.toml"
    file.write_text(FILE)
    assert cli.main(["models", str(file), "ls"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split()[:3] == ["model", "state", "port"] and told[1].split()[:2] == ["chat", "stopped"]
    assert str(view_folder()) in told[-1]  # so that an operator sees where it has looked
    assert cli.main(["models", str(file), "wake", "chat"]) != 0
    assert "chat does not run" in capsys.readouterr().err
    assert cli.main(["models", str(file), "sleep", "nobody"]) != 0
    assert "no model 'nobody'" in capsys.readouterr().err


@pytest.mark.parametrize("answer, error", [
    (b"", "no answer of vMem's at port"),
    (b"nonsense\r\n\r\n", "no answer of vMem's at port"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n<>", "no answer of vMem's at port"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}", "no answer of vMem's at port"),
    (b"HTTP/1.1 401 No\r\n\r\n", "the server asks for its key"),
    (b"HTTP/1.1 503 No\r\n\r\n\xff\nlater", "the server answers 503: \ufffd later"),
    (b"HTTP/1.1 504 No\r\n\r\n", "the server answers 504:"),
])  # fmt: skip
def test_an_answer_that_is_not_vmems_is_one_line(folder, capsys, monkeypatch, answer, error):
    """So of another server at the port, or of one that ends meanwhile."""

    def reset(*args):
        raise ConnectionResetError

    if "504" in error:
        monkeypatch.setattr(http.client.HTTPResponse, "read", reset)
    with socket.create_server(("127.0.0.1", 0)) as server:
        page = control.open_page("gpu0", 0)
        control.claim(page, "chat")
        page[control.POOL], page[control.PORT] = number_of("gpu0"), server.getsockname()[1]

        def serve():
            connection, _ = server.accept()
            with connection:
                request = b""
                while not request.endswith(b"{}"):  # else the rest of it has the connection reset
                    request += connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        (folder / "models.toml").write_text(FILE)
        assert cli.main(["models", str(folder / "models.toml"), "sleep", "chat"]) == 1
        thread.join()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pyvmem: chat: {error}")
    if not answer:  # and nobody listens there
        assert cli.main(["models", str(folder / "models.toml"), "sleep", "chat"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"pyvmem: chat: {error}") and line.endswith("Connection refused")


@pytest.mark.parametrize("args, env, key", [
    ('args = ["--api-key", "K"]', "", "K"), ('args = ["--api-key=K"]', "", "K"),
    ('args = ["--api_key=K=1"]', "", "K=1"),
    ('args = ["--seed", 1, "--api-key", "A", "B", "--swap-space", 4]', "", "A"),
    ('args = ["--admin-api-key=B"]', "", "B"), ('args = ["--admin-api-key=B", "--api-key", "A"]', "", "A"),
    ('args = ["--api-key"]', "", ""), ('args = ["--api-key", "--seed"]', "", ""), ("", "E", "E"),
    ('args = ["--api-key=K"]', "E", "K"), ('env = {VLLM_API_KEY = "F"}', "E", "F"), ("", "", ""),
    ('args = ["--api-key"]\nenv = {VLLM_API_KEY = "F"}', "E", "F"),
])  # fmt: skip
def test_the_key_of_a_server_is_found(monkeypatch, args, env, key):
    monkeypatch.setenv("VLLM_API_KEY", env)
    pool = read(f"pool='p'\nsize='8G'\n[models.chat]\npath='nowhere'\n{args}")
    assert pool.models[0].key == key


def told(server, answer=b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"):
    """What one client says to a server, which answers so."""
    heard = []

    def serve():
        connection, _ = server.accept()
        with connection:
            heard.append(connection.recv(65536))
            connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return heard, thread


def test_a_key_goes_to_the_files_port_alone(folder, monkeypatch, capsys):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody between has it either
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as stranger:
        ports = [each.getsockname()[1] for each in (server, stranger)]
        pages = [control.open_page(name, 0) for name in ("evil", "true")]  # the stranger's comes first
        for page, port in zip(pages, (ports[1], ports[0])):
            control.claim(page, "chat", port)
            page[control.POOL] = number_of("gpu0")
        file = folder / "models.toml"
        file.write_text(f"pool='gpu0'\nsize='8G'\n[models.chat]\npath='x'\nport={ports[0]}\nargs=['--api-key=K']")
        heard, thread = told(server)
        assert cli.main(["models", str(file), "sleep", "chat"]) == 0
        thread.join()
        assert b"Authorization: Bearer K\r\n" in heard[0] and b"application/json" in heard[0]
        pages.pop().unlink()
        assert cli.main(["models", str(file), "sleep", "chat"]) == 1
        assert f"names port {ports[1]}, and the file {ports[0]}" in capsys.readouterr().err
        stranger.settimeout(0.05)
        with pytest.raises(TimeoutError):
            stranger.accept()


def test_a_key_follows_no_redirect(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as stranger:
        port, other = (each.getsockname()[1] for each in (server, stranger))
        page = control.open_page("engine", 0)
        control.claim(page, "chat", port)
        page[control.POOL] = number_of("gpu0")
        file = folder / "models.toml"
        file.write_text(f"pool='gpu0'\nsize='8G'\n[models.chat]\npath='x'\nport={port}\nargs=['--api-key=K']")
        _, thread = told(server, f"HTTP/1.1 302 No\r\nLocation: http://127.0.0.1:{other}/\r\n\r\n".encode())
        assert cli.main(["models", str(file), "sleep", "chat"]) == 1
        thread.join()
        assert "answers 302" in capsys.readouterr().err
        stranger.settimeout(0.05)
        with pytest.raises(TimeoutError):
            stranger.accept()
