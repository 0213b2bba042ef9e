# SPDX-License-Identifier: Apache-2.0
"""Every kind of change of a model's weights in memory is detected."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ashlar.weights_watch import WeightsWatch


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 96, dtype=torch.bfloat16) for _ in range(4))
        self.transposed = torch.nn.Parameter(torch.randn(48, 80).t())
        self.quantized = torch.nn.Parameter(torch.randint(0, 255, (40, 40), dtype=torch.uint8), requires_grad=False)
        self.nothing = torch.nn.Parameter(torch.empty(0))
        self.alike = torch.nn.Parameter(torch.zeros(1).expand(100), requires_grad=False)
        with torch.inference_mode():
            self.inferred = torch.nn.Parameter(torch.full((300,), float("nan")), requires_grad=False)

    def load_weights(self, weights):
        return len(weights)


def edit(model):
    with torch.no_grad():
        model.layers[2].bias[5] += 1


def merge(model):
    weight = model.layers[1].weight
    low = torch.randn(96, 2, dtype=torch.bfloat16) @ torch.randn(2, 64, dtype=torch.bfloat16)
    weight.data.add_(low)


def replace(model):
    model.layers[3].weight = torch.nn.Parameter(model.layers[3].weight.detach().clone())


def through_data(model):
    model.layers[3].weight.data = model.layers[3].weight.data.clone()


@pytest.mark.parametrize(
    "change",
    [
        edit,
        merge,
        replace,
        through_data,
        lambda model: model.load_weights([]),
        lambda model: model.layers.load_state_dict(Tiny().layers.state_dict()),
        lambda model: model.transposed.data.mul_(2),
        lambda model: model.quantized.data.add_(1),
        lambda model: model.inferred.data.fill_(1),
        lambda model: model.float(),
        lambda model: setattr(model.alike, "data", torch.zeros(100)),
        lambda model: setattr(model.transposed, "data", torch.zeros(1).expand(80, 48)),
    ],
)
def test_a_change_is_reported_until_it_is_accepted(change):
    model = Tiny()
    watch = WeightsWatch(model)
    assert not watch.changed()
    change(model)
    assert watch.changed() and watch.changed()
    watch.accept()
    assert not watch.changed()
    merge(model)
    assert watch.changed(), "also of parameters that have been replaced"


def test_replaced_weights_are_not_kept_in_memory():
    model = Tiny()
    watch = WeightsWatch(model)
    replaced = StorageWeakRef(model.layers[3].weight.untyped_storage())
    through_data(model)
    assert watch.changed()
    assert replaced.expired()


def test_computing_does_not_count_as_a_change():
    model = Tiny()
    watch = WeightsWatch(model)
    model.layers[0](torch.randn(3, 64, dtype=torch.bfloat16)).sum().backward()
    model.eval()
    assert not watch.changed()


def test_an_engine_that_moves_its_weights_is_watched_by_its_loads():
    model = Tiny()
    watch = WeightsWatch(model, sampled=False)
    merge(model)
    assert not watch.changed()
    model.load_weights([])
    assert watch.changed()
