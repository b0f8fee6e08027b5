"""A server that may stand by, and answers every request with its number: python standby_server.py NOTES.

It binds a port of its own early, as vLLM's does, and has an engine, which is another process. NOTES: a file to which it
appends what it does. STANDBY_FAILS: the status with which it ends at the start.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys

from pyvmem.sleep.standby import Standby


async def main(notes):
    def note(what):
        with open(notes, "a") as file:
            print(os.getpid(), what, engine.pid, file=file)

    engine = subprocess.Popen(["sleep", "600"])
    own = socket.socket()
    own.bind(("127.0.0.1", 0))
    if status := os.environ.get("STANDBY_FAILS"):
        sys.exit(int(status))
    standby = Standby(*map(int, os.environ["VMEM_VLLM_STANDBY"].split(",")))

    async def sleep():
        note("asleep")

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = str(os.getpid()).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    task = asyncio.create_task(standby.end_with(lambda: [engine.pid], logging.getLogger()))
    await standby.wait(sleep)
    server = await asyncio.start_server(answer, sock=own)
    note("serves")
    await asyncio.gather(task, server.serve_forever())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
