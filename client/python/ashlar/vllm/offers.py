# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of saves: chooses the depths whose states are offered, and holds their blocks until the workers
have saved them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.request import RequestStatus

from ashlar.vllm.drafts import Place, Step
from ashlar.vllm.events import stored_events
from ashlar.vllm.jumps import Jumps
from ashlar.vllm.messages import Save
from ashlar.vllm.model import Described
from ashlar.vllm.options import Options
from ashlar.vllm.requests import Followed, Names
from ashlar.vllm.stats import AshlarStats

_MOST_DEPTHS = 64  # depths per commit
_REWRITTEN = 8  # last tokens of a prompt that a chat template writes differently in the next turn
_WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED)


class Offers:
    def __init__(
        self,
        described: Described,
        options: Options,
        names: Names,
        jumps: Jumps,
        stats: AshlarStats,
        ranks: int,
        least: int,
        event_tokens: int,
    ) -> None:
        """Depths are at least `least` tokens apart. `event_tokens`: 0 if no events are published."""
        self._described, self._options, self._names, self._jumps = described, options, names, jumps
        self._stats, self._ranks, self._least, self._event_tokens = stats, ranks, least, event_tokens
        # Tokens of the longest prompt whose exact end is offered: a longer one loses less than 4 % without it.
        self._short = 0 if described.linear or described.windows else described.grain
        self._pool: Any = None
        self._number = 0
        self._under_way: dict[int, tuple[list[Any], Save, Any]] = {}  # saves in flight, with the blocks held for them
        self._left: dict[int, int] = {}  # number of ranks that have not ended a save
        self._kept: Counter[int] = Counter()
        self._happened: list[Any] = []

    def bind(self, pool: Any) -> None:
        self._pool = pool

    @property
    def under_way(self) -> bool:
        """Whether blocks are held for saves."""
        return bool(self._under_way)

    def offer(
        self, followed: Followed, computed: int, end: int, block_ids: Callable[[], Sequence[list[int]] | None]
    ) -> Save | None:
        """Returns a save of a step that computes the tokens [computed, end).

        `block_ids`: returns the request's blocks. This copies its tables, so it is called only for a save.
        """
        if followed.mixed:
            return None
        request = followed.request
        if followed.present is None:
            followed.present = computed
        saved = max(followed.saved, followed.present)
        if self._described.linear:
            depths = self._ends(computed, end, saved, request.num_prompt_tokens)
        else:
            prompt = request.num_prompt_tokens
            wanted = [*followed.wanted, prompt - _REWRITTEN, *([prompt] if prompt <= self._short else [])]
            depths = self._depths(end, saved, wanted)
        # A step may be scheduled before its tokens are known. Tokens after a jump are not exact, and a prompt that
        # resumes where a jump begins could not jump there.
        exact = self._jumps.exact_tokens(request)
        most = request.num_tokens if exact is None else min(request.num_tokens, exact - 1)
        depths = [depth for depth in depths if depth <= most]
        if not depths or (ids := block_ids()) is None or (save := self._hold(followed, depths, ids)) is None:
            return None
        save.running = save.depths[-1] % self._described.block != 0
        return save

    def offer_end(self, followed: Followed, ids: Sequence[list[int]]) -> Save | None:
        """Returns a save of an ended request's decoded tokens, up to its last computed one. No step overwrites its
        states again."""
        request, end = followed.request, followed.request.num_computed_tokens
        if followed.mixed or self._jumps.exact_tokens(request) is not None:
            return None
        # A step that was scheduled ahead may still continue from these states.
        if request.status not in _WHOLE or request.num_in_flight_tokens > 0:
            return None
        place = None
        if self._described.drafts:
            depth = min(end, request.num_tokens)  # fewer than `end` if a draft before the last one is a stop token
            place = followed.step.place(depth, end, self._described.block) if followed.step is not None else None
            end = 0 if place is None else depth
        prompt, saved = request.num_prompt_tokens, followed.saved
        if prompt <= self._short:  # the prompt's exact end does not replace the end of a short answer
            saved = min(saved, prompt - _REWRITTEN)
        if not prompt < end <= request.num_tokens or end - saved < self._least:
            return None
        return self._hold(followed, [end], ids, place)

    def prefill_end(self, followed: Followed, start: int, end: int) -> int:
        """Returns the latest end of a hybrid's prefill step, so that the cache gets the states that it requested."""
        request, tail = followed.request, self._options.checkpoint_tokens
        if followed.mixed:
            return end
        exact = self._jumps.exact_tokens(request)
        if exact is not None and start >= exact:  # none of its states is saved
            return end
        if self._described.drafts:  # vLLM's own stop is a block earlier if EAGLE or MTP drafts, and none with Mamba-2
            last = (request.num_tokens - 1) // self._described.block * self._described.block
            end = last if start < last < end else end
        if tail == 0:
            return end
        stops = [*followed.wanted, request.num_prompt_tokens - tail]
        stop = min((each for each in stops if start + self._least <= each < end), default=end)
        # The end of the last block before that also has a state: the engine's own cache only uses states at block ends.
        whole = stop // self._described.block * self._described.block
        return whole if stop < end and start < whole else stop

    def note_drafts(self, followed: Followed, tokens: int, drafts: int) -> None:
        """Notes where a step leaves its states, which is needed when the request ends."""
        if self._described.drafts:
            request = followed.request
            # A step in flight may end with rejected drafts, which `note_accepted` learns.
            start = None if request.num_in_flight_tokens > 0 else request.num_computed_tokens
            followed.step = Step(start, tokens, drafts)

    def note_accepted(self, all_followed: Iterable[Followed]) -> None:
        """Call it after the engine has processed a step's tokens."""
        for followed in all_followed if self._described.drafts else ():
            request, step = followed.request, followed.step
            if step is not None and step.start is None and request.num_in_flight_tokens == step.tokens:
                step.start = request.num_computed_tokens - step.tokens

    def saved(self, number: int, ranks: int, kept: int) -> None:
        """Call it when ranks have ended a save; `kept`: how many of them stored it."""
        if number not in self._under_way:
            return
        left = self._left.pop(number, self._ranks) - ranks
        self._kept[number] += kept
        if left > 0:
            self._left[number] = left
            return
        held, save, request = self._under_way.pop(number)
        self._pool.free_blocks(reversed(held))
        if self._kept.pop(number, 0) == self._ranks and self._event_tokens:
            self._happened += stored_events(request, save.depths[-1], self._event_tokens)

    def take_events(self) -> list[Any]:
        happened, self._happened = self._happened, []
        return happened

    def _hold(
        self, followed: Followed, depths: list[int], ids: Sequence[list[int]], place: Place | None = None
    ) -> Save | None:
        """Returns a save of the depths whose blocks exist, and holds these blocks until it has ended.

        `place`: the place of the states at a single depth, by default the block of the last token.
        """
        named = self._names.find(followed)
        if named is None or (named.adapter is not None and followed.first_step < named.adapter.step):
            return None
        if len(self._under_way) >= self._options.saves_in_flight:
            self._stats.add(1, "stores", "busy")
            return None
        request, block, most = followed.request, self._described.block, self._described.most_tokens
        if most is not None and depths[-1] > most:
            self._stats.add(1, "stores", "too_long")
            depths = [depth for depth in depths if depth <= most]
        spare: list[Any] = []
        if self._described.packed and any(depth % block for depth in depths):
            if self._pool.get_num_free_blocks() < len(self._described.attention_groups):
                depths = [depth for depth in depths if depth % block == 0]
            else:
                spare = self._pool.get_new_blocks(len(self._described.attention_groups))
        needed: dict[int, None] = {}
        kept = []
        for depth in depths:
            held = self._described.resumes_from(ids, depth, place)
            if held:
                kept.append(depth)
                needed.update(dict.fromkeys(held))
        if not kept:
            self._pool.free_blocks(spare)
            return None
        text = kept[-1]
        self._number += 1
        tokens: npt.NDArray[np.int32] = np.array(request.all_token_ids[:text], np.int32)
        count = self._described.count(text)
        if place is not None:
            count = max(count, place.column + place.accepted + 1)
        blocks = tuple(table[:count] for table in ids)
        prompt, media = request.num_prompt_tokens, named.within(text)
        save = Save(self._number, tokens, kept, blocks, prompt, named.salt, media, named.adapter)
        save.place = place
        touched = [self._pool.blocks[i] for i in needed]
        self._pool.touch(touched)
        save.spare = [each.block_id for each in spare]
        self._under_way[save.number] = (touched + spare, save, request)
        followed.saved = text
        followed.depths += kept
        return save

    def _ends(self, computed: int, end: int, saved: int, prompt: int) -> list[int]:
        """Returns the depths of a text with linear layers: the step's end, and the end of the last block before it if
        that state is kept."""
        block = self._described.block
        within = (end - 1) // block * block
        depths = []
        # After the step's first block, either a block has the state, or the null block takes its place.
        if self._described.keeps_within and computed % block == 0 and saved < within >= computed + block:
            depths, saved = [within], within
        if end > saved and (end % block == 0 or saved + self._least <= end <= prompt):
            depths.append(end)
        return depths

    def _depths(self, end: int, saved: int, wanted: list[int]) -> list[int]:
        """Returns the depths of a text without linear layers: multiples of the grain, and the requested depths."""
        grain = self._described.grain
        found = set(range(saved // grain * grain + grain, end + 1, grain))
        depths = sorted(found.union(depth for depth in wanted if saved + self._least <= depth <= end))
        while len(depths) > _MOST_DEPTHS:
            depths = depths[-1::-2][::-1]
        return depths
