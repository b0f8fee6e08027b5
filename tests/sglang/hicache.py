"""SGLang's HiCache where no GPU is: all of it is SGLang's but for streams and copies, which are carried out late."""

import collections
import contextlib
import random

COUNTS = collections.Counter()  # rows that were copied, and how many of them had no memory
OPTIONS = dict(enable_hierarchical_cache=True, hicache_ratio=4.0, hicache_io_backend="direct",
               hicache_mem_layout="layer_first")  # fmt: skip


class Stream:
    """Copies in their order. Each is carried out when something waits for it, or at some question whether it has been.

    late: how likely it is that such a question is too early.
    """

    late, given_to = 0.8, None

    def __init__(self, *_, **__):
        self.copies, self.done, self.draw = collections.deque(), 0, random.Random(4)

    @property
    def given(self):
        return self.done + len(self.copies)

    def carry_out(self, until):
        while self.done < until:
            self.copies.popleft()()
            self.done += 1

    def synchronize(self):
        self.carry_out(self.given)

    def wait_event(self, event):
        event.synchronize()

    def wait_stream(self, stream):
        pass

    @classmethod
    @contextlib.contextmanager
    def of_copies(cls, stream):
        cls.given_to, before = stream, cls.given_to
        yield
        cls.given_to = before


class Event:
    """All copies of its stream that were given before."""

    def __init__(self, **_):
        self.stream, self.until = None, 0

    def record(self, *_):
        self.stream = Stream.given_to
        self.until = self.stream.given if self.stream is not None else 0

    def query(self):
        if self.stream is None or self.stream.done >= self.until:
            return True
        if self.stream.draw.random() >= self.stream.late:
            self.stream.carry_out(self.stream.done + 1)
        return self.stream.done >= self.until

    def synchronize(self):
        if self.stream is not None:
            self.stream.carry_out(self.until)

    def wait(self, *_):
        pass

    def elapsed_time(self, _):
        return 1.0


class Device:
    """In the place of torch.cuda."""

    __name__ = "cpu"
    Event, Stream = Event, Stream
    current_stream = Stream
    stream = staticmethod(Stream.of_copies)
    synchronize = staticmethod(lambda *_: None)


def _count(kind, pool, rows):
    COUNTS[kind] += len(rows)
    memory = getattr(pool, "_vmem", None)
    if memory is not None:
        backed = set(memory.blocks.backed().tolist())
        COUNTS["unbacked"] += sum(row // pool.page_size not in backed for row in rows.tolist())


def on_cpu():
    """Have HiCache work in this process."""
    import torch
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer, unified_radix_cache
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    for module in (cache_controller, l2_transfer, unified_radix_cache):
        if hasattr(module, "device_module"):
            module.device_module = Device()
    MHATokenToKVPoolHost.pin_memory = property(lambda _: False, lambda *_: None)
    # As in SGLang's process, where threads of a storage write there, too.
    MHATokenToKVPoolHost.init_kv_buffer = torch.inference_mode(False)(MHATokenToKVPoolHost.init_kv_buffer)

    def backup(host_pool, pool, host, rows, io_backend):
        def copy():
            _count("stored", pool, rows)
            for i in range(len(pool.k_buffer)):
                host_pool.k_buffer[i][host] = pool.k_buffer[i][rows]
                host_pool.v_buffer[i][host] = pool.v_buffer[i][rows]

        Stream.given_to.copies.append(copy)

    def load(host_pool, pool, host, rows, layer, io_backend, *, is_draft=False):
        def copy():
            _count("loaded", pool, rows)
            pool.k_buffer[layer][rows] = host_pool.k_buffer[layer][host]
            pool.v_buffer[layer][rows] = host_pool.v_buffer[layer][host]

        Stream.given_to.copies.append(copy)

    MHATokenToKVPoolHost.backup_from_device_all_layer = backup
    MHATokenToKVPoolHost.load_to_device_per_layer = load
