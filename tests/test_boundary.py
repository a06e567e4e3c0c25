"""The values that cross the boundary: frozen, plain, and the same in another process."""

from __future__ import annotations

import enum
import inspect
import os
import subprocess
import sys
import textwrap
import types
import typing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata import boundary, handles
from kvstrata.boundary import (
    KEY_BYTES,
    Action,
    BatchDone,
    BatchPlan,
    CacheAction,
    Event,
    Evicted,
    KeyRun,
    Located,
    OpenRow,
    Outcome,
    PreparedBatchHandle,
    RowPlan,
    RowResult,
    RuntimeEvent,
    RuntimeInterface,
    StatusReport,
    TierDegraded,
    Wake,
    decode_actions,
    decode_events,
    decode_plan,
    encode,
)
from kvstrata.handles import (
    CacheExtentRef,
    Extents,
    PageRun,
    RequestRuntimeHandle,
    Tier,
    by_pool,
    page_count,
    slice_extents,
)

ROOT = Path(__file__).parents[1]

ACTIONS = typing.get_args(Action)
EVENTS = typing.get_args(Event)


def structs_of(module: types.ModuleType) -> list[type[msgspec.Struct]]:
    """The structs that a module defines."""
    members = vars(module).values()
    found = [m for m in members if inspect.isclass(m) and m.__module__ == module.__name__]
    return [m for m in found if issubclass(m, msgspec.Struct)]


STRUCTS = structs_of(boundary) + structs_of(handles)

# ── one strategy a type ──────────────────────────────────────────────────────────────────────────

UNSIGNED = st.integers(0, 2**64 - 1)
SIGNED = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(allow_nan=False)


def strategy(annotation: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of a field's type: all that may cross, and nothing else."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    plain = {int: SIGNED, float: FINITE, bool: st.booleans(), str: st.text(), bytes: st.binary()}
    if annotation in plain:
        return plain[annotation]
    if origin in (typing.Union, types.UnionType):
        return st.one_of([strategy(arg) for arg in args])
    if origin is tuple:
        assert args[1:] == (...,), annotation
        return st.lists(strategy(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(strategy(args[0]), strategy(args[1]), max_size=3)
    assert inspect.isclass(annotation), f"{annotation} cannot cross to another process"
    if issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    assert issubclass(annotation, msgspec.Struct), f"{annotation} cannot cross"
    return struct(annotation)


def struct(kind: type[msgspec.Struct]) -> st.SearchStrategy[typing.Any]:
    hints = typing.get_type_hints(kind, vars(boundary) | vars(handles))
    fields = {name: strategy(hints[name]) for name in kind.__struct_fields__}
    if kind is CacheExtentRef:
        fields["generation"] = UNSIGNED  # a runtime may use all 64 bits
    return st.builds(kind, **fields)


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=30)
@pytest.mark.parametrize("kind", ACTIONS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_actions_are_the_same_behind_the_wire(kind: type[CacheAction], data: st.DataObject) -> None:
    actions = data.draw(st.lists(struct(kind), max_size=3))
    found = decode_actions(encode(actions))
    assert found == actions
    assert {type(action) for action in found} <= {kind}


@settings(max_examples=30)
@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_events_are_the_same_behind_the_wire(kind: type[RuntimeEvent], data: st.DataObject) -> None:
    events = data.draw(st.lists(struct(kind), max_size=3))
    found = decode_events(encode(events))
    assert found == events
    assert {type(event) for event in found} <= {kind}


@settings(max_examples=60)
@given(plan=struct(BatchPlan))
def test_plans_are_the_same_behind_the_wire(plan: BatchPlan) -> None:
    assert decode_plan(encode(plan)) == plan


@settings(max_examples=20)
@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_value_has_a_type_that_another_process_knows(
    kind: type[msgspec.Struct], data: st.DataObject
) -> None:
    """Handles and results cross by themselves too, when the runtime is elsewhere."""
    value = data.draw(struct(kind))
    assert msgspec.msgpack.decode(encode(value), type=kind) == value


def test_every_action_and_event_is_in_its_union() -> None:
    def leaves(base: type) -> set[type]:
        below = {leaf for sub in base.__subclasses__() for leaf in leaves(sub)}
        return below or {base}

    assert leaves(CacheAction) == set(ACTIONS)
    assert leaves(RuntimeEvent) == set(EVENTS)
    tags = [kind.__struct_config__.tag for kind in (*ACTIONS, *EVENTS)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\x81\xa4type\xa4Evil", b"\x93\x01\x02"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    for decode in (decode_plan, decode_actions, decode_events):
        with pytest.raises(msgspec.MsgspecError):
            decode(data)


def test_an_event_is_no_action_and_the_other_way_round() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_actions(encode([Located(action_id=1, n=1)]))
    with pytest.raises(msgspec.ValidationError):
        decode_events(encode([boundary.Free(action_id=1, extents=())]))


CHILD = textwrap.dedent(
    """
    import sys
    from kvstrata.boundary import decode_actions, decode_events, decode_plan, encode
    decoders = {"plan": decode_plan, "actions": decode_actions, "events": decode_events}
    for line in sys.stdin:
        kind, _, text = line.strip().partition(" ")
        print(encode(decoders[kind](bytes.fromhex(text))).hex())
    heavy = {"torch", "numpy"} & sys.modules.keys()
    assert not heavy, heavy
    """
)


def test_another_process_reads_and_writes_the_same_bytes() -> None:
    """One of each message, in an interpreter that has neither torch nor numpy loaded."""
    extents: Extents = (
        CacheExtentRef(1, 2**64 - 1, Tier.L1, "kv", (PageRun(3, 2), PageRun(9, 1))),
        CacheExtentRef(1, 7, Tier.L2, "index", (PageRun(0, 3),)),
    )
    keys = KeyRun(bytes(32), bytes(range(32)), 4, bytes(range(64)))
    common = {"action_id": 2**62, "keys": keys, "deadline_s": 1.5}
    actions = [
        boundary.Lookup(**common),
        boundary.Prefetch(target=Tier.L1, **common),
        boundary.Backup(source=extents, target=Tier.L3, **common),
        boundary.Restore(action_id=1, source=extents),
        boundary.Free(action_id=2, extents=extents),
        boundary.Drop(**common),
        boundary.NewEpoch(action_id=4, epoch=3, payload=b"weights"),
    ]
    handle = RequestRuntimeHandle(1, 2, 3)
    plan = BatchPlan(
        release=(handle,),
        frees=(actions[4],),  # type: ignore[arg-type]
        actions=tuple(actions),
        open=(
            OpenRow(tokens=b"\1\0\0\0", namespace=bytes(32), max_new_tokens=9, stop_tokens=(5,)),
        ),
        rows=(RowPlan(row=0, attach=extents, start=8, count=1), RowPlan(row=handle)),
        steps=7,
    )
    row = RowResult(
        handle=handle, status=boundary.RowStatus.OK, extents=extents, sampled=b"\5\0\0\0"
    )
    capacity = boundary.PoolCapacity(Tier.L2, "kv", 10, 3, 1, waiting=2)
    events: list[Event] = [
        Located(action_id=1, n=3),
        boundary.PrefetchReady(action_id=1, n_valid=3, extents=extents),
        boundary.BackedUp(action_id=1, n=3, cause="timeout"),
        boundary.Restored(action_id=1, n=3, extents=extents),
        boundary.Freed(action_id=1),
        boundary.Dropped(action_id=1, n=2),
        boundary.EpochBegan(action_id=1, epoch=3),
        boundary.ActionFailed(action_id=1, cause="stale", message="gone"),
        BatchDone(batch_id=1, rows=(row,), compute_s=0.25, counters={"pages_verified": 3}),
        Evicted(namespace=bytes(32), keys=bytes(64)),
        TierDegraded(tier=Tier.L3, backend="disk", health="degraded"),
        StatusReport(capacity=(capacity,), costs=(boundary.PathCost("d2h", 9, 0.5, 1),)),
    ]
    assert {type(a) for a in actions} == set(ACTIONS)
    assert {type(e) for e in events} == set(EVENTS)
    messages = {"plan": encode(plan), "actions": encode(actions), "events": encode(events)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input="".join(f"{kind} {data.hex()}\n" for kind, data in messages.items()),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [bytes.fromhex(line) for line in done.stdout.split()] == list(messages.values())
    assert len(messages["plan"]) < 2000, "cheap to encode"


# ── frozen ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
@settings(max_examples=3)
@given(data=st.data())
def test_values_are_frozen(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    value = data.draw(struct(kind))
    assert kind.__struct_config__.frozen
    assert not hasattr(value, "__dict__")
    for name in kind.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(value, name, getattr(value, name))


def test_handles_and_extents_are_keys_of_dicts() -> None:
    first = CacheExtentRef(1, 2, Tier.L1, "kv", (PageRun(3, 2),))
    same = msgspec.msgpack.decode(encode(first), type=CacheExtentRef)
    handle = RequestRuntimeHandle(1, 2, 3)
    assert {first: 1}[same] == 1
    assert {handle: 1}[RequestRuntimeHandle(1, 2, 3)] == 1
    assert PreparedBatchHandle(1, 2, (handle,)) in {PreparedBatchHandle(1, 2, (handle,))}


# ── runs of keys and extents ─────────────────────────────────────────────────────────────────────


@given(count=st.integers(0, 6), first=st.integers(0, 9), data=st.data())
def test_key_runs_are_cut_like_lists(count: int, first: int, data: st.DataObject) -> None:
    digests = [bytes([i + 1]) * KEY_BYTES for i in range(count)]
    run = KeyRun(b"n" * 32, b"p" * 32, first, b"".join(digests))
    assert run.page_count == count
    assert [run.key(i) for i in range(count)] == digests
    assert [run.parent_of(i) for i in range(count)] == [b"p" * 32, *digests][:count]
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    part = run.slice(start, stop)
    assert part.page_count == stop - start
    assert part.first_page_index == first + start
    assert [part.key(i) for i in range(part.page_count)] == digests[start:stop]
    assert part.parent == [b"p" * 32, *digests][start]
    assert part.namespace == run.namespace


RUNS = st.lists(st.builds(PageRun, st.integers(0, 50), st.integers(1, 4)), min_size=1, max_size=4)


def flat(extents: Extents) -> dict[str, list[tuple[int, int]]]:
    """Generation and number of each page, by pool."""
    return {
        pool: [
            (extent.generation, run.first_page + i)
            for extent in group
            for run in extent.page_runs
            for i in range(run.page_count)
        ]
        for pool, group in by_pool(extents).items()
    }


@given(kv=st.lists(RUNS, max_size=4), index=st.lists(RUNS, max_size=4), data=st.data())
def test_extents_are_cut_like_lists(
    kv: list[list[PageRun]], index: list[list[PageRun]], data: st.DataObject
) -> None:
    made = [
        CacheExtentRef(1, 10 * i + len(pool), Tier.L1, pool, tuple(runs))
        for pool, groups in (("kv", kv), ("index", index))
        for i, runs in enumerate(groups)
    ]
    order = data.draw(st.permutations(range(len(made))))
    by_name = {pool: iter([e for e in made if e.pool == pool]) for pool in ("kv", "index")}
    extents = tuple(next(by_name[made[i].pool]) for i in order)  # pools interleaved, each in order
    pages = flat(extents)
    assert page_count(extents) == min((len(p) for p in pages.values()), default=0)
    start = data.draw(st.integers(0, 12))
    stop = data.draw(st.integers(start, 14))
    part = slice_extents(extents, start, stop)
    wanted = {pool: all_pages[start:stop] for pool, all_pages in pages.items()}
    assert flat(part) == {pool: some for pool, some in wanted.items() if some}
    assert all(extent.page_count > 0 for extent in part)


# ── small promises ───────────────────────────────────────────────────────────────────────────────


def test_wake_names_what_lets_a_decision_be_made() -> None:
    assert set(Wake.BATCH.kinds) < set(Wake.LOADS.kinds) < set(EVENTS)
    for event in (*EVENTS,):
        assert issubclass(event, Wake.ANY.kinds)
    assert BatchDone in Wake.BATCH.kinds
    assert StatusReport not in Wake.LOADS.kinds


def test_what_counts_as_stored() -> None:
    assert {o for o in Outcome if o.is_stored} == {Outcome.STORED, Outcome.EXISTS}


def test_the_local_runtime_is_a_runtime() -> None:
    from kvstrata.gpu_runtime import LocalGPURuntime

    methods = {n for n in vars(RuntimeInterface) if not n.startswith("_")}
    assert methods == {"prepare_batch", "execute_batch", "apply", "cancel", "poll", "close"}
    for name in methods:
        want = inspect.signature(getattr(RuntimeInterface, name)).parameters
        found = inspect.signature(getattr(LocalGPURuntime, name)).parameters
        assert list(found) == list(want), name
