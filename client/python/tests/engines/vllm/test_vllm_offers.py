# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half offers to the cache in a step, without an engine."""

from functools import partial
from types import SimpleNamespace

from ashlar.vllm.offers import Offers
from ashlar.vllm.options import Options
from ashlar.vllm.prefix_lookups import PrefixLookups
from ashlar.vllm.requests import Followed, Lookup
from ashlar.vllm.scheduler import Scheduler
from ashlar.vllm.stats import AshlarStats


def test_a_requests_tables_are_copied_only_for_a_save():
    request = SimpleNamespace(num_prompt_tokens=100, num_tokens=130)
    described = SimpleNamespace(linear=[], windows=[], grain=256)
    jumps = SimpleNamespace(exact_tokens=lambda request: None)
    half = SimpleNamespace(
        _saves=True,
        _opening=SimpleNamespace(cache=object()),
        _followed={"one": Followed(request, "", saved=100)},
        _offers=Offers(described, Options(), None, jumps, AshlarStats(), 1, 16, 0),
    )
    copied = []

    def step(computed):
        output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=["one"], num_computed_tokens=[computed]),
            num_scheduled_tokens={"one": 1},
            kv_connector_block_state=SimpleNamespace(get_block_ids=copied.append),
        )
        Scheduler._offer_all(half, output, [])
        return list(copied)

    assert step(120) == []
    request.num_tokens = 256
    assert step(255) == ["one"]


def test_an_end_is_offered_only_if_a_step_has_computed_it():
    """Before its first step after a preemption, its blocks may be those that another connector still loads."""
    request = SimpleNamespace(request_id="one", num_tokens=400)
    followed, offered = Followed(request, "", scheduled=True), []
    half = SimpleNamespace(
        _saves=True,
        _loads=False,
        _followed={"one": followed},
        _opening=SimpleNamespace(cache=object()),
        _match_prefix=lambda request, computed: (0, False),
        _jumps=SimpleNamespace(external=lambda *given: 0),
        _pool=None,
        _offers=SimpleNamespace(offer_end=lambda followed, ids: offered.append(ids)),
    )
    Scheduler._offer_end(half, followed, [[1]])
    assert offered == [[[1]]]
    assert Scheduler.match(half, request, 0) == (0, False)
    Scheduler._offer_end(half, followed, [[2]])
    assert offered == [[[1]]]


def test_a_match_that_the_engine_does_not_load_releases_its_lease():
    """vLLM may refuse matched tokens, and MultiConnector may load them by another connector."""
    request, ended = SimpleNamespace(request_id="one"), []
    handle = SimpleNamespace(end=lambda: ended.append(True))
    followed = Followed(request, "", lookup=Lookup(handle, None, 400, 400, 0.0), loading=384)
    half = SimpleNamespace(
        _followed={"one": followed}, _lookups=SimpleNamespace(drop=partial(PrefixLookups.drop, None))
    )
    Scheduler.not_loaded(half, request)
    assert not ended, "its load has begun"
    followed.loading = 0
    Scheduler.not_loaded(half, request)
    Scheduler.not_loaded(half, request)
    assert ended == [True] and followed.lookup is None
    Scheduler.not_loaded(half, SimpleNamespace(request_id="unknown"))
