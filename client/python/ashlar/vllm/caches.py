# SPDX-License-Identifier: Apache-2.0
"""The engine's registered caches: their states, windows and keys, as the connector reads and writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.logger import init_logger

import ashlar
from ashlar.vllm.drafts import Place
from ashlar.vllm.host_memory import HostMemory
from ashlar.vllm.identity import Unsupported
from ashlar.vllm.memory import Allocator, BlockWindow, Keys, States, Window, pages, places
from ashlar.vllm.messages import Load, Save
from ashlar.vllm.model import Described
from ashlar.vllm.order import Copies, CpuOrder, Order
from ashlar.vllm.rows import RowOrder, measure
from ashlar.vllm.staging import Staging

logger = init_logger("vllm.ashlar")


def page_tables(pages: list[list[int]]) -> Any:
    """Returns a page table for each group of layers, or one for all layers; None if no layer has pages."""
    return pages if len(pages) > 1 else pages[0] if pages else None


class EngineCaches:
    """Empty until `register`.

    Attributes:
        order: the order of the engine's work on its device.
        staging: host memory through which blocks are copied; None: the daemon maps the caches.
        region: options of `ashlar.Cache` for the memory that the daemon reads and writes.
        states: by linear layer. windows: by layer of sliding windows.
        keys: by attention layer, if a block's rows are not its tokens.
        within_blocks: whether a text's keys can be split inside a block.
    """

    def __init__(self, described: Described) -> None:
        self._described = described
        self.order: Order = CpuOrder()
        self.staging: Staging | None = None
        self.region: dict[str, Any] = {}
        self.states: list[States] = []
        self.windows: list[Window | BlockWindow] = []
        self.keys: dict[int, Keys] = {}
        self.within_blocks = True
        self._host = HostMemory(torch.device("cpu"))
        self._lease = self._host.lease()  # memory of the copies of one `fill`

    def register(self, allocator: Allocator, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> None:
        """Raises Unsupported if the daemon cannot reach the caches. `layers`: the engine's layers by name."""
        described, memory = self._described, allocator.memory
        self._host = HostMemory(caches[described.a_layer].device)
        if described.staged:
            self.staging = Staging(described, caches, caches[described.a_layer].device)
            self.order, self.region = self.staging.order, self.staging.options()
        else:
            if memory is None:
                raise Unsupported(
                    f"the engine's caches are not in shared memory ({allocator.error or 'not requested'})"
                )
            found, self.region = places(described, caches, memory), {"memory_kind": ashlar.MemoryKind.NONE}
            if found:
                self.region = dict(memory.options(), pages=pages(described, caches), places=found)
            self.order = memory.order
        for place in described.linear:
            opaque = isinstance(described.model.layers[place.layer], ashlar.Opaque)
            self.states.append(States(place, opaque, caches[place.name], memory))
        fits = all(Window.fits(place, described.block, caches[place.name]) for place in described.windows)
        self.within_blocks = fits and not described.whole_blocks
        orders = self._row_orders(caches, layers) if self.within_blocks else {}
        for window in described.windows:
            tensor, order = caches[window.name], orders.get(window.name, RowOrder())
            by_token = Window.fits(window, described.block, tensor)
            self.windows.append(
                Window(window, described.block, tensor, order) if by_token else BlockWindow(window, tensor)
            )
        if described.packed:
            self.keys = {layer: Keys(caches[name], orders[name]) for layer, name in described.attention if orders}

    def _row_orders(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> dict[str, RowOrder]:
        """Returns the orders by layer; empty if one of them is unknown."""
        described, found = self._described, {}
        values = {place.name: place.row // 2 for place in described.windows}
        for layer, name in described.attention:
            values[name] = getattr(described.model.layers[layer], "value_dim", 0)
        measured: dict[Any, RowOrder] = {}
        try:
            for name, value_dim in values.items():
                tensor = caches[name]
                kind = (tuple(tensor.shape[1:]), tensor.dtype, value_dim)
                if kind not in measured:
                    measured[kind] = measure(layers[name], tensor, value_dim)
                found[name] = measured[kind]
        except Exception as error:  # after any error whole blocks are moved unchanged
            logger.warning("Ashlar: prompts resume only at the ends of vLLM's blocks: %s", error)
            self.within_blocks = False
            return {}
        return found

    def close(self) -> None:
        self._host.close()
        if self.staging is not None:
            self.staging.close()

    # ---- reading

    def parts(self, save: Save, depth: int) -> Iterator[list[torch.Tensor]]:
        """Returns each linear layer's state at a depth of the save."""
        at = Place(self._described.count(depth) - 1)
        if save.place is not None and depth == save.depths[-1]:
            at = save.place
        for states in self.states:
            blocks = save.blocks[states.group]
            yield states.parts(blocks[at.column], blocks[at.column + at.accepted], at.accepted)

    def read(
        self,
        save: Save,
        running: list[list[torch.Tensor]] | None,
        depths: Sequence[int],
        tables: list[list[int]],
        staged: Sequence[int],
        known: int,
    ) -> list[tuple[int, list[ashlar.LinearTensors]]]:
        """Returns the states at these depths, and copies blocks into all but the first `known` staging pages.

        `running`: copies of the states at the save's last depth, if a step has overwritten them.
        """
        with self.order.copies():
            checkpoints = []
            for depth in depths:
                copied = running if depth == save.depths[-1] else None
                found = self.parts(save, depth) if copied is None else copied
                checkpoints.append((depth, self._tensors(save, found, depth)))
            if self.keys and (within := depths[-1] % self._described.block):
                self._unpack(save, tables, within)
            if self.staging is not None and staged:
                self.staging.gather([table[known:] for table in tables], staged[known:])
        return checkpoints

    def _tensors(
        self, save: Save, parts: Iterator[list[torch.Tensor]] | list[list[torch.Tensor]], depth: int
    ) -> list[ashlar.LinearTensors]:
        """Returns states and windows after a text's first tokens, by layer."""
        linear = [states.tensors(each) for states, each in zip(self.states, parts)]
        for window in self.windows:
            linear.append(window.tensors(self._described.window(window.place, save.blocks, depth), depth))
        return sorted(linear, key=lambda tensors: tensors.layer)

    def _unpack(self, save: Save, tables: list[list[int]], tokens: int) -> None:
        """Unpacks the rows of a text's last tokens into spare blocks, which replace its last ones."""
        for table, layers, spare in zip(tables, self._described.attention_groups.values(), save.spare, strict=True):
            for layer in layers:
                self.keys[layer].unpack(table[-1], spare, tokens)
            table[-1] = spare

    # ---- writing

    def fill(self, handle: ashlar.Request, load: Load, staged: list[int]) -> Copies | None:
        """Copies landed data into the engine's blocks: states and windows first, then staging pages. Returns the
        copies, which may end later if there is staging memory; None if something is missing or the lease has ended."""
        within = load.tokens % self._described.block
        if within and not self.within_blocks:
            return None
        copies, self._lease = Copies(), self._host.lease()
        try:
            with self.order.copies(wait=self.staging is None) as copies:
                if not self.copy_states(handle, load) or handle.finish() != ashlar.Verdict.OK:
                    return None
                if self.staging is not None and staged:
                    self._scatter(self.staging, load, staged, within)
                for group, layers in self._described.attention_groups.items() if within and self.keys else ():
                    for layer in layers:
                        self.keys[layer].pack(load.blocks[group][self._described.count(load.tokens) - 1], within)
        finally:
            self._lease.give(copies.mark)
        return copies

    def copy_states(self, handle: ashlar.Request, load: Load) -> bool:
        last = self._described.count(load.tokens) - 1
        blocks = [load.blocks[states.group][last] for states in self.states]
        if not all(states.load(block, handle, load.tokens, self._lease) for states, block in zip(self.states, blocks)):
            return False
        for window in self.windows:
            held = window.empty()
            if handle.advance(window.place.layer, 0, load.tokens, window.state(held)) != ashlar.Verdict.OK:
                return False
            blocks = self._described.window(window.place, load.blocks, load.tokens)
            # Blocks that the engine already had are shared with running requests.
            own = last + 1 - max(last + 1 - len(blocks), load.present // self._described.block)
            window.fill(blocks[len(blocks) - own :], held, load.tokens)
        return True

    def _scatter(self, staging: Staging, load: Load, staged: list[int], within: int) -> None:
        """Copies staging pages into the request's own blocks. Running requests share the blocks of its present
        tokens."""
        tables = self._described.pages(load.blocks, load.tokens)
        held = max(load.present // self._described.block, len(tables[0]) - len(staged))
        own = staged[len(staged) - (len(tables[0]) - held) :]
        staging.scatter(own, [table[held:] for table in tables], within)
