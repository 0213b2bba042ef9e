# SPDX-License-Identifier: Apache-2.0
"""Every public call refuses values that make no sense: TypeError or ValueError, beginning with the argument's name."""

import asyncio
import dataclasses
import pathlib

import numpy as np
import pytest
import shortest

import ashlar
import ashlar.daemon

STATE = np.zeros((shortest.HEADS, shortest.DIM, shortest.DIM), np.float32)
ROWS = np.zeros((4, shortest.HEADS * shortest.DIM), np.float32)
TOKENS = np.arange(400, dtype=np.int32)
TABLE = np.arange(32, dtype=np.int32)
TENSORS = [ashlar.LinearTensors(shortest.LINEAR, STATE)]
DOCUMENT = "a whole document " * 10_000


class Odd:
    def __repr__(self):
        raise AssertionError("values are not shown")


# Invalid values for each type of argument. Some raise ValueError, and all others TypeError.
COUNTS = [None, 1.5, 2.0, "7", [3], True, Odd(), np.float32(3)]
COUNTS_OUT_OF_RANGE = [-1, 2**40 + 7, 2**70, np.int64(-5)]
WIDE_COUNTS_OUT_OF_RANGE = [-1, 2**70]
REALS = [None, "1.0", [1.0], Odd(), True]
REALS_OUT_OF_RANGE = [float("nan"), float("inf")]
TEXTS = [None, 3, b"bytes", ["a"], Odd()]
PATHS = [None, 3, ["a"], Odd()]
FLAGS = [None, 1, "yes", Odd()]
OCTETS = [None, 3, "text", Odd()]
LISTS = [None, 3, DOCUMENT, b"bytes", Odd()]
FUNCTIONS = [None, 3, "text"]
TOKENS_OF = [None, 3.5, DOCUMENT, [1.5, 2.0], ["a", "b"], [[1, 2], [3]], Odd(), [1, 2**40 + 7]]
PAGES = [3.5, DOCUMENT, [1.5], Odd(), [2**40 + 7]]
ARRAYS = [3, DOCUMENT, [1.0], Odd(), ROWS.astype(np.float64)]
OBJECTS = [None, 3, {}, Odd()]


@dataclasses.dataclass
class World:
    """The objects on which the calls are made."""

    daemon: object
    cache: object
    request: object
    store: object


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with ashlar.daemon.start(dram="64MiB", arena="8MiB", folder=tmp_path_factory.mktemp("world")) as daemon:
        client = ashlar.PageClient(pathlib.Path(daemon.rpc_socket), pathlib.Path(daemon.session_socket))
        options = dict(model_id="m", weights_digest="w", content="c", page_bytes=4096, slots=2)
        with open_cache(daemon) as cache, ashlar.PageStore(client, **options) as store:
            with cache.begin(TOKENS, [100], TABLE, fill=True) as request:
                yield World(daemon, cache, request, store)


def open_cache(daemon, model=shortest.MODEL, **options):
    where = {"rpc_socket": daemon.rpc_socket, "session_socket": daemon.session_socket}
    return ashlar.Cache(model, **{**where, "pages": 64, "capture_tokens": 16, **options})


def model(**changed):
    return dataclasses.replace(shortest.MODEL, **changed)


def linear(**changed):
    return model(layers=[dataclasses.replace(shortest.MODEL.layers[0], **changed), shortest.MODEL.layers[1]])


def attention(**changed):
    return model(layers=[shortest.MODEL.layers[0], dataclasses.replace(shortest.MODEL.layers[1], **changed)])


def rope(**changed):
    return attention(rope=ashlar.Rope(**{"frequencies": [0.1] * 8, **changed}))


def place(**changed):
    return [ashlar.PagePlace(**{"layer": 1, "key_offset": 0, "value_offset": 64, "page_stride": 4096, "token_stride": 256,
                                "key_head_stride": 16, "value_head_stride": 16, **changed})]  # fmt: skip


def opening(world, **options):
    return lambda value, name: open_cache(world.daemon, **{**options, name: value})


def of_model(world, change):
    return lambda value, name: open_cache(world.daemon, model=change(**{name.rpartition(".")[2]: value}))


def table(world):
    """(argument, values of another type, values out of range, a call of one and its name)."""
    cache, request, store = world.cache, world.request, world.store
    opens = opening(world)
    yield from (
        ("rpc_socket", PATHS, ["a\0b"], opens),
        ("session_socket", PATHS, ["a\0b"], opens),
        ("name", TEXTS, [], opens),
    )
    for name in ("pages", "timeout_ms", "capture_tokens", "land_ms", "quiet_ms"):
        yield name, COUNTS, COUNTS_OUT_OF_RANGE, opens
    yield "memory_bytes", COUNTS, WIDE_COUNTS_OUT_OF_RANGE, opens
    yield "gpu_address", COUNTS, WIDE_COUNTS_OUT_OF_RANGE, opens
    yield from ((name, COUNTS, [-2, 2**40], opens) for name in ("memfd", "gpu_descriptor"))
    yield from (("epsilon", REALS, REALS_OUT_OF_RANGE, opens), ("gpu", OCTETS, [b"short"], opens))
    yield from ((name, FLAGS, [], opens) for name in ("common_pages", "compose_in_daemon"))
    yield from ((name, [*LISTS, [3]], [], opens) for name in ("places", "groups"))
    yield from (("memory_kind", [None, 3, "HOSTED"], [], opens), ("model", OBJECTS, [], opens))
    for field in ("layer", "key_offset", "scale_head_stride"):
        change = lambda value, name: open_cache(world.daemon, places=place(**{name.rpartition(".")[2]: value}))
        yield f"places[0].{field}", COUNTS, WIDE_COUNTS_OUT_OF_RANGE, change
    group = lambda value, name: open_cache(
        world.daemon, groups=[ashlar.LayerGroup(**{"layers": [1], name[10:]: value})]
    )
    yield from ((f"groups[0].{name}", COUNTS, COUNTS_OUT_OF_RANGE, group) for name in ("page_tokens", "pages"))
    yield "groups[0].layers", [*LISTS, [1.5]], [[-1]], group
    yield from model_table(world)
    yield from cache_table(cache, request)
    yield from request_table(request)
    yield from page_table(world, store)


def model_table(world):
    top, lin, att, rot = (of_model(world, change) for change in (model, linear, attention, rope))
    for name in ("model_id", "weights_digest", "dtype", "quantization", "tokenizer_digest", "lora"):
        yield f"model.{name}", TEXTS, [], top
    for name in ("page_tokens", "head", "tail", "tensor_parallel_rank"):
        yield f"model.{name}", COUNTS, COUNTS_OUT_OF_RANGE, top
    yield "model.page_tokens", [], [0], top
    yield "model.tensor_parallel_size", COUNTS, [0, *COUNTS_OUT_OF_RANGE], top
    for name in ("flops_per_token", "flops_per_token_squared", "tokens_per_second"):
        yield f"model.{name}", REALS, REALS_OUT_OF_RANGE, top
    yield "model.layers", [*LISTS, [3], [None], [{}]], [[]], top
    for name in ("key_heads", "value_heads", "d_k", "d_v", "conv_channels", "conv_kernel"):
        yield f"model.layers[0].{name}", COUNTS, COUNTS_OUT_OF_RANGE, lin
    for name in ("family", "state_dtype", "order", "conv_dtype", "conv_order"):
        yield f"model.layers[0].{name}", [3, "GDN", ashlar.RopeStyle.NONE], [], lin
    yield "model.layers[0].decay_table", [3, DOCUMENT, ["a"], [None]], [[0.5]], lin
    for name in ("kv_heads", "key_dim", "value_dim"):
        yield f"model.layers[1].{name}", COUNTS, COUNTS_OUT_OF_RANGE, att
    yield from ((f"model.layers[1].{name}", [3, "F32"], [], att) for name in ("dtype", "stored"))
    yield from (("model.layers[1].scales", FLAGS, [], att), ("model.layers[1].rope", [3, "yarn", {}], [], att))
    yield from (
        ("model.layers[1].rope.scale", REALS, REALS_OUT_OF_RANGE, rot),
        ("model.layers[1].rope.style", [3, None], [], rot),
    )
    yield "model.layers[1].rope.frequencies", [3, DOCUMENT, ["a"], None], [], rot


def cache_table(cache, request):
    begin = lambda value, name: cache.begin(**{"tokens": TOKENS, name: value})
    land = lambda value, name: cache.land(**{"plan": b"", "page_table": TABLE, name: value})
    commit = lambda value, name: cache.commit(
        **{"tokens": TOKENS, "checkpoints": [(400, TENSORS)], "page_table": TABLE, name: value}
    )
    hand = lambda value, name: cache.handoff(**{"tokens": TOKENS, "node": "a", name: value})
    alone = lambda value, name: cache.compute_alone(
        **{"request": request, "missing": 0, "layer": 0, "state": STATE, name: value}
    )
    for call in (begin, commit, hand):
        yield "tokens", TOKENS_OF, [], call
        yield "conversation", OCTETS, [b"short"], call
        yield "salt", [None, 3, Odd()], [b"x" * 4097], call
        yield "media", [*LISTS, [3]], [[(3,)], [(-1, bytes(32))], [(0, b"short")]], call
    for call in (begin, commit):
        yield "page_table", PAGES, [[0, 999], [-1] * 32], call
    yield from (("segments", [*LISTS, [1.5], [None]], [[10_000], [-1], [2**70], [0]], begin),)
    yield "needed_in_ms", COUNTS, [-1, 2**50, 2**70], begin
    yield from ((name, FLAGS, [], begin) for name in ("fill", "cold_parallel", "store_only"))
    yield from (("store_only", [], [True], begin), ("plan", [None, 3, "text"], [b"", b"no plan"], land))
    yield from (("present_tokens", COUNTS, WIDE_COUNTS_OUT_OF_RANGE, land), ("wait", FLAGS, [], land))
    yield from (("request", [3, "a", Odd()], [], commit), ("prompt_tokens", COUNTS[1:], [-1, 2**70, 2**22 + 1], commit))
    yield from (
        ("composed", FLAGS, [], commit),
        ("node", TEXTS, [""], hand),
        ("wait_ms", COUNTS, COUNTS_OUT_OF_RANGE, hand),
    )
    bad = [*LISTS, [3], [(400, None)], [(400, [3])], [(1.5, TENSORS)], [(400, [ashlar.LinearTensors(0, [1.0])])]]
    yield (
        "checkpoints",
        bad,
        [[(400,)], [(-1, TENSORS)], [(7, TENSORS)], [(400, [ashlar.LinearTensors(1, STATE)])], []],
        commit,
    )
    yield from (("request", OBJECTS, [], alone), ("missing", COUNTS, [9, *COUNTS_OUT_OF_RANGE], alone))
    yield from (
        ("layer", COUNTS, [1, *COUNTS_OUT_OF_RANGE], alone),
        ("state", [None, *ARRAYS[:-1]], [STATE[:1], STATE.astype(np.float64)], alone),
    )
    yield from ((name, ARRAYS, [], alone) for name in ("q", "k", "v", "g", "beta", "out"))
    yield from ((name, REALS, REALS_OUT_OF_RANGE, alone) for name in ("norm_epsilon", "q_scale"))
    take = lambda value, name: cache.take_quiesced_pages(**{"most": 1, name: value})
    yield "most", COUNTS, WIDE_COUNTS_OUT_OF_RANGE, take
    yield from ((name, COUNTS, COUNTS_OUT_OF_RANGE, take) for name in ("timeout_ms", "group"))
    yield "layer", COUNTS, [0, 2, -1, 2**70], lambda value, name: cache.page_rows(value)
    for call in (cache.serve_prefill, cache.start_serve_prefill):
        yield "wait_ms", COUNTS, COUNTS_OUT_OF_RANGE, lambda value, name, call=call: call(value)
    opened = lambda value, name: asyncio.run(cache.begin_async(**{"tokens": TOKENS, name: value}))
    yield "tokens", TOKENS_OF, [], opened


def request_table(request):
    one = lambda name: lambda value, _: getattr(request, name)(value)
    yield from (("timeout_ms", COUNTS, COUNTS_OUT_OF_RANGE, one(name)) for name in ("wait_cold", "start_wait_cold"))
    yield from (("layer", COUNTS, [9, *COUNTS_OUT_OF_RANGE], one(name)) for name in ("wait_layer", "poll_layer"))
    yield from (
        ("missing", COUNTS, COUNTS_OUT_OF_RANGE, one("abandon")),
        ("segments", [*LISTS, [1.5]], [[-1], [2**40]], one("drop_segments")),
    )
    yield from (("page_table", PAGES, [[0, 999]], one(name)) for name in ("look_again",))
    tail = lambda value, name: request.conv_tail(**{"step": 0, "layer": 0, name: value})
    yield from (("step", COUNTS, COUNTS_OUT_OF_RANGE, tail), ("layer", COUNTS, [1, *COUNTS_OUT_OF_RANGE], tail))
    advance = lambda value, name: request.advance(
        **{"layer": 0, "begin": 0, "end": 4, "state": STATE.copy(), "k": ROWS, "v": ROWS, name: value}
    )
    yield "layer", COUNTS, [1, *COUNTS_OUT_OF_RANGE], advance
    yield from ((name, COUNTS, WIDE_COUNTS_OUT_OF_RANGE, advance) for name in ("begin", "end"))
    yield from ((name, ARRAYS, [], advance) for name in ("q", "k", "v", "g", "beta", "out"))
    yield from (("state", [None, 3, "a", Odd()], [STATE[:1]], advance), ("exponents", [3, ROWS], [], advance))
    yield from ((name, REALS, REALS_OUT_OF_RANGE, advance) for name in ("norm_epsilon", "q_scale"))
    yield "copies", [*LISTS, [3], [(1.5, STATE)], [(2, 3)]], [[(4,)], [(-1, STATE)], [(9, STATE.copy())]], advance
    publish = lambda value, name: request.publish(**{"missing": 0, "linear": TENSORS, "page_table": TABLE, name: value})
    yield from (("missing", COUNTS, [9, *COUNTS_OUT_OF_RANGE], publish), ("linear", [*LISTS, [3]], [], publish))
    yield from (
        ("page_table", PAGES, [[0, 999]], publish),
        ("first_position", COUNTS, WIDE_COUNTS_OUT_OF_RANGE, publish),
    )
    many = lambda value, name: request.publish_many(value)
    yield "runs", [*LISTS, [3], [ashlar.ComputedRun("0", TENSORS)]], [[ashlar.ComputedRun(9, TENSORS)]], many


def page_table(world, store):
    client = lambda value, name: ashlar.PageClient(
        **{"rpc_socket": world.daemon.rpc_socket, "session_socket": world.daemon.session_socket, name: value}
    )
    yield from ((name, PATHS, ["a\0b"], client) for name in ("rpc_socket", "session_socket"))
    yield from (("name", TEXTS, [], client), ("timeout_ms", COUNTS, [0, *COUNTS_OUT_OF_RANGE], client))
    options = dict(model_id="m", weights_digest="w", content="c", page_bytes=4096)
    alive = ashlar.PageClient(world.daemon.rpc_socket, world.daemon.session_socket)
    opens = lambda value, name: ashlar.PageStore(**{"client": alive, **options, name: value})
    yield "client", OBJECTS, [], opens
    yield from ((name, TEXTS, [], opens) for name in ("model_id", "weights_digest", "content"))
    yield from (("weights_digest", [], [""], opens), ("page_bytes", COUNTS, [0, *WIDE_COUNTS_OUT_OF_RANGE], opens))
    yield from ((name, COUNTS, [0, *COUNTS_OUT_OF_RANGE], opens) for name in ("page_tokens", "slots"))
    yield from (
        ("land_ms", COUNTS, COUNTS_OUT_OF_RANGE, opens),
        *((name, REALS, REALS_OUT_OF_RANGE, opens) for name in ("tokens_per_second", "flops_per_token")),
    )
    for call in (store.exists, lambda keys: store.put(keys, print), lambda keys: store.get(keys, print)):
        yield "keys", [*LISTS, ["text"], [bytes(32), None]], [[b"short"]], lambda value, name, call=call: call(value)
    yield from (
        ("fill", FUNCTIONS, [], lambda value, name: store.put([bytes(32)], value)),
        ("take", FUNCTIONS, [], lambda value, name: store.get([bytes(32)], value)),
    )


def refused(call, value, name, error):
    """The refusal must begin with the name of the argument or of one of its parts."""
    try:
        call(value, name)
    except error as raised:
        message = str(raised)
        if (
            not message.startswith(name)
            or message[len(name)] not in ":.["
            or len(message) > 300
            or "bad_cast" in message
        ):
            return f"{name}={kind_of(value)}: {type(raised).__name__}: {message[:300]}"
        if "supported" in message or "std::" in message:
            return f"{name}={kind_of(value)}: {message[:300]}"
        return None
    except BaseException as raised:
        return f"{name}={kind_of(value)}: {type(raised).__name__}: {str(raised)[:300]}"
    return f"{name}={kind_of(value)}: taken"


def kind_of(value):
    return f"{type(value).__name__}" if isinstance(value, (Odd, str, list, np.ndarray)) else repr(value)


def test_every_call_names_the_argument_that_it_refuses(world):
    wrong, count = [], 0
    for name, types, values, call in table(world):
        # A list of tokens, pages or rows may be refused for its elements or for its type.
        both = (TypeError, ValueError)
        for value in types:
            loose = types in (TOKENS_OF, PAGES) or isinstance(value, list) or isinstance(value, Odd)
            wrong.append(refused(call, value, name, both if loose else TypeError))
        wrong += [refused(call, value, name, both if isinstance(value, list) else ValueError) for value in values]
        count += len(types) + len(values)
    wrong = [each for each in wrong if each is not None]
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:60])
    assert count > 1000


def test_an_argument_that_is_left_out_is_named(world):
    for call, name in [("wait_cold", "timeout_ms"), ("wait_layer", "layer"), ("poll_layer", "layer"), ("abandon", "missing"),
                       ("drop_segments", "segments"), ("conv_tail", "layer")]:  # fmt: skip
        assert refused(lambda value, name, call=call: getattr(world.request, call)(), None, name, TypeError) is None


def test_errors_name_calls_as_python_does(world):
    assert world.request.missing
    for call in (world.request.finish, lambda: world.request.wait_layer(shortest.ATTENTION)):
        with pytest.raises(RuntimeError, match="^missing is not empty: call look_again first"):
            call()


def test_numbers_and_paths_of_other_libraries_are_accepted(world):
    kinds = (np.int64, np.uint8, np.int16)
    daemon = world.daemon
    for kind in kinds:
        options = {"pages": kind(8), "timeout_ms": kind(99), "epsilon": np.float32(1e-6), "common_pages": False}
        with open_cache(daemon, rpc_socket=pathlib.Path(daemon.rpc_socket), session_socket=pathlib.Path(daemon.session_socket),
                        model=model(page_tokens=kind(16), head=kind(4)), **options) as cache:  # fmt: skip
            assert cache.page_rows(kind(1))[0].shape[0] == 8
            with cache.begin(
                TOKENS[:20], [kind(10)], np.arange(kind(8)), needed_in_ms=kind(0), fill=np.bool_(False)
            ) as request:
                assert request.advance(kind(0), kind(0), kind(4), STATE.copy(), k=ROWS, v=ROWS) == ashlar.Verdict.OK
                assert request.wait_layer(kind(1)) == ashlar.Verdict.OK
    assert isinstance(world.cache.take_quiesced_pages(2**40), list)


def test_a_prompt_refuses_anything_but_a_token_sequence():
    good = ashlar.Prompt([[1, 2], np.array([3], np.uint8), (4,)], np.array([[5, 6]]), bytes(16), "salt")
    assert good.tokens.tolist() == [1, 2, 3, 4, 5, 6] and good.lengths == [2, 1, 1]
    for name, error, call in [
        ("segments", TypeError, lambda: ashlar.Prompt(DOCUMENT)),
        ("segments", TypeError, lambda: ashlar.Prompt(None)),
        ("segments", TypeError, lambda: ashlar.Prompt(3)),
        ("segments[1]", TypeError, lambda: ashlar.Prompt([[1], DOCUMENT])),
        ("segments[0]", TypeError, lambda: ashlar.Prompt([[1.5, 2.0]])),
        ("segments[0]", TypeError, lambda: ashlar.Prompt([None])),
        ("segments[0]", TypeError, lambda: ashlar.Prompt([5])),
        ("segments[0]", TypeError, lambda: ashlar.Prompt([["a", "b"]])),
        ("segments[0]", TypeError, lambda: ashlar.Prompt([[[1, 2], [3]]])),
        ("segments[0]", ValueError, lambda: ashlar.Prompt([[[1, 2], [3, 4]]])),
        ("segments[0]", ValueError, lambda: ashlar.Prompt([[2**40 + 7]])),
        ("segments[0]", ValueError, lambda: ashlar.Prompt([[-1]])),
        ("segments", ValueError, lambda: ashlar.Prompt([])),
        ("query", TypeError, lambda: ashlar.Prompt([[1]], DOCUMENT)),
        ("query", TypeError, lambda: ashlar.Prompt([[1]], np.zeros(3))),
        ("query", TypeError, lambda: ashlar.Prompt([[1]], 7)),
        ("conversation", ValueError, lambda: ashlar.Prompt([[1]], conversation=b"short")),
        ("conversation", TypeError, lambda: ashlar.Prompt([[1]], conversation=None)),
        ("conversation", TypeError, lambda: ashlar.Prompt([[1]], conversation="x" * 16)),
        ("salt", TypeError, lambda: ashlar.Prompt([[1]], salt=None)),
        ("tokens", TypeError, lambda: ashlar.segment_lengths(DOCUMENT, [9])),
        ("separator", TypeError, lambda: ashlar.segment_lengths([1, 9, 2], DOCUMENT)),
        ("separator", ValueError, lambda: ashlar.segment_lengths([1, 9, 2], [])),
        ("min_tokens", ValueError, lambda: ashlar.segment_lengths([1, 9, 2], [9], min_tokens=-1)),
        ("separator", TypeError, lambda: ashlar.Prompt.split([1, 9, 2], 9)),
        ("tokens", TypeError, lambda: ashlar.Prompt.split(DOCUMENT, [9])),
    ]:
        problem = refused(lambda *_, call=call: call(), None, name, error)
        assert problem is None, problem


def test_a_prompt_is_cut_at_its_separators():
    tokens = np.array([1, 2, 8, 9, 3, 8, 9, 4, 5])
    assert ashlar.segment_lengths(tokens, [8, 9]) == [4, 3]
    assert ashlar.segment_lengths(tokens[:7], [8, 9]) == [4], "the last token is in no segment"
    assert ashlar.segment_lengths(tokens, [9, 8]) == [] == ashlar.segment_lengths([], [8])
    assert ashlar.segment_lengths(tokens, [8, 9], min_tokens=5) == [7], "short segments are joined"
    cut = ashlar.Prompt.split([tokens.tolist()], (8, 9), salt="mine")
    assert cut.lengths == [4, 3] and cut.tokens.tolist() == tokens.tolist() and cut.salt == "mine"
    assert ashlar.Prompt.split([1, 2], [8]).lengths == []


def test_a_private_daemon_refuses_by_name_and_takes_paths(tmp_path):
    start = ashlar.daemon.start
    for name, values, error in [
        ("dram", [None, 1.5, ["1GiB"], True], TypeError), ("dram", [-1], ValueError), ("ssd", [1.5], TypeError),
        ("arena", [None], TypeError), ("folder", [3, b"x"], TypeError), ("config", ["x", 3], TypeError),
        ("admission", [3, None], TypeError), ("log_level", [3], TypeError),
    ]:  # fmt: skip
        for value in values:
            assert refused(lambda value, name: start(**{name: value}), value, name, error) is None
    with start(dram=np.int64(64 << 20), arena=8 << 20, folder=tmp_path / "new" / "folder") as running:
        assert running.folder == str(tmp_path / "new" / "folder")
        for call in (running.start, running.stop):
            assert refused(lambda value, name, call=call: call(value), "soon", "timeout", TypeError) is None
