"""Random calls against a shadow that knows every byte.

SPDX-License-Identifier: MIT
"""

import errno
import functools

import hypothesis.strategies as st
import numpy as np
import paper
import pytest
from conftest import BACKENDS
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pyvmem
from pyvmem.core import MAP_OP

KIB, MIB = 1 << 10, 1 << 20
UNIT = 64 * KIB
RANGE_UNITS = 4 * MIB // UNIT


class Page:
    """The shadow's record of a physical page: its bytes, and where it is mapped."""

    def __init__(self, handle, size, bound=False):
        self.handle = handle
        self.size = size
        self.bound = bound  # made by commit: goes when it is mapped nowhere any more
        self.data = None  # not known before it is first written: memory is zero only if asked for
        self.places = set()  # (range, first unit)


class Range:
    """The shadow's record of a reservation: for each 64 KiB, the page there and which part of it, or None."""

    def __init__(self, reservation, backdrop):
        self.reservation = reservation
        self.addr = reservation.addr
        self.backdrop = backdrop
        self.units = [None] * (reservation.length // UNIT)


def cut_before(what):
    """True if a range that starts with this unit cuts a page."""
    return bool(what) and what[1] != 0


def cut_after(what):
    """True if a range that ends with this unit cuts a page."""
    return bool(what) and what[1] != what[0].size // UNIT - 1


class Memory(RuleBasedStateMachine):
    """Rules pick from what exists by number, so that every drawn value means something."""

    backend = None

    def __init__(self):
        super().__init__()
        self.context = pyvmem.Context(self.backend)
        self.sizes = self.context.page_sizes
        self.can_backdrop = "backdrop" in self.context.capabilities
        self.ranges, self.pages, self.stale = [], [], []
        self.objects = []  # (Pages, [Page])
        self.closed = []  # Reservations and Pages
        self.other = pyvmem.Context(self.backend)  # with pages whose numbers may be those of ours
        self.others = [self.other.create(size, 4) for size in self.sizes]

    def teardown(self):
        self.check_every_byte()
        for r in list(self.ranges):
            r.reservation.close()
            self.clear(r, 0, len(r.units))
        self.settle()
        for pages, _ in self.objects:
            self.context.release([h for h in pages.handles if int(h) in {p.handle for p in self.pages}])
            pages.close()
        mine = {p.handle for p in self.pages} - {int(h) for pages, _ in self.objects for h in pages.handles}
        if mine:
            self.context.release(sorted(mine))
        stats = self.context.stats()
        self.context.close()
        assert self.other.stats().created == sum(4 * size for size in self.sizes)
        self.other.close()
        assert (stats.reserved, stats.created, stats.mapped) == (0, 0, 0)

    # ---- the shadow's view of a call -------------------------------------------------------------------------

    def verdict(self, target, unit, page, replace, taken):
        """The errnos with which mapping page at unit of the range may fail; empty if it must not. taken: units of the
        same batch."""
        units = range(unit, unit + page.size // UNIT)
        if units.stop > len(target.units) or (unit * UNIT) % page.size:
            return {errno.EINVAL}
        faults = {errno.EINVAL} if any((target, u) in taken for u in units) else set()
        if any(target.units[u] for u in units):
            first, last = target.units[units[0]], target.units[units[-1]]
            if not replace:
                faults.add(errno.EEXIST)
            elif cut_before(first) or cut_after(last):
                faults.add(errno.EINVAL)
        return faults

    def set_page(self, target, unit, page):
        self.clear(target, unit, page.size // UNIT)
        for i in range(page.size // UNIT):
            target.units[unit + i] = (page, i)
        page.places.add((target, unit))

    def clear(self, target, unit, count):
        for u in range(unit, unit + count):
            if target.units[u]:
                page, part = target.units[u]
                page.places.discard((target, u - part))
                target.units[u] = None

    def settle(self):
        """Forget the pages that went because nothing maps them any more: after a call, not in the middle of a batch."""
        for page in [p for p in self.pages if p.bound and not p.places]:
            self.forget(page)

    def define(self, page):
        """Give a page known contents, through the first address it is mapped at."""
        if page.data is None and page.places:
            target, unit = min(page.places, key=lambda place: (place[0].addr, place[1]))
            value = (page.handle * 37 + 11) % 251 + 1
            page.data = np.full(page.size, value, np.uint8)
            self.context.fill(target.addr + unit * UNIT, value, page.size)

    def attempt(self, faults, call):
        """Make a call that must fail with one of these errnos, or succeed if there is none; returns whether it did."""
        if not faults:
            call()
            return True
        before = self.context.stats()
        with pytest.raises(pyvmem.VmemError) as caught:
            call()
        assert caught.value.errno in faults, (faults, caught.value)
        after = self.context.stats()
        assert (after.reserved, after.created, after.mapped) == (before.reserved, before.created, before.mapped)
        return False

    # ---- rules -----------------------------------------------------------------------------------------------

    @initialize(zero=st.booleans())
    def begin(self, zero):
        self.reserve(RANGE_UNITS, True)
        self.reserve(RANGE_UNITS // 2, False)
        for size in range(len(self.sizes)):
            self.create(size, 2, zero)
        self.create_object(0, 3)
        self.map_object(0, 0, 8, 1, False)

    @precondition(lambda self: len(self.ranges) < 5)
    @rule(units=st.integers(1, RANGE_UNITS), backdrop=st.booleans())
    def reserve(self, units, backdrop):
        backdrop = backdrop and self.can_backdrop
        self.ranges.append(Range(self.context.reserve(units * UNIT, backdrop=backdrop), backdrop))

    @precondition(lambda self: len(self.pages) < 24)
    @rule(size=st.integers(0, 3), n=st.integers(1, 6), zero=st.booleans())
    def create(self, size, n, zero):
        size = self.sizes[size % len(self.sizes)]
        for handle in paper.vMemCreate(self.context, size, n, zero=zero):
            page = Page(int(handle), size)
            assert page.handle not in self.stale
            if zero:
                page.data = np.zeros(size, np.uint8)
            self.pages.append(page)

    @precondition(lambda self: self.ranges and self.pages)
    @rule(
        picks=st.lists(
            st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, RANGE_UNITS), st.integers(0, 9)),
            min_size=1,
            max_size=4,
        ),
        replace=st.booleans(),
        fine=st.booleans(),
    )
    def map(self, picks, replace, fine):
        ops, places, faults, taken = np.empty(len(picks), MAP_OP), [], set(), set()
        for i, (r, p, unit, astray) in enumerate(picks):
            target, page = self.ranges[r % len(self.ranges)], self.pages[p % len(self.pages)]
            unit %= len(target.units)
            if astray < 9:  # an arbitrary unit is wrong for most large pages
                unit -= unit % (page.size // UNIT)
            ops[i] = (target.addr + unit * UNIT, page.handle)
            if not faults:
                faults = self.verdict(target, unit, page, replace, taken)
                at_fault = i
            taken |= {(target, u) for u in range(unit, unit + page.size // UNIT)}
            places.append((target, unit, page))
        if self.attempt(faults, lambda: self.context.map(ops["addr"], ops["page"], replace=replace, fine=fine)):
            for target, unit, page in places:
                self.set_page(target, unit, page)
            self.settle()
            for _, _, page in places:
                self.define(page)
        else:
            with pytest.raises(pyvmem.VmemError) as caught:
                self.context.map(ops["addr"], ops["page"], replace=replace, fine=fine)
            assert caught.value.index == at_fault

    @precondition(lambda self: len(self.pages) < 24)
    @rule(size=st.integers(0, 3), n=st.integers(1, 4))
    def create_object(self, size, n):
        size = self.sizes[size % len(self.sizes)]
        pages = self.context.create(size, n)
        self.objects.append((pages, [Page(int(handle), size) for handle in pages.handles]))
        self.pages += self.objects[-1][1]

    @precondition(lambda self: self.ranges and self.objects)
    @rule(
        r=st.integers(0, 99),
        o=st.integers(0, 99),
        unit=st.integers(0, RANGE_UNITS + 8),
        apart=st.integers(0, 3),
        replace=st.booleans(),
    )
    def map_object(self, r, o, unit, apart, replace):
        """Through the reservation, by offset: one after another, or by an array of offsets; past its end too."""
        target, (pages, members) = self.ranges[r % len(self.ranges)], self.objects[o % len(self.objects)]
        step = pages.page_size // UNIT
        unit -= unit % step
        units = [unit + i * (step + apart * step) for i in range(len(members))]
        offset = unit * UNIT if apart == 0 else np.array(units).reshape(1, -1) * UNIT
        faults, taken = set(), set()
        if any(u + step > len(target.units) for u in units):
            with pytest.raises(pyvmem.InvalidArgument, match="within the reservation's"):
                target.reservation.map(pages, offset, replace=replace)
            return
        if any(p not in self.pages for p in members):
            faults = {errno.EINVAL}
        for u, page in zip(units, members):
            if not faults:
                faults = self.verdict(target, u, page, replace, taken)
            taken |= {(target, u + i) for i in range(step)}
        if self.attempt(faults, lambda: target.reservation.map(pages, offset, replace=replace)):
            for u, page in zip(units, members):
                self.set_page(target, u, page)
            self.settle()
            for page in members:
                self.define(page)

    @precondition(lambda self: self.objects)
    @rule(o=st.integers(0, 99))
    def close_object(self, o):
        pages, members = self.objects.pop(o % len(self.objects))
        pages.close()
        self.closed.append(pages)
        for page in members:
            if page in self.pages:
                self.forget(page)

    @precondition(lambda self: self.closed)
    @rule(c=st.integers(0, 99), r=st.integers(0, 99), unit=st.integers(0, RANGE_UNITS))
    def use_closed(self, c, r, unit):
        """A closed object does nothing to another one in its place."""
        thing = self.closed[c % len(self.closed)]
        if isinstance(thing, pyvmem.core.Pages):
            calls = [lambda: self.context.release(thing), lambda: self.context.map(0, thing)]
            calls += [lambda: r.reservation.map(thing) for r in self.ranges]
        else:
            offset = unit * UNIT % thing.length
            calls = [lambda: thing.unmap(offset), lambda: thing.commit(offset), lambda: thing.decommit(offset)]
            calls += [lambda: thing.map(pages) for pages, _ in self.objects]
            assert thing.resident_bytes == 0
        for call in calls:
            with pytest.raises(ValueError, match="closed"):
                call()
        thing.close()

    @precondition(lambda self: self.ranges)
    @rule(r=st.integers(0, 99), o=st.integers(0, 99), unit=st.integers(0, RANGE_UNITS), replace=st.booleans())
    def use_pages_of_another_context(self, r, o, unit, replace):
        target, pages = self.ranges[r % len(self.ranges)], self.others[o % len(self.others)]
        addr = target.addr + unit % len(target.units) * UNIT
        for theirs in (pages, pages.handles, int(pages.handles[o % 4])):
            self.attempt({errno.EINVAL}, lambda: self.context.map(addr, theirs, replace=replace))
            self.attempt({errno.EINVAL}, lambda: self.context.release(theirs))
        self.attempt({errno.EINVAL}, lambda: target.reservation.map(pages, replace=replace))

    @precondition(lambda self: self.ranges)
    @rule(r=st.integers(0, 99), unit=st.integers(0, RANGE_UNITS + 2), more=st.integers(1, 40))
    def past_the_end(self, r, unit, more):
        target = self.ranges[r % len(self.ranges)]
        offset, length = unit * UNIT, (max(len(target.units) - unit, 0) + more) * UNIT
        range_ = target.reservation
        calls = [range_.unmap, range_.commit, range_.decommit, range_.backdrop, range_.backed]
        calls.append(lambda offset, length: range_.unmap([0, offset], [UNIT, length]))
        for call in calls:
            with pytest.raises(pyvmem.InvalidArgument, match="within the reservation's"):
                call(offset, length)

    @precondition(lambda self: self.ranges and self.stale)
    @rule(r=st.integers(0, 99), p=st.integers(0, 999))
    def map_stale(self, r, p):
        target, handle = self.ranges[r % len(self.ranges)], self.stale[p % len(self.stale)]
        self.attempt({errno.EINVAL}, lambda: self.context.map(target.addr, handle))
        self.attempt({errno.EINVAL}, lambda: self.context.release(handle))

    @precondition(lambda self: self.ranges)
    @rule(
        r=st.integers(0, 99),
        unit=st.integers(0, RANGE_UNITS),
        count=st.integers(1, RANGE_UNITS),
        how=st.sampled_from(["decommit", "offset", "offsets", "address"]),
        whole=st.booleans(),
    )
    def unmap(self, r, unit, count, how, whole):
        """By address or through the reservation, where decommit is the same: what commit put there goes."""
        target = self.ranges[r % len(self.ranges)]
        unit %= len(target.units)
        count = min(count, len(target.units) - unit)
        if whole:  # which cuts no page
            unit, count = 0, len(target.units)
        cut = cut_before(target.units[unit]) or cut_after(target.units[unit + count - 1])
        faults = {errno.EINVAL} if cut else set()
        call = {
            "address": lambda: self.context.unmap(target.addr + unit * UNIT, count * UNIT),
            "offset": lambda: target.reservation.unmap(unit * UNIT, count * UNIT),
            "offsets": lambda: target.reservation.unmap([unit * UNIT], [count * UNIT]),
            "decommit": lambda: target.reservation.decommit(unit * UNIT, count * UNIT),
        }[how]
        backed = sum(map(bool, target.units[unit : unit + count])) * UNIT
        said = []
        if self.attempt(faults, lambda: said.append(call())):
            assert how != "decommit" or said == [backed]
            self.clear(target, unit, count)
            self.settle()

    @precondition(lambda self: self.pages)
    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=5))
    def release(self, picks):
        gone = [self.pages[p % len(self.pages)] for p in picks]
        faults = {errno.EINVAL} if len(set(gone)) < len(gone) else set()
        if self.attempt(faults, lambda: self.context.release([p.handle for p in gone])):
            for page in gone:
                self.forget(page)

    def forget(self, page):
        for target, unit in list(page.places):
            self.clear(target, unit, page.size // UNIT)
        self.pages.remove(page)
        self.stale.append(page.handle)

    @precondition(lambda self: self.ranges)
    @rule(r=st.integers(0, 99), by_address=st.booleans())
    def free(self, r, by_address):
        target = self.ranges[r % len(self.ranges)]
        mapped = any(target.units)
        if by_address:  # the bare call refuses while something is mapped
            if mapped:
                self.attempt({errno.EBUSY}, lambda: paper.vMemFree(self.context, target.addr))
            return
        target.reservation.close()
        self.clear(target, 0, len(target.units))
        self.ranges.remove(target)
        self.closed.append(target.reservation)
        self.settle()

    @precondition(lambda self: self.ranges and len(self.pages) < 40)
    @rule(
        r=st.integers(0, 99),
        size=st.integers(0, 3),
        first=st.integers(0, 99),
        count=st.integers(1, 8),
        by_offset=st.booleans(),
    )
    def commit(self, r, size, first, count, by_offset):
        target, size = self.ranges[r % len(self.ranges)], self.sizes[size % len(self.sizes)]
        step = size // UNIT
        whole = len(target.units) // step
        if not whole:
            return
        first %= whole
        count = min(count, whole - first)
        slots = [(first + i) * step for i in range(count)]
        # A unit that a smaller page has in part, at its start or later, cannot be backed by a page of this size.
        clash = any(any(target.units[u + i] and target.units[u + i][0].size < size for i in range(step)) for u in slots)
        holes = [u for u in slots if not target.units[u]]
        faults = {errno.EEXIST} if clash else set()
        addr, length = target.addr + slots[0] * UNIT, count * size
        said = []
        if by_offset:
            call = functools.partial(target.reservation.commit, addr - target.addr, length, size)
        else:
            call = functools.partial(self.context.commit, addr, length, size)
        if self.attempt(faults, lambda: said.append(call())):
            assert said == [len(holes) * size]
            for u in holes:
                page = Page(self.context.query(target.addr + u * UNIT)[0], size, bound=True)
                assert page.handle not in {p.handle for p in self.pages}
                self.pages.append(page)
                self.set_page(target, u, page)
                self.define(page)

    @precondition(lambda self: self.ranges)
    @rule(r=st.integers(0, 99), unit=st.integers(0, RANGE_UNITS), count=st.integers(1, 16))
    def decommit(self, r, unit, count):
        target = self.ranges[r % len(self.ranges)]
        unit %= len(target.units)
        count = min(count, len(target.units) - unit)
        cut = cut_before(target.units[unit]) or cut_after(target.units[unit + count - 1])
        gone = {target.units[u][0] for u in range(unit, unit + count) if target.units[u] and target.units[u][1] == 0}
        faults = {errno.EINVAL} if cut else set()
        if self.attempt(faults, lambda: self.context.decommit(target.addr + unit * UNIT, count * UNIT)):
            for page in gone:
                self.forget(page)

    @precondition(lambda self: any(p.places for p in self.pages))
    @rule(p=st.integers(0, 99), place=st.integers(0, 99), at=st.integers(0, 2 * MIB), data=st.binary(min_size=1))
    def write(self, p, place, at, data):
        mapped = [page for page in self.pages if page.places]
        page = mapped[p % len(mapped)]
        places = sorted(page.places, key=lambda place: (place[0].addr, place[1]))
        target, unit = places[place % len(places)]
        at %= page.size
        data = data[: page.size - at]
        self.context.write(target.addr + unit * UNIT + at, data)
        page.data[at : at + len(data)] = np.frombuffer(data, np.uint8)

    # ---- checks ----------------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self):
        stats = self.context.stats()
        assert stats.reserved == sum(len(r.units) * UNIT for r in self.ranges)
        assert stats.created == sum(p.size for p in self.pages)
        assert stats.mapped == sum(p.size * len(p.places) for p in self.pages)
        for r in self.ranges:
            assert r.reservation.resident_bytes == sum(map(bool, r.units)) * UNIT

    @precondition(lambda self: self.ranges)
    @rule()
    def check_every_byte(self):
        for target in self.ranges:
            backed = {u for first, n in target.reservation.backed() for u in range(first // UNIT, (first + n) // UNIT)}
            assert backed == {u for u, what in enumerate(target.units) if what}
            for unit, what in enumerate(target.units):
                addr = target.addr + unit * UNIT
                if what is None:
                    assert self.context.query(addr) == (0, 0)
                    if target.backdrop:
                        assert self.context.read(addr, UNIT) == bytes(UNIT)
                    else:
                        self.attempt({errno.EFAULT}, lambda: self.context.read(addr, 1))
                else:
                    page, part = what
                    assert self.context.query(addr) == (page.handle, part * UNIT)
                    assert self.context.read(addr, UNIT) == page.data[part * UNIT : (part + 1) * UNIT].tobytes()
        for page in self.pages:
            info = self.context.page_info(page.handle)
            assert (info.page_size, info.mappings) == (page.size, len(page.places))


for _name in BACKENDS:
    _machine = type(f"Memory_{_name}", (Memory,), {"backend": _name})
    _case = _machine.TestCase
    _more = 3 if _name == "host" else 1  # there a step costs least
    _case.settings = settings(stateful_step_count=40, max_examples=_more * settings.default.max_examples)
    globals()[f"Test_{_name}"] = _case
del _machine, _case
