"""SGLang's own scheduler with its model worker on the CPU, driven step by step in a fork of this process.

The tokenizer's processes are left out: requests are put into the scheduler, and its answers are read off them. After
each step, the rows of every request that runs are compared with what they held after the step that wrote them.
"""

import array
import collections
import os
import pickle
import random
import selectors
import signal
import socket
import sys
import threading
import traceback

import torch
from ends import fork_ends_with_parent
from models import model
from torch.overrides import TorchFunctionMode

MIB = 1 << 20


def imports():
    """Import the modules that an engine's process needs: once, before the forks."""
    torch.set_num_threads(1)
    import sglang.srt.entrypoints.engine  # noqa: F401
    import sglang.srt.managers.scheduler  # noqa: F401
    import sglang.srt.models.registry  # noqa: F401


def keep_windows_apart():
    """Have SGLang give layers with windows a pool of their own for a Gemma 3, which it does for other models only."""
    from sglang.srt.configs import model_config

    def layers(architectures, text):
        kinds = [(i, kind == "sliding_attention") for i, kind in enumerate(text.layer_types)]
        return [i for i, slides in kinds if slides], [i for i, slides in kinds if not slides]

    model_config.is_hybrid_swa_model = lambda *args: True
    model_config.get_hybrid_layer_ids = layers
    model_config.ModelConfig.disable_hybrid_swa_memory = property(lambda self: False, lambda self, value: None)


def workload(n, seed=7, longest=250, output=48):
    """[(prompt, tokens to make)]: some prompts begin alike."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, 500) for _ in range(rng.choice((64, 200, 333)))] for _ in range(6)]
    return [
        (list(rng.choice(prefixes)) + [rng.randrange(3, 500) for _ in range(rng.randrange(1, longest))],
         rng.randrange(4, output))
        for _ in range(n)
    ]  # fmt: skip


class Unpinned(TorchFunctionMode):
    """Tensors are made in memory that is not pinned: SGLang's LoRA asks for such memory without a GPU, too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


class Engine:
    """A scheduler of SGLang's. arguments: of ServerArgs. In forks of `forked(ranks=..)`, one of several ranks.

    With `attn_dp_size`, each group of ranks has requests of its own, and `run` ends when all have ended.
    """

    rank, ranks, port = 0, 1, None

    def __init__(self, model, page_size=64, tokens=16384, chunk=512, overlap=True, two_pools=False, **arguments):
        from sglang.srt import server_args
        from sglang.srt.managers import scheduler as module
        from sglang.srt.server_args import PortArgs, ServerArgs

        module.load_plugins()
        if two_pools:
            keep_windows_apart()
        args = ServerArgs(model_path=model, device="cpu", skip_tokenizer_init=True, dtype="float32", random_seed=1,
                          attention_backend="torch_native", disable_cuda_graph=True, mem_fraction_static=0.95,
                          log_level="warning", max_total_tokens=tokens, sampling_backend="pytorch",
                          page_size=page_size, chunked_prefill_size=chunk, max_running_requests=64,
                          watchdog_timeout=1e6,  # SGLang's watchdog ends the parent, which runs the tests
                          nccl_port=self.port, **{"tp_size": self.ranks, **arguments})  # fmt: skip
        args.resolve_once()
        args.check_server_args()
        if "attn_dp_size" in arguments:
            from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

            # Sockets of its own for each rank, instead of ports that they share; and what pads a batch.
            server_args.attn_dp_enabled_of = lambda args: False
            TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
        ports = PortArgs.init_new(args)
        threading.Thread(target=self._drain, args=(ports,), daemon=True).start()
        place = module.SpawnRanks(world_rank=self.rank, dp_rank=None, gpu_id=self.rank)
        module.publish(args, role="scheduler", ranks=place)
        self.scheduler, self.parallel = module.Scheduler(args, ports), module.get_parallel()
        self.overlap, self.requests, self.steps, self.rows, self.aborted = overlap, [], 0, {}, set()
        self.compared = 0  # rows
        self.scheduler.result_queue = collections.deque()
        self.scheduler.enable_skip_finishing_decode = overlap  # as event_loop_overlap and run_event_loop do
        self.scheduler._war_barrier_enabled = False
        add = self.scheduler._add_request_to_queue

        def added(request, *args, **kwargs):
            if request not in self.requests:
                self.requests.append(request)
            return add(request, *args, **kwargs)

        self.scheduler._add_request_to_queue = added
        self.memory = getattr(self.scheduler, "_vmem", None)

    @staticmethod
    def _drain(ports):
        import zmq

        poller, context = zmq.Poller(), zmq.Context()
        for name in (ports.tokenizer_ipc_name, ports.detokenizer_ipc_name):
            socket = context.socket(zmq.PULL)
            socket.bind(name)
            poller.register(socket)
        while True:
            for socket, _ in poller.poll():
                socket.recv_multipart()

    def submit(self, name, prompt, n, beams=1, **more):
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=n, temperature=0, ignore_eos=True, n=beams,
                                  **(dict(beam_width=beams) if beams > 1 else {}))  # fmt: skip
        sampling.normalize(None)
        self.scheduler.process_input_requests([TokenizedGenerateReqInput(
            rid=name, input_text=None, input_ids=array.array("q", prompt), input_embeds=None, mm_inputs=None,
            token_type_ids=None, sampling_params=sampling, return_logprob=False, logprob_start_len=-1,
            top_logprobs_num=0, token_ids_logprob=None, stream=False, **more)])  # fmt: skip

    def adapters(self):
        """The numbers of the LoRA adapters that the engine was started with."""
        from sglang.srt.runtime_context import get_lora

        return [adapter.lora_id for adapter in get_lora().lora_paths]

    def open_session(self, name):
        from sglang.srt.managers.io_struct import OpenSessionReqInput

        self.scheduler.process_input_requests([OpenSessionReqInput(capacity_of_str_len=4096, session_id=name)])

    def abort(self, name):
        from sglang.srt.managers.io_struct import AbortReq

        self.aborted.add(name)
        self.scheduler.process_input_requests([AbortReq(rid=name)])

    def order(self, kind, **more):
        """Give the scheduler an order of `sglang.srt.managers.io_struct`."""
        from sglang.srt.managers import io_struct

        self.scheduler.process_input_requests([getattr(io_struct, f"{kind}ReqInput")(**more)])

    def _pop(self):
        self.scheduler.process_batch_result(*self.scheduler.result_queue.popleft())

    def step(self):
        """One turn of SGLang's event loop; returns the batch that ran."""
        s = self.scheduler
        if self.ranks > 1 or s._engine_paused:
            pulled = None if self.parallel.attn_tp_rank else []
            s.process_input_requests(s.request_receiver._broadcast_reqs_across_ranks(pulled))
        if s._engine_paused:
            self.steps += 1
            return None
        plan = s.get_next_batch_to_run(running_batch=s.running_batch, last_batch=s.last_batch)
        s.running_batch = plan.running_batch
        batch = s.cur_batch_for_debug = plan.batch_to_run
        if self.overlap:
            off = s.is_disable_overlap_for_batch(batch, last_batch=s.last_batch)
            if off:
                self._pop()
            result = None
            if batch:
                result = s.run_batch(batch)
                s._apply_war_barrier()
                s.result_queue.append((batch.copy(), result))
            if s.last_batch:
                if not off:
                    self._pop()
            elif batch is None:
                s.on_idle()
            s.launch_batch_sample_if_needed(result, batch)
        elif batch:
            s.process_batch_result(batch, s.run_batch(batch))
        else:
            s.on_idle()
        s.last_batch = batch
        self.steps += 1
        self.check_rows()
        return batch

    def _rows(self, index, n):
        """[(first position, rows)] of a request: keys of the first layer and values of the last, in each pool."""
        s, pool = self.scheduler, self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        where = s.req_to_token_pool.req_to_token[index, :n]
        found = [(0, getattr(pool, "full_kv_pool", pool), where)]
        if hasattr(pool, "swa_kv_pool"):  # what the window has passed may be gone
            first = max(n - s.sliding_window_size + 8, 0)
            found.append((first, pool.swa_kv_pool, pool.full_to_swa_index_mapping[where[first:]]))
        return [(first, torch.cat((one.k_buffer[0][rows], one.v_buffer[-1][rows]), -1)) for first, one, rows in found]

    def check_rows(self):
        """The rows of each running request are those that were computed."""
        seen = {}
        for request in self.scheduler.running_batch.reqs:
            index = request.req_pool_idx if hasattr(request, "req_pool_idx") else request.kv.req_pool_idx
            moves = getattr(request, "beam_group", None) is not None  # to the rows of the beam that leads
            if request.finished() or index is None or moves:
                continue
            seen[request.rid] = now = self._rows(index, len(request.origin_input_ids) + len(request.output_ids) - 1)
            for (first, rows), (known_first, known) in zip(now, self.rows.get(request.rid, ())):
                start, end = max(first, known_first), min(first + len(rows), known_first + len(known))
                assert torch.equal(rows[start - first : end - first], known[start - known_first : end - known_first]), (
                    f"step {self.steps}: {request.rid} has other rows"
                )
                self.compared += max(end - start, 0)
        self.rows = seen

    @property
    def unfinished(self):
        return sum(not r.finished() and r.rid not in self.aborted for r in self.requests)

    def run(self, jobs, at_once=14, each=None):
        """Run jobs [(name, prompt, n, ..)]. each: called before each step."""
        jobs = collections.deque(jobs)
        start = self.steps
        while True:
            while jobs and self.unfinished < at_once:
                name, prompt, n, *more = jobs.popleft()
                self.submit(name, prompt, n, **dict(*more))
            if each is not None:
                each(self)
            if self._all(self.step() is None and not jobs and not self.unfinished):
                return
            assert self.steps - start < 30000, "stuck"

    def _all(self, ended):
        """True once all groups of DP attention have ended: they run each step together."""
        if self.ranks == 1 or self.parallel.attn_dp_size == 1:
            return ended
        all_ended = torch.tensor(int(ended))
        least, group = torch.distributed.ReduceOp.MIN, self.parallel.world_group.cpu_group
        torch.distributed.all_reduce(all_ended, least, group=group)
        return bool(all_ended)

    def rest(self, n=40):
        """Nothing runs for a while."""
        import time

        for _ in range(n):
            self.step()
            time.sleep(0.02)

    def tokens(self):
        return {r.rid: list(r.output_ids) for r in self.requests}

    def retractions(self):
        return sum(r.retraction_count for r in self.requests)

    def held(self):
        """Bytes that the engine's blocks hold."""
        for budget in self.memory.budgets:
            budget.memory.blocks.flush()
        return sum(budget.memory.blocks.stats().held for budget in self.memory.budgets)


def random_load(engine, many, move):
    """Requests, aborts and flushes for so many steps, and then until all have ended. Returns the number of flushes.

    move : called before each step.
    """
    rng, flushed, number = random.Random(11), 0, 0
    while engine.steps < many:
        while engine.unfinished < rng.randrange(2, 20) and rng.random() < 0.7:
            prompt = [rng.randrange(3, 500) for _ in range(rng.choice((5, 60, 300, 700)))]
            engine.submit(f"r{number}", prompt, rng.choice((1, 8, 40, 120)))
            number += 1
        if rng.random() < 0.02 and engine.unfinished:
            name = rng.choice([r.rid for r in engine.requests if not r.finished() and r.rid not in engine.aborted])
            engine.abort(name)
        if rng.random() < 0.005:
            while engine.unfinished or engine.step() is not None:
                move(engine)
                engine.step()
            flushed += engine.scheduler.flush_cache()
        move(engine)
        engine.step()
    while engine.unfinished or engine.step() is not None:
        engine.step()
    return flushed


def tie(path, prompt, own, other):
    """How near to each other two answers' first differing tokens are, in standard deviations of the logits.

    Two tokens whose logits are equal but for rounding may change places when the same rows are computed in other
    batches. In float64, by transformers: what SGLang computes in float32 is not asked.
    """
    from transformers import AutoModelForCausalLM

    at = next(i for i, (a, b) in enumerate(zip(own, other)) if a != b)
    reference = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float64)
    logits = reference(torch.tensor([[*prompt, *own[:at]]])).logits[0, -1]
    return float(abs(logits[own[at]] - logits[other[at]]) / logits.std())


def forked(do, *args, vmem=True, ranks=1, **environment):
    """Run `do(*args)` in a fork, and return its result. environment: VMEM_SGLANG_* without its beginning, or others.

    ranks : if more than one, forks that are ranks of tensor parallelism; then a list of their results.
    """
    sys.stdout.flush()
    port = free_port() if ranks > 1 else None
    pids, pipes, told = [], selectors.DefaultSelector(), [b""] * ranks
    for rank in range(ranks):
        read, write = os.pipe()
        pids.append(os.fork())
        if pids[-1] == 0:
            fork_ends_with_parent()
            Engine.rank, Engine.ranks, Engine.port = rank, ranks, port
            os.environ.update(environment, VMEM_SGLANG="1" if vmem else "0")
            _run(do, args, os.fdopen(write, "wb"))
        os.close(write)
        pipes.register(read, selectors.EVENT_READ, rank)
    failed = None
    while pipes.get_map():
        for key, _ in pipes.select():
            more = os.read(key.fd, 1 << 20)
            told[key.data] += more
            if more:
                continue
            pipes.unregister(key.fd)
            os.close(key.fd)
            _, status = os.waitpid(pids[key.data], 0)
            there, answer = pickle.loads(told[key.data]) if told[key.data] else (False, None)
            if not there and failed is None:
                failed = answer or f"the engine's process ended with status {status}"
                for other in (fd.data for fd in pipes.get_map().values()):  # it waits for this one
                    os.kill(pids[other], signal.SIGKILL)
            told[key.data] = answer
    if failed is not None:
        raise ChildProcessError(failed)
    return told if ranks > 1 else told[0]


def _run(do, args, file):
    """In a fork: write what `do(*args)` returns or raises, and end."""
    status = 0
    try:
        with torch.inference_mode():
            answer = True, do(*args)
    except BaseException as error:
        answer = False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        status = 1
    with file:
        pickle.dump(answer, file)
    sys.stdout.flush()
    os._exit(status)


_plain = {}


def plain(kind, jobs, run=forked, **options):
    """SGLang's own tokens, computed once. run: as `forked`."""

    def own():
        engine = Engine(model(kind), **options)
        engine.run(jobs)
        return engine.tokens()

    asked = repr((run.__name__, kind, jobs, options))
    _plain[asked] = _plain.get(asked) or run(own, vmem=False)
    return _plain[asked]


def moving(sizes, every=25, seed=3):
    """A function that sets one of these limits now and then, as an owner. Of several ranks, the first reads it."""
    from pyvmem.engine import control

    rng = random.Random(seed)

    def each(engine):
        if engine.steps % every == 0:
            limit = rng.choice((control.NO_LIMIT, *sizes))
            engine.memory.page[control.LIMIT] = 1 if engine.rank else limit

    return each


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
