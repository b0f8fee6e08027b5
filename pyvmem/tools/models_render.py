"""What ``pyvmem models FILE render`` prints: configurations of programs that start the servers of a file.

Every text is quoted, so that none becomes a key, a line or a command of its own. docs/models-deploy.md shows the
programs.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyvmem._checks import shown
from pyvmem.tools.models_file import File, Replica

CONCURRENCY = 1024  # requests for a model at a time that a router lets pass; the engine queues them


def _scalar(value: Any) -> str:
    """Of JSON's texts, only escapes of single code points are YAML's too: the file's texts have no others."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text  # 1e-07 is a text there


def _yaml(value: Any, depth: int = 0) -> str:
    """YAML of tables, lists and scalars. Every key and text is quoted: on, no, null and 1e3 are other values."""
    pad = "  " * depth
    entries = value.items() if isinstance(value, dict) else ((None, v) for v in value)
    lines = []
    for key, v in entries:
        lead = f"{pad}-" if key is None else f"{pad}{_scalar(key)}:"
        lines.append(f"{lead}\n{_yaml(v, depth + 1)}" if isinstance(v, dict | list) and v else f"{lead} {_scalar(v)}\n")
    return "".join(lines)


def llama_swap(file: File) -> str:
    """The configuration of llama-swap: all models of this machine run, and none is stopped for another.

    Its own limit of requests at a time, 10 for a model, would answer the eleventh with status 429. Raises ValueError
    for ``${``, with which its macros begin, and for a model with several replicas, among which it does not choose.
    """
    models: dict[str, Any] = {}
    for r in [r for m in file.models for r in file.replicas if r.model is m and not r.pool.elsewhere]:
        m, environment = r.model, file.environment(r)
        for text in (*file.command(r), *environment.values()):
            if "${" in text:
                raise ValueError(f"models.{m.name}: llama-swap takes ${{ for a macro of its own: {shown(text)}")
        if m.name in models:
            raise ValueError(f"models.{m.name}.pools: llama-swap has one server for a model")
        models[m.name] = {
            "cmd": shlex.join(file.command(r, here=True)), "proxy": f"http://127.0.0.1:{r.port}",
            "checkEndpoint": "/health", "ttl": 0, "concurrencyLimit": CONCURRENCY, "aliases": m.names[1:],
            "env": [f"{k}={v}" for k, v in environment.items()]}  # fmt: skip
    return _yaml({
        "healthCheckTimeout": 600,
        "logToStdout": "both",  # also what vLLM says
        "models": models,
        "groups": {"vmem": {"swap": False, "exclusive": False, "members": list(models)}},
        "hooks": {"on_startup": {"preload": list(models)}},
    })  # fmt: skip


def ray_serve(file: File) -> str:
    """The configuration of Ray Serve: `pyvmem.ray_serve.build` makes the application from the file's own table."""
    for r in file.replicas:
        file.environment(r)  # each pool of a node has its devices
    return _yaml({
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [{
            "name": "vmem", "route_prefix": "/", "import_path": "pyvmem.ray_serve:build", "args": {"file": file.table},
        }],
    })  # fmt: skip


NAME, POOL = "model.aibrix.ai/name", "vmem.io/pool"  # labels, by the first of which AIBrix finds a model
UID = 1000  # of the pods' processes
LABEL = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"  # what Kubernetes takes for the name of a Service
HEAD = """# Each server has its key from the Secret vmem, in the same namespace, which no file needs to hold:
#   kubectl create secret generic vmem --from-literal=api-key=$(openssl rand -hex 32)
"""


def kubernetes(file: File) -> str:
    """A ResourceClaim for each pool, which its pods name and so meet on one GPU; for each replica a Deployment; for
    each model a Service and a PodDisruptionBudget. AIBrix finds models by the labels.

    Raises ValueError if Kubernetes does not take a name, or if the file has a key, which would stand in a pod's
    description.
    """
    documents = []
    for pool in file.pools:
        of_pool = [m for m in file.models if pool.name in m.pools]
        need = pool.size + sum(m.outside * m.servers for m in of_pool)
        fits = f"device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('{need}')) >= 0"
        count = len(pool.device) or max((m.gpus for m in of_pool), default=1)
        gpu = {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": count,
               "selectors": [{"cel": {"expression": fits}}]}  # fmt: skip
        documents.append({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": _label("pools", pool.name, f"vmem-{pool.name}"), "labels": {POOL: pool.name}},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": gpu}]}},
        })  # fmt: skip
    names: set[str] = set()
    for r in file.replicas:
        m = r.model
        if m.own_key:
            raise ValueError(f"models.{m.name}: its key would stand in the pod's description; leave it out of the "
                             "file, as the Secret vmem has it")  # fmt: skip
        name = _label("models", m.name, r.name.replace("@", "-"))
        if name in names:
            raise ValueError(f"models.{m.name}: two Deployments would have the name {name}")
        names.add(name)
        documents.append(_deployment(file, r, name))
    for m in file.models:
        labels, port = _labels(file, m.name), _port(file, m.name)
        about = {"name": _label("models", m.name, m.name), "labels": labels}
        select = {NAME: m.name}
        documents += [
            {"apiVersion": "v1", "kind": "Service", "metadata": about,
             "spec": {"selector": select, "ports": [{"name": "serve", "port": port, "targetPort": port}]}},
            {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": about,
             "spec": {"maxUnavailable": 1, "selector": {"matchLabels": select}}},
        ]  # fmt: skip
    return HEAD + "---\n".join(map(_yaml, documents))


def _label(where: str, key: str, name: str) -> str:
    if not re.fullmatch(LABEL, name):
        raise ValueError(f"{where}.{key}: Kubernetes takes no {name}: a name must be at most 63 lower-case letters, "
                         "digits and -, begin with a letter and not end with '-'")  # fmt: skip
    return name


def _port(file: File, model: str) -> int:
    """The port of all pods of a model: each has an address of its own."""
    return file.of(model)[0].port


def _labels(file: File, model: str) -> dict[str, str]:
    """What finds a model's pods: AIBrix's labels."""
    return {NAME: model, "model.aibrix.ai/port": str(_port(file, model))}


def _plain(text: str) -> str:
    """Kubernetes puts a variable's value in place of $(NAME), and $ in place of $$."""
    return text.replace("$", "$$")


def _deployment(file: File, r: Replica, name: str) -> dict[str, Any]:
    """One server. All of a pool share a folder and process numbers, so that each finds the others' control pages."""
    m, port = r.model, _port(file, r.model.name)
    labels = {**_labels(file, m.name), POOL: r.pool.name}
    secret = {"secretKeyRef": {"name": "vmem", "key": "api-key"}}
    here = {"HOME": "/tmp", "USER": "vmem", "XDG_RUNTIME_DIR": "/run/vmem"}  # the user has no entry and no home
    env = [{"name": "VLLM_API_KEY", "valueFrom": secret}]
    env += [{"name": k, "value": _plain(v)} for k, v in ({**here, **file.environment(r, devices=False)}).items()]
    command = [_plain(part) for part in file.command(replace(r, port=port), "0.0.0.0")]
    mounts: list[dict[str, Any]] = [{"name": "vmem", "mountPath": "/run/vmem"}]
    volumes: list[dict[str, Any]] = [{"name": "vmem", "hostPath": {"path": "/dev/shm", "type": "Directory"}}]
    for i, path in enumerate(p for p in (m.path, *m.adapters.values()) if p.startswith("/")):
        mounts.append({"name": f"model-{i}", "mountPath": path, "readOnly": True})
        volumes.append({"name": f"model-{i}", "hostPath": {"path": path}})
    probe = {"httpGet": {"path": "/health", "port": port}, "timeoutSeconds": 10}
    container = {
        "name": m.engine, "image": m.image or f"{m.engine}-vmem",
        "command": [*command, *(["--api-key", "$(VLLM_API_KEY)"] if m.engine == "sglang" else [])],
        "env": env,
        "ports": [{"containerPort": port}],
        "resources": {"claims": [{"name": "gpu"}]},
        "startupProbe": {**probe, "periodSeconds": 10, "failureThreshold": 90},
        "readinessProbe": {**probe, "periodSeconds": 10},
        "livenessProbe": {**probe, "periodSeconds": 20, "failureThreshold": 6},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }  # fmt: skip
    pod: dict[str, Any] = {
        "hostPID": True, "terminationGracePeriodSeconds": 120, "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": UID, "runAsGroup": UID,
                            "seccompProfile": {"type": "RuntimeDefault"}},
        "resourceClaims": [{"name": "gpu", "resourceClaimName": f"vmem-{r.pool.name}"}],
        "containers": [container], "volumes": volumes,
    }  # fmt: skip
    if r.pool.node:
        pod["nodeSelector"] = {"kubernetes.io/hostname": r.pool.node}
    select = {key: labels[key] for key in (NAME, POOL)}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "labels": labels},
        "spec": {"replicas": 1, "strategy": {"type": "Recreate"}, "selector": {"matchLabels": select},
                 "template": {"metadata": {"labels": labels}, "spec": pod}},
    }  # fmt: skip


RENDERERS: dict[str, Callable[[File], str]] = {
    "llama-swap": llama_swap, "ray-serve": ray_serve, "kubernetes": kubernetes,
}  # fmt: skip
