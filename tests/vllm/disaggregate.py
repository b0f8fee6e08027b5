"""Prefill and decode apart: two engines of vLLM's on CPUs, between which NIXL carries KV rows over TCP."""

import contextlib
import json
import os
import select
import signal
import socket
import time

import connect
import engines

CONNECTOR, PROMPTS, LONGEST = "NixlConnector", 10, 250


def chosen(role):
    """vLLM's setting. If a prefix cannot be loaded, the request computes it."""
    return dict(kv_connector=CONNECTOR, kv_role=role, kv_buffer_device="cpu", kv_load_failure_policy="recompute",
                kv_connector_extra_config={})  # fmt: skip


def stage_on_the_host(backed):
    """Have NIXL register host buffers of its own, as on a GPU with kv_buffer_device=cpu, and let blocks come and go."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker

    from pyvmem.vllm import connectors

    def staged(real):
        def made(self, *args, **kwargs):
            real(self, *args, **kwargs)
            self.use_host_buffer = True

        return made

    def copy(src, dst, src_ids, dst_ids, direction):
        connect.count("stored" if direction == "d2h" else "loaded", src_ids, backed)
        for layer in src:
            dst[layer][dst_ids] = src[layer][src_ids]

    worker, scheduler = base_worker.NixlBaseConnectorWorker, base_scheduler.NixlBaseConnectorScheduler
    worker.__init__, scheduler.__init__ = staged(worker.__init__), staged(scheduler.__init__)
    worker.set_host_xfer_buffer_ops = lambda self, _: setattr(self, "copy_blocks", copy)
    connectors.Connector.registers = lambda self, device: False


def make(folder, role, staged, **options):
    """An engine of one role, with a port of its own."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ.update(UCX_TLS="tcp", VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT=str(port))
    os.sched_setaffinity = lambda *_: None  # vLLM would move the whole process to the last core
    if not staged:
        os.environ.pop("VMEM_VLLM_PAGE_SIZE", None)  # which would be refused: that memory is vLLM's own
    else:
        stage_on_the_host(connect.watch())
    # Into host buffers, vLLM itself stores the block in which a chunk of a prompt ends as it is then, and no more.
    options = dict(dict(max_num_batched_tokens=4096), **options)
    return engines.make(folder, kv_transfer_config=chosen(role), **options)


def ask(llm, name, prompt, tokens, transfer):
    from vllm import SamplingParams

    llm.llm_engine.add_request(name, prompt, SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=dict(kv_transfer_params=transfer)))  # fmt: skip


def steps(llm):
    """Yield the answers as they come, for ever; None after each step."""
    core = llm.llm_engine.engine_core.engine_core
    while True:
        if llm.llm_engine.has_unfinished_requests():
            yield from (answer for answer in llm.llm_engine.step() if answer.finished)
        elif core.scheduler.has_requests():
            core.step_fn()
        yield None


def prefill(folder, pipes, staged=True, limits=(), turns=1, dies=False, options=()):
    """Compute all prompts, tell the other engine where their rows are, and stay until it has them.

    dies: be killed instead, when the other engine may be loading.
    """
    told, ends = pipes
    llm = make(folder, "kv_producer", staged, **dict(options))
    remote = dict(do_remote_decode=True, do_remote_prefill=False, remote_engine_id=None, remote_block_ids=None,
                  remote_host=None, remote_port=None)  # fmt: skip
    prompts, left = engines.prompts_of(PROMPTS, LONGEST), turns * PROMPTS
    with engines.limits_move(limits) as vmem:
        for turn in range(turns):
            for i, prompt in enumerate(prompts):
                ask(llm, f"{turn}-{i}", prompt, 1, remote)
        for answer in steps(llm):
            if answer is not None:
                left -= 1
                line = dict(name=answer.request_id, transfer=answer.kv_transfer_params)
                os.write(told, (json.dumps(line) + "\n").encode())
                if dies and not left:
                    os.kill(os.getpid(), signal.SIGKILL)
            elif not left and select.select([ends], [], [], 0.001)[0]:
                break
    return dict(connect.COUNTS, idle=engines.idle_state(llm, vmem[1])["idle"] if vmem else None)


def decode(folder, pipes, staged=True, limits=(), turns=1, seconds=60, options=()):
    """Go on with all prompts where the other engine ended. Returns tokens by request, and what was copied."""
    told, ends = pipes
    llm = make(folder, "kv_consumer", staged, **dict(options))
    prompts, tokens, text, asked = engines.prompts_of(PROMPTS, LONGEST), {}, b"", 0
    end = time.monotonic() + seconds
    with engines.limits_move(limits) as vmem:
        for answer in steps(llm):
            if answer is not None:
                tokens[answer.request_id] = list(answer.outputs[0].token_ids)
                end = time.monotonic() + seconds
            if len(tokens) == turns * len(prompts) or time.monotonic() > end:
                break
            if asked < turns * len(prompts) and select.select([told], [], [], 0.001)[0]:
                text += os.read(told, 1 << 16)
                *lines, text = text.split(b"\n")
                for line in map(json.loads, lines):
                    asked += 1
                    ask(llm, line["name"], prompts[int(line["name"].split("-")[1])], 16, line["transfer"])
    os.write(ends, b".")
    return dict(connect.COUNTS, tokens=tokens, idle=engines.idle_state(llm, vmem[1])["idle"] if vmem else None)


@contextlib.contextmanager
def apart(folder, first, second, vmem=True, seconds=200):
    """Both engines, as `engines.Child`. first, second: arguments of `prefill` and `decode`."""
    told, ends = os.pipe(), os.pipe()
    both = [engines.Child(prefill, folder, (told[1], ends[0]), vmem=vmem, seconds=seconds, **first),
            engines.Child(decode, folder, (told[0], ends[1]), vmem=vmem, seconds=seconds, **second)]  # fmt: skip
    try:
        yield both
    finally:
        for engine in both:
            engine.kill()
        for end in (*told, *ends):
            os.close(end)
