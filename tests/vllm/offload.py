"""vLLM's own offloading of blocks to host memory, where no GPU is: all of it is vLLM's but for the copies."""

import collections
import itertools
import random

import connect
import numpy as np
import torch
from steps import Engine, next_token

from pyvmem.engine import control
from pyvmem.vllm import connectors


_numbers = itertools.count()


class HostCopies:
    """In the place of vLLM's CPUOffloadingWorker: copies that are carried out some steps later, or when waited for.

    tensors: of each region that is copied, int8[blocks, bytes]. groups: the regions of each group of layers.
    before: called before a copy is carried out, with what `mark` said when it was given. late: how likely a copy is to
    be late for one more step.
    """

    late = 0.6

    def __init__(self, tensors, groups, chunks, mark=lambda: None, before=lambda marked: None):
        self.tensors, self.groups = tensors, groups
        self.host = [np.zeros((chunks, t.shape[1]), np.int8) for t in tensors]
        self.mark, self.before, self.random = mark, before, random.Random(5)
        self.pending, self.finished, self.counts = collections.OrderedDict(), [], collections.Counter()

    def submit_store(self, job_id, src_spec, dst_spec):
        self.pending[job_id] = (True, src_spec, dst_spec.block_ids, self.mark())
        return True

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        self.pending[job_id] = (False, dst_spec, src_spec.block_ids, self.mark())
        return True

    def get_finished(self):
        from vllm.v1.kv_offload.base import TransferResult

        while self.pending and self.random.random() > self.late:
            self._carry_out(next(iter(self.pending)))
        finished, self.finished = self.finished, []
        return [TransferResult(job_id=job, success=True) for job in finished]

    def wait(self, job_ids):
        for job in sorted(set(job_ids) & set(self.pending)):
            self._carry_out(job)

    def synchronize(self):
        self.wait(set(self.pending))

    def shutdown(self):
        self.pending.clear()

    def _carry_out(self, job):
        store, spec, chunks, marked = self.pending.pop(job)
        self.before(marked)
        self.finished.append(job)
        at = 0
        for group, n in zip(self.groups, spec.group_sizes):
            blocks, chunk = spec.block_ids[at : at + n], chunks[at : at + n]
            for i in group:
                if store:
                    self.host[i][chunk] = self.tensors[i][blocks]
                else:
                    self.tensors[i][blocks] = self.host[i][chunk]
            at += n
            self.counts["stored" if store else "loaded"] += n


def copy_on_the_host():
    """Have vLLM's offloading use `HostCopies` in this process, whose engine computes on CPUs. Returns those made."""
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    from pyvmem.vllm.worker import WorkerMemory

    made, synchronize = [], WorkerMemory._synchronize

    def get_worker(spec, caches):
        if not made:
            tensors = [t.tensor.view(-1, t.page_size_bytes).numpy() for t in caches.tensors]
            groups = [[ref.tensor_idx for ref in refs] for refs in caches.group_data_refs]
            made.append(HostCopies(tensors, groups, spec.num_chunks))
        return made[0]

    def synchronized(memory):  # as a device, whose copies end, too
        made[0].synchronize()
        synchronize(memory)

    CPUOffloadingSpec.get_worker, WorkerMemory._synchronize = get_worker, synchronized
    return made


class WorkerHalf:
    """The worker's half of a connector of vLLM's, called as by a model runner."""

    def __init__(self, connector):
        self.connector = connector

    def begin(self, scheduled):
        self.connector.bind_connector_metadata(scheduled.kv_connector_metadata)
        self.connector.handle_preemptions(scheduled.kv_connector_metadata)

    def end(self, scheduled):
        from vllm.v1.outputs import KVConnectorOutput

        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        _, received = self.connector.get_finished(scheduled.finished_req_ids)
        meta = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        return KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=meta)


class OffloadingEngine(Engine):
    """An `Engine` with vLLM's OffloadingConnector, which keeps `chunks` chunks of blocks in host memory."""

    Copies = HostCopies  # what has `late`

    def __init__(self, folder, chunks=60, kinds=("full", "window"), page=64 << 10,
                 prompts_alone=True, **options):  # fmt: skip
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

        size = chunks * page * len(kinds) * options.get("ranks", 1)
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both",
            kv_connector_extra_config=dict(cpu_bytes_to_use=size, offload_prompt_only=prompts_alone))  # fmt: skip
        super().__init__(folder, transfer=transfer, kinds=kinds, page=page, **options)
        for worker in self.workers:
            made = OffloadingConnector(self.scheduler.vllm_config, KVConnectorRole.WORKER, self.kv)
            blocks = worker.rows.reshape(len(worker.rows), -1).view(np.int8)
            chunks = made.connector_worker.spec.num_chunks
            copies = HostCopies([blocks], [[0] for _ in kinds], chunks, worker.gpu.mark, worker.gpu.wait)
            made.connector_worker.worker = copies
            worker.copies = WorkerHalf(made)
            worker.copies.copies = copies
        self.aggregator = KVOutputAggregator(len(self.workers))

    @property
    def counts(self):
        """{"stored", "loaded"}: blocks, in the worker that copied the fewest."""
        return min((worker.copies.copies.counts for worker in self.workers), key=lambda counts: counts["loaded"])

    def step(self):
        output, sampled = super().step()
        output.copied = [worker.copied for worker in self.workers]
        return output, sampled

    def answer_of(self, output, sampled):
        answers = [super(OffloadingEngine, self).answer_of(output, sampled) for _ in self.workers]
        for answer, copied in zip(answers, output.copied):
            answer.kv_connector_output = copied
        return self.aggregator.aggregate(answers)

    def requests(self, n):
        """Prompts that come again: more than the device keeps, and about as many as the host does."""
        draw = self.random.randrange
        known = [[draw(3, 900) for _ in range(draw(60, 180))] for _ in range(12)]
        return [self.request(f"o{next(_numbers)}", self.random.choice(known) + [draw(3, 900) for _ in range(draw(30))],
                              draw(1, 40)) for _ in range(n)]  # fmt: skip

    def turn(self, flight):
        flight.append(self.step())
        while len(flight) >= self.queue or (flight and not flight[-1][0].total_num_scheduled_tokens):
            self.update(*flight.popleft())
        assert self.steps < 8000, "requests wait for ever"

    def settle(self):
        """vLLM's last steps, until no copy is left."""
        flight = collections.deque()
        for _ in range(3):
            self.turn(flight)
        while self.scheduler.has_requests():
            self.turn(flight)
        for worker in self.workers:
            worker.finish()
        self.flush()


class SeveralEngine(OffloadingEngine):
    """An `Engine` with vLLM's connectors of these names, each of which keeps `chunks` blocks in host memory."""

    def __init__(self, folder, names, chunks=60, page=64 << 10, **options):
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

        each = [connect.chosen(name, cpu_bytes_to_use=chunks * page) for name in names]
        transfer = KVTransferConfig(**(connect.multi(*each) if len(each) > 1 else each[0]))
        Engine.__init__(self, folder, transfer=transfer, kinds=("full",), page=page, **options)
        (worker,) = self.workers

        def backed():  # of a copy, which follows the steps before it
            worker.finish()
            return set(worker.memory.blocks.backed().tolist())

        connect.simple_on_cpu(backed)
        connect.COUNTS.clear()
        config, role = self.scheduler.vllm_config, KVConnectorRole.WORKER
        made = KVConnectorFactory.create_connector(config, role, self.kv)
        worker.copies = WorkerHalf(made)
        worker.copies.copies = HostCopies([worker.rows.reshape(len(worker.rows), -1).view(np.int8)], [[0]], chunks,
                                          worker.gpu.mark, worker.gpu.wait)  # fmt: skip
        for connector in connectors.flat(made):
            if type(connector).__name__ == connectors.OFFLOADING:
                connector.connector_worker.worker = worker.copies.copies
            else:
                connector.register_kv_caches({"layer0": torch.from_numpy(worker.rows)})
        self.aggregator = KVOutputAggregator(1)

    @property
    def counts(self):
        """{"stored", "loaded", "unbacked"}: blocks."""
        return connect.COUNTS + self.workers[0].copies.copies.counts


class Fuzz:
    """Random requests, limits, lends, aborts, resets and sleeps of one engine, whose copies take random times.

    Running requests are preempted by a reset only before a sleep: elsewhere vLLM 0.32 itself fails an assertion, if it
    then loads the prefix of one of them.
    """

    CHANCES = dict(ask=0.25, limit=0.08, lend=0.03, abort=0.05, reset=0.03, sleep=0.01, copies=0.1)

    def __init__(self, e, seed):
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import RequestStatus

        self.e, self.draw, self.requests, self.flight = e, random.Random(seed), [], collections.deque()
        self.aborted, self.pause, self.did = RequestStatus.FINISHED_ABORTED, PauseState, collections.Counter()

    def run(self, steps):
        e = self.e
        for _ in range(steps):
            for what, chance in self.CHANCES.items():
                if self.draw.random() < chance:
                    getattr(self, what)()
                    self.did[what] += 1
            if self.draw.random() < 0.1:
                e.page[control.LEND] = 0
            e.turn(self.flight)
            if self.draw.random() < 0.5:
                e.flush()
        e.page[control.LEND] = 0
        self.turn_while(lambda: e.scheduler.has_unfinished_requests() or self.flight)
        e.settle()
        for request in self.requests:
            tokens = list(request.prompt_token_ids)
            for token in request.output_token_ids:
                assert token == next_token(tokens)
                tokens.append(token)
            self.did["answered"] += request.num_output_tokens == request.max_tokens

    def turn_while(self, what):
        """Take steps, in a number that is enough, while the limit moves."""
        most = self.e.steps + 3000
        while what():
            self.e.turn(self.flight)
            self.e.flush()
            if self.draw.random() < 0.1:
                self.limit()
            assert self.e.steps < most, [(r.request_id, r.status.name) for r in self.requests if not r.is_finished()]

    def ask(self):
        if len(self.e.scheduler.requests) <= 10:
            self.requests += self.e.requests(1)
            self.e.scheduler.add_request(self.requests[-1])

    def limit(self):
        self.e.limit(self.draw.choice([self.e.budget.least, 30, 60, 110, 400]))

    def lend(self):
        self.e.page[control.LEND] = 1

    def abort(self):
        if live := [request for request in self.requests if not request.is_finished()]:
            self.e.scheduler.finish_requests([self.draw.choice(live).request_id], self.aborted)

    def reset(self):
        self.e.scheduler.reset_prefix_cache()

    def sleep(self):
        e, scheduler = self.e, self.e.scheduler
        e.page[control.LEND] = 0
        scheduler.set_pause_state(self.pause.PAUSED_ALL)
        self.turn_while(lambda: scheduler.has_requests() or self.flight)
        assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        level = self.draw.choice([1, 2])
        for worker in e.workers:
            worker.memory.sleep(level)
        assert e.resident()[0] <= 1
        assert all([worker.memory.wake() for worker in e.workers])
        scheduler.set_pause_state(self.pause.UNPAUSED)

    def copies(self):
        connect.Late.late = self.e.Copies.late = self.draw.choice([0.0, 0.5, 0.9, 0.98])
