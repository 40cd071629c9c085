"""Random walks of calls, compared after each with a model that is a plain dictionary of pages.

The model keeps one record per cached page, under the namespace and all tokens up to the end of the page. It has no
nodes, no splits, no lock counts and no heap: what it says is what the tree must do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache import Cleared, Lease, LeaseClosed, OutOfPages, PagePool, PinLimit, PrefixCache, Removed, Resync, Stored

NUM_PAGES = 14
MAX_PINNED = 5
NAMESPACES = ["", "a"]
OWNERS = [None, "ann", "bob"]
Path = tuple[str, tuple[int, ...]]


@dataclass
class Record:
    page: int
    stamp: int
    owner: str | None


@dataclass
class Running:
    lease: Lease
    namespace: str
    owner: str | None
    tokens: list[int]
    known: int
    committed: int
    cached: int
    table: list[int]
    counts: bool
    asked: int
    cold: bool = False


@dataclass
class Pinned:
    namespace: str
    ends: list[tuple[int, ...]]
    expires: int


@dataclass
class Watched:
    """The pool's free(), guarded: no open lease may name a page that goes back."""

    running: list[Running] = field(default_factory=list)

    def guard(self, pool: PagePool) -> PagePool:
        free = pool.free

        def watched_free(pages: object) -> None:
            going = {int(page) for page in pages}
            for run in self.running:
                try:
                    named = run.lease.pages.tolist()
                except LeaseClosed:
                    continue
                assert not going & set(named), "a page was freed while a table named it"
            free(pages)

        pool.free = watched_free
        return pool


class CacheWalk(RuleBasedStateMachine):
    page_size: int

    @initialize(page_size=st.sampled_from([1, 2, 4]), alphabet=st.sampled_from([2, 3]))
    def start(self, page_size: int, alphabet: int) -> None:
        self.page_size, self.alphabet = page_size, alphabet
        self.running: list[Running] = []
        self.pool = Watched(self.running).guard(PagePool(NUM_PAGES, page_size))
        self.now, self.pins = 0, dict[str, Pinned]()
        self.cache = PrefixCache(self.pool, clock=lambda: self.now, max_pinned_pages=MAX_PINNED)
        self.records: dict[Path, Record] = {}
        self.warm = self.cold = 0
        self.seen: list[list[int]] = [[]]
        self.mirror: dict[int, tuple[str, int | None, tuple[int, ...]]] = {}
        self.counted = {"lookups": 0, "query_tokens": 0, "hit_tokens": 0, "duplicate_pages": 0, "evicted_pages": 0}

    # The model.

    def aligned(self, length: int) -> int:
        return length - length % self.page_size

    def match(self, namespace: str, tokens: list[int], limit: int) -> int:
        length = 0
        while (
            length + self.page_size <= limit and (namespace, tuple(tokens[: length + self.page_size])) in self.records
        ):
            length += self.page_size
        return length

    def ends(self, tokens: list[int], start: int, end: int) -> list[tuple[int, ...]]:
        return [tuple(tokens[:stop]) for stop in range(start + self.page_size, end + 1, self.page_size)]

    def held(self) -> set[Path]:
        leased = {(run.namespace, end) for run in self.running for end in self.ends(run.tokens, 0, run.committed)}
        return leased | self.pinned()

    def pinned(self, besides: str | None = None) -> set[Path]:
        return {(pin.namespace, end) for owner, pin in self.pins.items() if owner != besides for end in pin.ends}

    def end_old_pins(self) -> None:
        self.pins = {owner: pin for owner, pin in self.pins.items() if pin.expires > self.now}

    def candidates(self) -> list[Path]:
        inner = {(namespace, end[: -self.page_size]) for namespace, end in self.records}
        outer = self.held() | inner
        return [path for path in self.records if path not in outer]

    def model_evict(self, n_pages: int) -> list[int]:
        freed = []
        while len(freed) < n_pages and (leaves := self.candidates()):
            victim = min(leaves, key=lambda path: self.records[path].stamp)
            freed.append(self.records.pop(victim).page)
        self.counted["evicted_pages"] += len(freed)
        return freed

    def model_free(self) -> int:
        return NUM_PAGES - len(self.records) - self.model_private()

    def model_private(self) -> int:
        return sum(len(run.table) - run.committed // self.page_size for run in self.running)

    def use(self, namespace: str, ends: list[tuple[int, ...]], owner: str | None, stamp: int | None) -> None:
        for end in ends:
            record = self.records[namespace, end]
            record.stamp = record.stamp if stamp is None else stamp
            record.owner = record.owner if record.owner == owner else None

    # The calls.

    def draw_tokens(self, data: st.DataObject) -> list[int]:
        base = data.draw(st.sampled_from(self.seen))
        base = base[: data.draw(st.integers(0, len(base)))]
        token = st.integers(0, self.alphabet - 1)
        shortest = data.draw(st.sampled_from([0, 1, 2 * self.page_size]))
        tail = data.draw(st.lists(token, min_size=shortest, max_size=3 * self.page_size + 1))
        self.seen = [*self.seen[-5:], base + tail]
        return base + tail

    def pick(self, data: st.DataObject) -> Running:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    def draw_limit(self, data: st.DataObject, tokens: list[int]) -> int | None:
        whole = data.draw(st.sampled_from([True, True, False]))
        return None if whole else data.draw(st.integers(0, len(tokens) + 1))

    @precondition(lambda self: len(self.running) < 4)
    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), owner=st.sampled_from(OWNERS), ends=st.booleans())
    def serve(self, data: st.DataObject, namespace: str, owner: str | None, ends: bool) -> None:
        """A whole request at once, which fills the tree faster than single calls do."""
        tokens = self.draw_tokens(data)
        run = self.begin(tokens, self.draw_limit(data, tokens), namespace, owner, True)
        if self.take(run, len(tokens), data.draw(st.integers(0, 5)) > 0):
            self.store(run, len(tokens))
        if ends:
            run.lease.release()
            self.running.remove(run)

    @precondition(lambda self: len(self.running) < 4)
    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), owner=st.sampled_from(OWNERS), record=st.booleans())
    def acquire(self, data: st.DataObject, namespace: str, owner: str | None, record: bool) -> None:
        tokens = self.draw_tokens(data)
        self.begin(tokens, self.draw_limit(data, tokens), namespace, owner, record)

    @precondition(lambda self: 0 < len(self.running) < 4)
    @rule(data=st.data(), owner=st.sampled_from(OWNERS), longer=st.booleans())
    def acquire_the_same(self, data: st.DataObject, owner: str | None, longer: bool) -> None:
        """Two that run at once and compute the same."""
        run = self.pick(data)
        tokens = run.tokens + [0] * (self.page_size if longer else 0)
        self.take(self.begin(tokens, self.draw_limit(data, tokens), run.namespace, owner, True), len(tokens), True)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), steps=st.integers(1, 4), may_evict=st.sampled_from([True, True, False]))
    def decode(self, data: st.DataObject, steps: int, may_evict: bool) -> None:
        """Token after token, each reserved and committed: what one lease does for most of its life."""
        run = self.pick(data)
        del run.tokens[run.known :]
        for _ in range(steps):
            run.tokens.append(data.draw(st.integers(0, self.alphabet - 1)))
            if not self.take(run, len(run.tokens), may_evict):
                break
            self.store(run, len(run.tokens))

    def begin(self, tokens: list[int], limit: int | None, namespace: str, owner: str | None, record: bool) -> Running:
        found = self.match(namespace, tokens, len(tokens) if limit is None else min(limit, len(tokens)))
        lease = self.cache.acquire(tokens, namespace=namespace, limit=limit, owner=owner, record=record)
        assert lease.cached_tokens == found
        self.warm += 1
        ends = self.ends(tokens, 0, found)
        self.use(namespace, ends, owner, self.warm)
        table = [self.records[namespace, end].page for end in ends]
        run = Running(lease, namespace, owner, tokens, found, found, found, table, record, len(tokens))
        self.running.append(run)
        return run

    @precondition(lambda self: self.running)
    @rule(data=st.data(), may_evict=st.sampled_from([True, True, True, False]), extra=st.integers(0, 3))
    def reserve(self, data: st.DataObject, may_evict: bool, extra: int) -> None:
        run = self.pick(data)
        self.take(run, data.draw(st.integers(0, len(run.tokens) + extra)), may_evict)

    def take(self, run: Running, wanted: int, may_evict: bool) -> bool:
        missing = max(0, -(-wanted // self.page_size) - len(run.table))
        if missing > self.model_free():
            self.end_old_pins()
        evictable = len(self.records) - len(self.held())
        if missing > self.model_free() + (evictable if may_evict else 0):
            with pytest.raises(OutOfPages) as refusal:
                run.lease.reserve(wanted, may_evict=may_evict)
            assert (refusal.value.needed, refusal.value.free) == (missing, self.model_free())
            assert refusal.value.evictable == evictable
            return False
        self.model_evict(missing - self.model_free())
        run.lease.reserve(wanted, may_evict=may_evict)
        run.table += run.lease.pages.tolist()[len(run.table) :]
        assert len(run.table) * self.page_size >= wanted
        run.cold = not may_evict
        if run.counts:
            run.counts = False
            self.counted["lookups"] += 1
            self.counted["query_tokens"] += run.asked
            self.counted["hit_tokens"] += run.cached
        return True

    @precondition(lambda self: self.running)
    @rule(data=st.data(), everything=st.booleans())
    def commit(self, data: st.DataObject, everything: bool) -> None:
        run = self.pick(data)
        room = len(run.table) * self.page_size
        while len(run.tokens) < room:
            run.tokens.append(data.draw(st.integers(0, self.alphabet - 1)))
        self.store(run, room if everything else data.draw(st.integers(run.known, room)))

    def store(self, run: Running, known: int) -> None:
        self.seen = [*self.seen[-5:], run.tokens[:known]]
        run.lease.commit(run.tokens[:known])
        end = self.aligned(known)
        if end > run.committed:
            self.store_pages(run, end)
        run.known = known

    def store_pages(self, run: Running, end: int) -> None:
        fresh = self.ends(run.tokens, run.committed, end)
        if run.cold:
            self.cold -= 1
        for number, path in enumerate(fresh, run.committed // self.page_size):
            record = self.records.get((run.namespace, path))
            if record is None:
                self.records[run.namespace, path] = Record(run.table[number], self.cold, run.owner)
            else:
                run.table[number] = record.page
                self.counted["duplicate_pages"] += 1
        self.use(run.namespace, fresh, run.owner, None)
        if not run.cold:
            self.warm += 1
            self.use(run.namespace, self.ends(run.tokens, 0, end), run.owner, self.warm)
        run.committed = end

    @precondition(lambda self: self.running and len(self.running) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        run = self.pick(data)
        full, tail = run.committed // self.page_size, run.known - run.committed
        if tail and self.model_free() == 0:
            self.end_old_pins()
        if tail and self.model_free() == 0 and len(self.records) == len(self.held()):
            with pytest.raises(OutOfPages):
                run.lease.fork()
            return
        if tail and self.model_free() == 0:
            self.model_evict(1)
        fork = run.lease.fork()
        table = fork.pages.tolist()
        assert table[:full] == run.table[:full]
        assert fork.tail_copy == ((run.table[full], table[full], tail) if tail else None)
        assert len(table) == full + bool(tail)
        self.running.append(
            Running(fork, run.namespace, run.owner, run.tokens[: run.known], run.known, run.committed, run.committed,
                    table, False, 0, run.cold)
        )  # fmt: skip

    @precondition(lambda self: self.running)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data: st.DataObject, again: bool) -> None:
        run = self.pick(data)
        run.lease.release()
        if again:
            run.lease.release()
        self.running.remove(run)

    @rule(n_pages=st.integers(0, 5))
    def evict(self, n_pages: int) -> None:
        self.end_old_pins()
        evictable = len(self.records) - len(self.held())
        expected = self.model_evict(n_pages)
        assert self.cache.evict(n_pages) == expected
        assert len(expected) == min(n_pages, evictable)

    @rule(owner=st.sampled_from(OWNERS[1:]))
    def close(self, owner: str) -> None:
        expected = []
        self.pins.pop(owner, None)
        while mine := [path for path in self.candidates() if self.records[path].owner == owner]:
            expected += [self.records.pop(path).page for path in mine]
        assert sorted(self.cache.close(owner)) == sorted(expected)

    @rule(often=st.integers(0, 7))
    def reset(self, often: int) -> None:
        if self.running:
            assert self.cache.reset() is False
        elif often == 7:
            assert self.cache.reset() is True
            self.records.clear()
            self.pins.clear()

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), owner=st.sampled_from(OWNERS[1:]))
    def pin(self, data: st.DataObject, namespace: str, owner: str) -> None:
        tokens, seconds = self.draw_tokens(data), data.draw(st.integers(1, 4))
        ends = self.ends(tokens, 0, self.match(namespace, tokens, len(tokens)))
        self.end_old_pins()
        if len(self.pinned(besides=owner) | {(namespace, end) for end in ends}) > MAX_PINNED:
            with pytest.raises(PinLimit):
                self.cache.pin(owner, tokens, seconds=seconds, namespace=namespace)
            return
        assert self.cache.pin(owner, tokens, seconds=seconds, namespace=namespace).n_pages == len(ends)
        self.use(namespace, ends, owner, None)
        self.pins.pop(owner, None)
        if ends:
            self.pins[owner] = Pinned(namespace, ends, self.now + seconds)

    @rule(owner=st.sampled_from(OWNERS[1:]))
    def unpin(self, owner: str) -> None:
        self.cache.unpin(owner)
        self.pins.pop(owner, None)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def evict_node(self, data: st.DataObject) -> None:
        tree = self.cache._ledger.tree
        nodes = list(tree.resident_nodes())
        node = nodes[data.draw(st.integers(0, len(nodes) - 1))]
        assert node.parent is not None
        start = tuple(token for step in tree.path(node.parent) for token in step.tokens)
        start += tuple(node.tokens[: self.page_size])
        self.end_old_pins()
        below = [path for path in self.records if path[0] == node.namespace and path[1][: len(start)] == start]
        expected = [self.records.pop(path).page for path in set(below) - self.held()]
        assert sorted(self.cache.evict_node(node.id)) == sorted(expected)

    @rule(data=st.data(), namespace=st.sampled_from([*NAMESPACES, "nobody's"]))
    def look(self, data: st.DataObject, namespace: str) -> None:
        tokens = self.draw_tokens(data)
        length = self.match(namespace, tokens, len(tokens))
        assert self.cache.match_length(tokens, namespace) == length
        shorter = data.draw(st.integers(0, len(tokens)))
        assert self.cache.match_length(tokens[:shorter], namespace) == min(length, self.aligned(shorter))

    def teardown(self) -> None:
        """Everything goes in the end, and in the right order."""
        for run in self.running:
            run.lease.release()
        self.running.clear()
        for owner in OWNERS[1:]:
            self.unpin(owner)
        assert self.cache.evict(NUM_PAGES) == self.model_evict(NUM_PAGES)
        assert self.cache.usage.free == NUM_PAGES
        self.cache.check()

    # What must hold after every call.

    @invariant()
    def books_agree(self) -> None:
        self.cache.check()
        usage, locked = self.cache.usage, len(self.held())
        assert (usage.free, usage.private) == (self.model_free(), self.model_private())
        assert (usage.locked, usage.evictable) == (locked, len(self.records) - locked)
        assert usage.total == NUM_PAGES
        stats = self.cache.stats
        assert {name: getattr(stats, name) for name in self.counted} == self.counted
        owners = {record.owner for record in self.records.values()} - {None}
        assert self.cache.owners() == {
            owner: sum(record.owner == owner for record in self.records.values()) for owner in owners
        }
        assert {pin.owner: pin.n_pages for pin in self.cache.pins} == {o: len(p.ends) for o, p in self.pins.items()}

    @invariant()
    def tables_agree(self) -> None:
        for run in self.running:
            assert run.lease.pages.tolist() == run.table
            assert (run.lease.cached_tokens, run.lease.committed_tokens) == (run.cached, run.committed)
            held = [self.records[run.namespace, end].page for end in self.ends(run.tokens, 0, run.committed)]
            assert run.table[: len(held)] == held

    @invariant()
    def events_replay_to_what_is_cached(self) -> None:
        for event in self.cache.drain_events():
            match event:
                case Cleared() | Resync():
                    self.mirror.clear()
                case Stored(namespace, parent, pages, tokens):
                    self.mirror_stored(namespace, parent, pages.tolist(), tokens.tolist())
                case Removed(pages):
                    for page in pages.tolist():
                        assert all(parent != page for _, parent, _ in self.mirror.values()), "a parent went first"
                        del self.mirror[page]
        expected = {}
        for (namespace, end), record in self.records.items():
            before = self.records.get((namespace, end[: -self.page_size]))
            parent = None if before is None else before.page
            expected[record.page] = (namespace, parent, end[-self.page_size :])
        assert self.mirror == expected

    def mirror_stored(self, namespace: str, parent: int | None, pages: list[int], tokens: list[int]) -> None:
        for number, page in enumerate(pages):
            start = number * self.page_size
            self.mirror[page] = (namespace, parent, tuple(tokens[start : start + self.page_size]))
            parent = page


CacheWalk.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None, derandomize=True)
TestAgainstModel = CacheWalk.TestCase
