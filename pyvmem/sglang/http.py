"""Limits, sleep and metrics over SGLang's own HTTP server. See `pyvmem.engine.http` and `pyvmem.sleep.serve`.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyvmem.engine import http
from pyvmem.engine.http import Receive, Scope, Send
from pyvmem.engine.settings import Settings
from pyvmem.sglang import settings
from pyvmem.sglang.sleep import TAG
from pyvmem.sleep import serve

HEALTH = ("/health", "/health_generate")


class Limits(http.Limits):
    """ASGI middleware that serves ``/vmem/limit`` and ``/vmem/metrics`` for the engines of this server."""

    prefix = "sglang:"
    hint = "VMEM_SGLANG must be 1, and SGLANG_PLUGINS, where it is set, must include vmem"

    def keys(self, state: Any) -> Sequence[str]:
        """SGLang asks first, but it lets these paths pass where there is an ``--admin-api-key`` alone."""
        args = _manager().server_args
        return [str(key) for key in (args.api_key, args.admin_api_key) if key]


class Serve(Limits, serve.Serve):
    """ASGI middleware that holds requests while the model sleeps. It serves ``/vmem/state`` and orders, too."""

    free = ("/flush_cache", "/start_", "/stop_", "/dump_", "/set_", "/freeze_gc", "/release_memory_occupation",
            "/resume_memory_occupation", "/slow_down", "/configure_logging", "/close_session", "/abort_request",
            "/pause_generation", "/continue_generation", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize",
            "/parse_function_call", "/separate_reasoning", "/api/show", "/v1/messages/count_tokens")  # fmt: skip

    def settings(self) -> Settings:
        return settings.read()

    def needs(self, method: str, path: str) -> bool:
        reads = path in ("/get_weights_by_name", "/weights_checker")
        return reads or super().needs("POST" if method == "PUT" else method, path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # SGLang answers these by a token that it generates, which a model that sleeps does not.
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and path in HEALTH and self.pages.find() and self.pages.has_sleepers():
            await http.answer(send, 200 if self.leader.is_alive() else 503, b"", b"text/plain")
            return
        await super().__call__(scope, receive, send)

    def will_answer(self, scope: Scope) -> bool:
        return True  # SGLang has asked for the key

    def about(self, state: Any) -> tuple[str, int]:
        args = _manager().server_args
        return str(args.served_model_name or args.model_path), int(args.port)

    def ends(self) -> bool:  # by SIGTERM: SGLang's own requests end first
        return bool(_manager().gracefully_exit)

    async def sleep(self, state: Any, freeze: bool) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await _manager().release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=[TAG]))

    async def wake(self, state: Any) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await _manager().resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[TAG]))


def _manager() -> Any:
    """The object by which SGLang's server talks to its engines."""
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager
