"""What strangers write into the socket of a server, with the HTTP that vLLM's and SGLang's servers use: no engine runs.

SPDX-License-Identifier: MIT
"""

import asyncio
import contextlib
import socket
import threading
import types

import pytest
import uvicorn

from pyvmem.engine import control
from pyvmem.vllm import http

HOST, JSON = b"Host: 127.0.0.1\r\n", b"Content-Type: application/json\r\n"


async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def with_state(middleware):
    """The middleware as an application of FastAPI's calls it."""

    async def call(scope, receive, send):
        scope["app"] = types.SimpleNamespace(state=types.SimpleNamespace(args=None))
        await middleware(scope, receive, send)

    return call


@pytest.fixture(params=["h11", "httptools"])
def wire(request, tmp_path, monkeypatch):
    """wire(bytes ..): the status line of the answer, "" for none. Between parts, the server has seen the last."""
    pytest.importorskip(request.param)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    page = control.open_page("mine", 0)
    control.claim(page, "chat", 8000)
    page[control.RANKS_USED], page[control.BLOCK_BYTES] = 1, 1
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(with_state(http.Limits(app)), http=request.param, log_level="critical",
                                           lifespan="off"))  # fmt: skip
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()

    def send(*parts):
        with socket.create_connection(listener.getsockname(), 30) as client:
            with contextlib.suppress(OSError):  # the server has answered, and hung up before the last part
                for part in parts:
                    client.sendall(part)
                client.shutdown(socket.SHUT_WR)
            told = b""
            with contextlib.suppress(ConnectionResetError):
                while more := client.recv(1 << 16):
                    told += more
        return told.split(b"\r\n")[0].decode("latin-1")

    send.page = page
    yield send
    server.should_exit = True
    thread.join()
    listener.close()
    page.unlink()


def post(body=b'{"limit": 5}', *headers, target=b"/vmem/limit", length=None):
    sent = b"".join([HOST, JSON, *headers])
    return b"POST %s HTTP/1.1\r\n%sConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (
        target, sent, len(body) if length is None else length, body)  # fmt: skip


CHUNKED = b"POST /vmem/limit HTTP/1.1\r\n" + HOST + JSON + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("asks", [
    (post(),),
    (post()[:-1], b"}"),
    (CHUNKED, b"1\r\n{\r\n", b"b\r\n\"limit\": 5}\r\n", b"0\r\n\r\n"),
    (post(target=b"/%76mem/limit?limit=7"),),
], ids=["whole", "in parts", "chunked", "escaped"])  # fmt: skip
def test_what_is_right_in_any_form_sets_the_limit(wire, asks):
    assert wire(*asks).startswith("HTTP/1.1 200") and wire.page[control.LIMIT] == 5


WRONG = {
    "cut off": (post()[:-1],),
    "longer than it says": (post(length=11),),
    "no length": (post().replace(b"Content-Length: 12\r\n", b""),),
    "a length below 0": (post(length=-1),),
    "a huge length": (post(length=10**30),),
    "a bad chunk": (CHUNKED + b"5\r\n{\"lim\r\nZZ\r\n",),
    "a chunk below 0": (CHUNKED + b"-5\r\n{\"lim\r\n",),
    "half a chunk": (CHUNKED + b"c\r\n{\"limit\"",),
    "too much": (post(b'{"limit": 5}' + b" " * (1 << 17)),),
    "two hosts": (post(b'{"limit": 5}', b"Host: evil.example\r\n"),),
    "another's origin": (post(b'{"limit": 5}', b"Origin: http://evil.example\r\n"),),
    "another's name": (post().replace(HOST, b"Host: evil.example\r\n"),),
    "another's name before the path": (post(target=b"http://evil.example/vmem/limit").replace(
        HOST, b"Host: evil.example\r\n"),),
    "a folded header": (post(b'{"limit": 5}', b" folded\r\n").replace(JSON, b"Content-Type: text/plain;\r\n"),),
    "a form": (post().replace(JSON, b"Content-Type: text/plain\r\n"),),
    "two kinds": (post(b'{"limit": 5}', b"Content-Type: text/plain\r\n"),),
    "HTTP 0.9": (b"POST /vmem/limit\r\n\r\n{\"limit\": 5}",),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00",),
    "another method": (post().replace(b"POST", b"PATCH"),),
    "a small method": (post().replace(b"POST", b"post"),),
    "HEAD": (post().replace(b"POST", b"HEAD"),),
    "slashes": (post(target=b"//vmem/limit"),),
    "a slash behind": (post(target=b"/vmem/limit/"),),
    "dots": (post(target=b"/x/../vmem/limit"),),
    "a null": (post(target=b"/vmem/limit%00"),),
    "a path that is none": (post(target=b"*"),),
}  # fmt: skip


@pytest.mark.parametrize("asks", WRONG.values(), ids=WRONG)
def test_what_is_wrong_in_any_form_changes_nothing(wire, asks):
    status = wire(*asks)
    assert status == "" or status.split()[1] in ("299", "400", "403", "404", "405", "413", "415", "505"), status
    assert wire.page[control.LIMIT] == control.NO_LIMIT
    assert wire(post()).startswith("HTTP/1.1 200")  # and the server goes on
