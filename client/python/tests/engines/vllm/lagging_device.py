# SPDX-License-Identifier: Apache-2.0
"""A torch device that is not a CPU, neither by name nor by behaviour, emulated in CPU memory.

Its tensors refuse every CPU pointer, and all operations together with CPU tensors except copies. Its streams are
queues: work is only done when something waits for it, which is as late as on any device. Between streams only waits
determine the order.
"""

import contextlib
import threading
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "lagging"
QUERIES = 3  # queries of an event; the last one finds that it has ended


class Stream:
    def __init__(self):
        self._work, self._lock = [], _lock

    def add(self, work):
        with self._lock:
            self._work.append(work)

    def run(self, event=None):
        """Does all queued work, or the work up to an event."""
        with self._lock:
            while self._work and not (event is not None and event.ended):
                self._work.pop(0)()

    def synchronize(self):
        self.run()

    def wait_event(self, event):
        self.add(event.finish)


class Event:
    def __init__(self, **_):
        self.ended, self._stream, self._queries = False, None, QUERIES

    def record(self, stream):
        self._stream = stream
        stream.add(self._end)

    def _end(self):
        self.ended = True

    def finish(self):
        self._stream.run(self)

    def synchronize(self):
        self.finish()

    def query(self):
        self._queries -= 1
        if self._queries <= 0:
            self.finish()
        return self.ended

    def elapsed_time(self, _):
        return 1.0


_lock = threading.RLock()
_own = threading.local()
ENGINE = Stream()  # the current stream of every thread that has not chosen another


def current_stream(_=None):
    return getattr(_own, "stream", ENGINE)


@contextlib.contextmanager
def stream(chosen):
    before = current_stream()
    _own.stream = chosen
    try:
        with _Mode():
            yield
    finally:
        _own.stream = before


def _is_view(func):
    returned = [each.alias_info for each in func._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


class Tensor(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made._inner = inner
        return made

    def _refuse(self, *_, **__):
        raise RuntimeError("a tensor of another device has no pointer for the CPU")

    data_ptr = untyped_storage = numpy = tolist = __dlpack__ = __array__ = _refuse

    def __repr__(self):
        return f"lagging {tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func, kinds, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Observes copies of CPU tensors to the device."""

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith(NAME):
            return run(func, args, kwargs)
        return func(*args, **kwargs)


def _inner(value):
    """Returns the CPU tensors of a tensor, or of the tensors in arguments."""
    return tree_map_only(Tensor, lambda each: each._inner, value)


def _all(args):
    for each in args:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _all(each)


def run(func, args, kwargs):
    with _Mode():
        parts = func.decompose(*args, **kwargs)  # in inference mode torch has not done that
    return _run(func, args, kwargs) if parts is NotImplemented else parts


def _run(func, args, kwargs):
    name, device = func._schema.name, kwargs.pop("device", None)
    if _is_view(func):
        return tree_map_only(torch.Tensor, Tensor, func(*_inner(args), **kwargs))
    here, tensors = current_stream(), list(_all((args, list(kwargs.values()))))
    if name in ("aten::copy_", "aten::_to_copy"):
        source = args[1] if name == "aten::copy_" else args[0]
        blocking = not (args[2] if len(args) > 2 else kwargs.pop("non_blocking", False))
        if name == "aten::copy_":
            made = target = args[0]
        else:
            to_cpu = device is not None and torch.device(device).type == "cpu"
            target = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            made = target if to_cpu else Tensor(target)
        crosses = isinstance(source, Tensor) is not isinstance(made, Tensor)
        here.add(lambda: _inner(target).copy_(_inner(source)))
        if blocking and crosses:
            here.run()
        return made
    if not all(isinstance(each, Tensor) for each in tensors):
        raise RuntimeError(f"{name}: tensors of two devices")
    if func._schema.is_mutable:
        here.add(lambda: func(*_inner(args), **_inner(kwargs)))
        return args[0]
    shape = func(*tree_map_only(Tensor, lambda each: each._inner.to("meta"), args), **kwargs)
    made = torch.full(shape.shape, 0x25, dtype=shape.dtype)
    here.add(lambda: made.copy_(func(*_inner(args), **kwargs)))
    return Tensor(made)


def register():
    """Registers the device for the rest of this process."""
    module = types.ModuleType(NAME)
    for each in (Stream, Event, current_stream, stream):
        setattr(module, each.__name__, each)
    module.device = lambda device: contextlib.nullcontext()
    _setup_privateuseone_for_python_backend(NAME, module)


def zeros(size):
    return Tensor(torch.zeros(size, dtype=torch.int8))
