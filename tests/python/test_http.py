"""Who may ask for /vmem/..: each path, of each engine's middleware, with keys, methods, kinds of bodies and browsers.

SPDX-License-Identifier: MIT
"""

import asyncio
import json
import random
import socket
import types

import pytest

import pyvmem.sglang.http as sglang
import pyvmem.vllm.http as vllm
from pyvmem.engine import control, http
from pyvmem.engine.control import State

READS = ("/vmem/limit", "/vmem/metrics")
JSON = ("content-type", "application/json")
LIMIT = b'{"limit": 5}'


@pytest.fixture(autouse=True)
def page(tmp_path, monkeypatch):
    """The control page of an engine of this process."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    for switch in ("VMEM_VLLM", "VMEM_SGLANG"):
        for name, value in dict(_POOL="p", _POOL_SIZE="1G", _WEIGHTS="1", _QUEUE="60").items():
            monkeypatch.setenv(switch + name, value)
        monkeypatch.setenv(switch, "1")
    monkeypatch.setenv("VMEM_VLLM_SLEEP", "keep")
    page = control.open_page("mine", 0)
    control.claim(page, "chat", 8000)
    page[control.RANKS_USED], page[control.BLOCK_BYTES], page[control.STATE] = 1, 1, State.AWAKE
    yield page
    page.unlink()


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def server(kind, keys=(), admin=None, monkeypatch=None):
    """The middleware of an engine's server, and the state of its application."""
    if kind.startswith("vllm"):
        state = types.SimpleNamespace(args=types.SimpleNamespace(
            api_key=list(keys) or None, served_model_name=["chat"], port=8000))  # fmt: skip
        return getattr(vllm, kind.partition(" ")[2]), state
    args = types.SimpleNamespace(api_key=keys[0] if keys else None, admin_api_key=admin, served_model_name="chat",
                                 model_path="m", port=8000)  # fmt: skip
    monkeypatch.setattr(sglang, "_manager", lambda: types.SimpleNamespace(server_args=args, gracefully_exit=False))
    return getattr(sglang, kind.partition(" ")[2]), types.SimpleNamespace()


KINDS = ("vllm Limits", "vllm Serve", "sglang Limits", "sglang Serve")


@pytest.fixture(params=KINDS)
def ask(request, monkeypatch):
    """ask(path, method, *headers, body, keys, admin): the status and what was said."""

    def asking(path, method="GET", *headers, body=b"", keys=(), admin=None, host="127.0.0.1:8000"):
        middleware, state = server(request.param, keys, admin, monkeypatch)
        sent = []

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            sent.append(message)

        pairs = [("host", host)] * bool(host) + list(headers)
        scope = dict(type="http", method=method, path=path, root_path="",
                     headers=[(k.encode(), v.encode("latin-1")) for k, v in pairs],
                     app=types.SimpleNamespace(state=state))  # fmt: skip

        async def run():
            its = middleware(app)
            await its(scope, receive, send)
            if task := getattr(its, "_task", None):
                task.cancel()

        asyncio.run(run())
        return sent[0]["status"], sent[1]["body"].decode()

    asking.serves = "Serve" in request.param
    asking.kind = request.param
    return asking


def paths(ask):
    return READS + (("/vmem/state", "/vmem/anything") if ask.serves else ())


def bearer(key):
    return ("authorization", f"Bearer {key}")


def test_without_a_key_everybody_at_this_machine_may_ask(ask, page):
    for path in READS:
        assert ask(path)[0] == 200
    assert ask("/vmem/limit", "POST", JSON, body=LIMIT)[0] == 200
    assert page[control.LIMIT] == 5


@pytest.mark.parametrize("headers", [
    (), (bearer("other"),), (bearer(""),), (("authorization", "K"),), (("authorization", "Basic K"),),
    (bearer("K\xff"),), (bearer("K"), bearer("other")), (bearer("other"), bearer("K")),
])  # fmt: skip
def test_a_server_with_a_key_asks_for_it_on_each_path(ask, page, headers):
    for path in paths(ask):
        assert ask(path, "GET", *headers, keys=["K"])[0] == 401
    for path in ("/vmem/limit", *(("/vmem/sleep", "/vmem/wake", "/vmem/drain") if ask.serves else ())):
        assert ask(path, "POST", JSON, *headers, body=LIMIT, keys=["K"])[0] == 401
    assert page[control.LIMIT] == control.NO_LIMIT and not page[control.DRAINED]


def test_who_has_the_key_may_ask_by_any_name(ask, page):
    for path in READS:
        assert ask(path, "GET", bearer("K"), keys=["K"], host="api.example.com")[0] == 200
    assert ask("/vmem/limit", "POST", JSON, ("authorization", "bearer K"), body=LIMIT, keys=["K"])[0] == 200
    assert page[control.LIMIT] == 5
    assert ask("/vmem/limit", "GET", bearer("schl\xc3\xbcssel"), keys=["schl\u00fcssel"])[0] == 200


def test_each_of_several_keys_opens(ask, monkeypatch):
    if ask.kind.startswith("vllm"):
        for key, status in (("A", 200), ("B", 200), ("C", 401)):
            assert ask("/vmem/limit", "GET", bearer(key), keys=["A", "B"])[0] == status
        monkeypatch.setenv("VLLM_API_KEY", "E")  # the command's own keys come first
        assert ask("/vmem/limit", "GET", bearer("E"), keys=["A"])[0] == 401
        assert ask("/vmem/limit", "GET", bearer("E"))[0] == 200
        assert ask("/vmem/limit")[0] == 401
    else:
        assert ask("/vmem/limit", admin="B")[0] == 401  # which SGLang itself lets pass
        assert ask("/vmem/limit", "GET", bearer("B"), admin="B")[0] == 200
        assert ask("/vmem/limit", "GET", bearer("A"), keys=["A"], admin="B")[0] == 200


@pytest.mark.parametrize("kind", [
    (), (("content-type", "text/plain"),), (("content-type", "application/x-www-form-urlencoded"),),
    (("content-type", "multipart/form-data"),), (("content-type", ""),), (JSON, ("content-type", "text/plain")),
])  # fmt: skip
def test_a_form_of_a_page_changes_nothing(ask, page, kind):
    assert ask("/vmem/limit", "POST", *kind, body=LIMIT)[0] == 415
    assert page[control.LIMIT] == control.NO_LIMIT
    if ask.serves and kind:
        assert ask("/vmem/drain", "POST", *kind)[0] == 415 and not page[control.DRAINED]
    assert ask("/vmem/limit", "POST", ("content-type", "Application/JSON; charset=utf-8"), body=LIMIT)[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9000", "http://127.0.0.1:8000.a",
                                    "https://[::1]:8000", ""])  # fmt: skip
def test_a_foreign_page_changes_and_reads_nothing(ask, page, origin):
    for path in paths(ask):
        assert ask(path, "GET", ("origin", origin))[0] == 403
        assert ask(path, "GET", ("origin", origin), bearer("K"), keys=["K"])[0] == 403
    assert ask("/vmem/limit", "POST", JSON, ("origin", origin), body=LIMIT)[0] == 403
    assert page[control.LIMIT] == control.NO_LIMIT
    assert ask("/vmem/limit", "POST", JSON, ("origin", "http://127.0.0.1:8000"), body=LIMIT)[0] == 200


@pytest.mark.parametrize("host, status", [
    ("evil.example:8000", 403), ("127.0.0.1.evil.example", 403), ("localhost.evil.example", 403), ("[::1", 403),
    ("evil.example@127.0.0.1", 200), ("127.0.0.1@evil.example", 403), ("127.0.0.1:8000/x.evil.example", 200),
    ("localhost:8000", 200), ("LOCALHOST", 200), ("chat:8000", 200), ("10.1.2.3:8000", 200), ("[::1]:8000", 200),
    ("chat.localhost", 200), (f"{socket.gethostname()}:8000", 200), ("", 200),
])  # fmt: skip
def test_a_name_that_leads_here_is_not_enough(ask, host, status):
    """A stranger's page can have its own name lead to this machine: then its requests are of one origin."""
    assert ask("/vmem/limit", host=host)[0] == status
    origin = ("origin", f"http://{host}")
    if status == 403:
        assert ask("/vmem/limit", "POST", JSON, origin, body=LIMIT, host=host)[0] == 403


def test_two_hosts_are_refused(ask):
    assert ask("/vmem/limit", "GET", ("host", "evil.example"))[0] == 403
    assert ask("/vmem/limit", "GET", ("host", "evil.example"), bearer("K"), keys=["K"])[0] == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "POST", "GET", "TRACE", "post"])
def test_each_path_takes_its_methods_alone(ask, page, method):
    takes = {"/vmem/limit": "GET POST", "/vmem/metrics": "GET", "/vmem/state": "GET"}
    orders = ("/vmem/sleep", "/vmem/wake", "/vmem/drain")
    for path, methods in takes.items():
        if method not in methods.split() and (ask.serves or path in READS):
            assert ask(path, method, JSON, body=LIMIT)[0] == 405
    for path in orders if ask.serves and method != "POST" else ():
        assert ask(path, method)[0] == 405
    assert page[control.LIMIT] in (control.NO_LIMIT, 5) and not page[control.DRAINED]


def test_other_paths_are_the_servers(ask):
    for path in ("/", "/vmem", *(() if ask.serves else ("/vmemx", "/v1/models", "/vmem/limit/", "//vmem/limit"))):
        assert ask(path, "GET", ("origin", "http://evil.example"))[0] == 299


def test_what_is_refused_says_what_to_do(ask):
    assert "call the server by its address" in json.loads(ask("/vmem/limit", host="evil.example")[1])["error"]
    assert "application/json" in json.loads(ask("/vmem/limit", "POST", body=LIMIT)[1])["error"]


def test_a_server_that_listens_elsewhere_names_no_port():
    """Under Ray, an engine's server has vLLM's default port in its arguments, and listens at none."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [each.getsockname()[1] for each in (one, other)]
        assert http.listens(ports[0]) and http.listens(ports[1])
        other.close()
        assert http.listens(ports[0]) and not http.listens(ports[1])


@pytest.mark.parametrize("settings, says", [
    (dict(min=9, limit=8), "min 9 is over limit 8"), (dict(min=9), None), (dict(min=9, limit=9), None),
    (dict(limit=None, min=9), None), (dict(min=0, limit=0), None),
])  # fmt: skip
def test_a_minimum_is_within_the_limit(page, settings, says):
    page[control.POOL] = 7
    if says is None:
        control.change(page, **settings)
        return
    with pytest.raises(ValueError, match=says):
        control.change(page, **settings)
    assert page[control.MIN] == 0 and page[control.LIMIT] == control.NO_LIMIT
    control.change(page, limit=settings["limit"])
    with pytest.raises(ValueError, match=says):
        control.change(page, min=settings["min"])
    control.change(page, limit=None, min=settings["min"])
    with pytest.raises(ValueError, match=says):
        control.change(page, limit=settings["limit"])


def test_what_needs_the_model_and_what_does_not(monkeypatch):
    """An order to pause would be taken for one to sleep; whoever resumes, it is only that the user wants no pause."""
    serves = vllm.Serve(app)
    assert all(serves.needs("POST", path) for path in ("/v1/completions", "/pause", "/init_weight_transfer_engine"))
    assert not any(serves.needs("POST", path) for path in ("/resume", "/sleep", "/wake_up", "/is_paused", "/tokenize"))
    assert not serves.needs("GET", "/v1/models")


# ---- whatever a stranger sends ---------------------------------------------------------------------------------------

VALUES = ["5", "-1", "0", "null", "true", "1e400", "NaN", "[]", "{}", '"5"', "1" * 5000, "[" * 900 + "]" * 900, "5.0",
          '"\\ud800"', str(1 << 62), str((1 << 62) - 1)]  # fmt: skip
NAMES = ["limit", "rank", "lend", "max", "min", "priority", "pages", "self", "", "\\ud800", "limit\\u0000", "x" * 5000]
WORDS = ["", "bearer K", "Bearer", "Bearer other", "\xff", "127.0.0.1:8000", "http://127.0.0.1:8000", "evil.example",
         "application/json", "application/json;charset=utf-16", "text/plain", "null", "*", "a" * 3000]  # fmt: skip


def anything(draw):
    """A request of a stranger's: path, method, headers and body."""
    pick = draw.choice
    path = pick(
        ["/vmem/limit"] * 4 + ["/vmem/metrics", "/vmem/state", "/vmem/", "/vmem/limit/", "/vmem/\x00", "/vmem/../x"]
    )
    method = pick(["POST", "POST", "GET", "PUT", "HEAD", "", "post", "CONNECT"])
    names = ["authorization", "host", "origin", "content-type", "Content-Type", "transfer-encoding", "x"]
    headers = [(pick(names), pick(WORDS)) for _ in range(draw.randrange(4))] + [JSON] * draw.randrange(2)
    body = "{%s}" % ", ".join(f'"{pick(NAMES)}": {pick(VALUES)}' for _ in range(draw.randrange(4)))
    body = pick([body] * 4 + ["", body[:-1], "[]", "5", body + "x", " " * (1 << 17)])
    return path, method, headers, body.encode(pick(["utf-8", "utf-16"]), "surrogatepass")


@pytest.mark.parametrize("keys", [(), ("K",)])
def test_whatever_is_sent_is_answered_and_only_what_is_right_changes_something(ask, page, keys):
    draw = random.Random(ask.kind)
    for _ in range(200):
        path, method, headers, body = anything(draw)
        before = list(page.cells[: control.NAME])
        asked = json.dumps([path, method, headers, body.decode("latin-1")])
        status, said = ask(path, method, *headers, body=body, keys=keys)
        assert status in (200, 299, 400, 401, 403, 404, 405, 415), asked
        assert (status == 299) == (path not in READS and not ask.serves), asked
        if status not in (200, 299):
            assert isinstance(json.loads(said)["error"], str) and len(said) < 1000, asked
        allowed = not keys or [v.lower() for k, v in headers if k == "authorization"] == ["bearer k"]
        assert allowed or status in (401, 299), asked
        if (status, method, path) != (200, "POST", "/vmem/limit"):
            assert list(page.cells[: control.NAME]) == before, asked
