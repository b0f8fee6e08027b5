"""A router in forty lines of code: each request goes to the server of its model where it is expected to wait least.

    python examples/router.py chat=http://127.0.0.1:8001 chat=http://127.0.0.1:8002 code=http://127.0.0.1:8003

The servers are those of `pyvmem models`, whose /vmem/state says what a request would wait there. VLLM_API_KEY has their
key, and clients send it, too. It listens at 127.0.0.1:8080 and needs aiohttp, which vLLM and SGLang have.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections import defaultdict

from aiohttp import ClientSession, ClientTimeout, web

KEY = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("VLLM_API_KEY")) else {}
OWN = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}  # headers of one connection
servers, cost, running = defaultdict(list), {}, defaultdict(int)


async def watch(session, url):
    while True:
        try:
            async with session.get(f"{url}/vmem/state", headers=KEY, timeout=ClientTimeout(2)) as answer:
                cost[url] = (await answer.json())["wait"]
        except Exception:  # it starts, or has ended
            cost[url] = float("inf")
        await asyncio.sleep(0.5)


async def forward(request):
    body, urls = await request.read(), None
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        urls = servers.get(json.loads(body).get("model"))
    if not urls:
        return web.json_response(
            {"error": {"message": f"the models are {', '.join(servers)}", "code": 404}}, status=404
        )
    url = min(urls, key=lambda u: (cost.get(u, 0), running[u]))
    running[url] += 1
    try:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in OWN}
        async with request.app["session"].post(url + request.path_qs, data=body, headers=headers) as answer:
            told = web.StreamResponse(status=answer.status, headers={k: v for k, v in answer.headers.items()
                                                                     if k.lower() not in OWN})  # fmt: skip
            await told.prepare(request)
            async for part in answer.content.iter_any():
                await told.write(part)
            return told
    finally:
        running[url] -= 1


async def run(app):
    async with ClientSession(timeout=ClientTimeout(None), auto_decompress=False) as app["session"]:
        tasks = [asyncio.create_task(watch(app["session"], url)) for urls in servers.values() for url in urls]
        yield
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    for model, _, url in (arg.partition("=") for arg in sys.argv[1:]):
        servers[model].append(url)
    app = web.Application(client_max_size=1 << 28)
    app.add_routes([web.post("/{path:.*}", forward)])
    app.cleanup_ctx.append(run)
    web.run_app(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8080")), handler_cancellation=True)
