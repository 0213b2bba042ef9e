# SPDX-License-Identifier: Apache-2.0
"""Ashlar for engines written in Python: assembles prompts from cached segments and prefixes, and publishes computed
ones:

    import ashlar
    cache = ashlar.Cache(model=..., rpc_socket=..., session_socket=..., pages=64)
    with cache.begin(tokens, segments=[...], page_table=pages) as request:
        ...

Lookups, landings, publishes and commits never raise because of the cache: they miss.

Exceptions of all calls. TypeError, ValueError: an argument is wrong; the message begins with its name, and the call has
changed nothing. ConnectionError: `Cache`, `PageClient` or `Prober` found no daemon, or `Request.admit` or
`Prober.probe` got no answer from it. PermissionError: the daemon has no tenant for this user. MemoryError: this process
is out of memory or threads. RuntimeError: a call at the wrong time, on a closed object or in a forked child, or the
daemon has another version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ashlar._ashlar import Verdict, version
from ashlar.cache import Cache, LayerGroup, MemoryKind, PagePlace
from ashlar.model import (
    Attention,
    DType,
    Family,
    LayerKind,
    Linear,
    Model,
    Opaque,
    Rope,
    RopeStyle,
    StateOrder,
    StoredKeys,
    TailOrder,
)
from ashlar.pages import PageClient, PageStore
from ashlar.probe import NodeProbe, Probed, Prober
from ashlar.prompt import Prompt, segment_lengths
from ashlar.request import (
    ComputedRun,
    LinearTensors,
    PageShortage,
    Plan,
    Request,
    Run,
    Segment,
    SharedSegment,
    SpanRows,
    Step,
    StepKind,
)
from ashlar.started import Started

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ashlar.transformers import Reuse
    from ashlar.transformers.model_cache import ModelCache

__version__ = version()


def _transformers() -> Any:
    try:
        from ashlar import transformers
    except ModuleNotFoundError as error:
        raise ImportError(
            f'{error}: pip install "ashlar[transformers]" installs the packages that Transformers models need'
        ) from error
    return transformers


def cache_for(model: Any, daemon: Any, **options: Any) -> ModelCache:
    """Opens a cache for a model of Transformers: `ashlar.transformers.cache_for`. Imports torch. ImportError: a package
    of `ashlar[transformers]` is missing."""
    transformers = _transformers()
    cache: ModelCache = transformers.cache_for(model, daemon, **options)
    return cache


def attach(model: Any, cache: ModelCache, **options: Any) -> AbstractContextManager[Reuse]:
    """Lets a model of Transformers use a cache within a `with` block: `ashlar.transformers.attach`. Imports torch.
    ImportError: a package of `ashlar[transformers]` is missing."""
    transformers = _transformers()
    reuse: AbstractContextManager[Reuse] = transformers.attach(model, cache, **options)
    return reuse


__all__ = [
    "Attention",
    "Cache",
    "ComputedRun",
    "DType",
    "Family",
    "LayerGroup",
    "LayerKind",
    "Linear",
    "LinearTensors",
    "MemoryKind",
    "Model",
    "NodeProbe",
    "Opaque",
    "PageClient",
    "PagePlace",
    "PageShortage",
    "PageStore",
    "Plan",
    "Probed",
    "Prober",
    "Prompt",
    "Request",
    "Rope",
    "RopeStyle",
    "Run",
    "Segment",
    "SharedSegment",
    "SpanRows",
    "Started",
    "StateOrder",
    "Step",
    "StepKind",
    "StoredKeys",
    "TailOrder",
    "Verdict",
    "__version__",
    "attach",
    "cache_for",
    "segment_lengths",
]
