"""A worker without a model: its "keys and values" are the tokens themselves.

It keeps an arena of pages like a rank does, writes each row's token into the page that the plan
names, and reads a sequence's whole context back from its pages to choose the next token. So any
fault of scheduling, paging, prefix sharing or slots changes an output, as it would with a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tp_engine.adapters.errors import OutOfMemory
from tp_engine.engine import Engine
from tp_engine.memory import PageLayout
from tp_engine.messages import Output, Submit
from tp_engine.params import SamplingParams
from tp_engine.ranks.background import Ended
from tp_engine.requests.admission import EngineLimits
from tp_engine.steps.plan import LAST_SAMPLED, NO_ADAPTER, PlanKind, SlotInit, StepPlan

VOCAB = 50
BLOCK = 4
EOS = 0
LAYOUT = PageLayout(block_tokens=BLOCK, page_bytes=128, dtype=torch.float32)


def next_token(adapter: str, context: list[int]) -> int:
    """What the model says after some tokens; depends on all of them and on the adapter."""
    data = f"{adapter}:{context}".encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "little") % VOCAB


def solo(adapter: str, prompt: list[int], params: SamplingParams) -> list[int]:
    """The output of a request that has the engine to itself, the end token included."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < (params.max_tokens or 0):
        tokens.append(next_token(adapter, tokens))
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


class FakeWorker:
    """Stands in for `tp_engine.steps.worker.Worker`."""

    def __init__(self, pages: int, slots: int, blocks: int) -> None:
        self.pages: list[list[Any]] = [[None] * BLOCK for _ in range(pages)]
        self.tables = [[-1] * blocks for _ in range(slots)]
        self.last: list[int | None] = [None] * slots
        self.images: dict[int, str] = {}
        self.descriptors: dict[int, tuple[str, list[int]]] = {}
        self.plans: list[StepPlan] = []
        self._under_way: list[tuple[int, str]] = []
        self.copying: list[tuple[int, int, list[int]]] = []
        self.stopped = False
        """While it is set, nothing that is under way moves."""
        self.shortage: OutOfMemory | None = None
        """Of another rank, while it is set."""
        self.runner = SimpleNamespace(arena=SimpleNamespace(layout=LAYOUT), forward_calls=0)
        self.channel = SimpleNamespace(send=lambda plan: None)

    def run(self, plan: StepPlan, images: list[Any] | None = None) -> SimpleNamespace | None:
        plan = StepPlan.decode(plan.encode())
        self.plans.append(plan)
        numbers = plan.adapter.tolist()
        if plan.kind is PlanKind.DELIVER:
            assert images is not None
            self._under_way.append((numbers[0], images[0].name))
            return None
        if plan.kind is PlanKind.COPY:
            assert numbers[0] in self.images
            self.copying.append((numbers[0], numbers[1], numbers[2:]))
            return None
        if plan.kind is PlanKind.CAPTURE:
            return None
        if plan.kind is PlanKind.FORGET:
            assert numbers[0] not in [handle for handle, *_ in self.copying]
            del self.images[numbers[0]]
            return None
        for init in SlotInit.decode_all(plan.opens):
            self.last[init.slot] = None
        for slot, index, page in plan.page_updates.reshape(-1, 3).tolist():
            self.tables[slot][index] = page
        self.runner.forward_calls += 1
        return self._pass(plan)

    def arrived(self) -> list[Ended]:
        """What is delivered arrives when it is asked for, unless some rank is short of memory."""
        if self.stopped:
            return []
        arrived, self._under_way = self._under_way, []
        self.images |= dict(arrived)
        return [Ended(handle, self.shortage) for handle, _ in arrived]

    def landed(self) -> list[Ended]:
        """What is copied is complete when it is asked for."""
        if self.stopped:
            return []
        copying, self.copying = self.copying, []
        for handle, descriptor, pages in copying:
            for page in pages:
                self.pages[page] = [self.images[handle]] * BLOCK
            self.descriptors[descriptor] = (self.images[handle], pages)
        return [Ended(handle, self.shortage) for handle, *_ in copying]

    def _adapter(self, descriptor: int) -> str:
        if descriptor == NO_ADAPTER:
            return ""
        name, pages = self.descriptors[descriptor]
        for page in pages:
            assert self.pages[page] == [name] * BLOCK, f"{name} was overwritten"
        return name

    def _pass(self, plan: StepPlan) -> SimpleNamespace:
        adapters: list[str] = []
        for rows, descriptor in plan.segments.reshape(-1, 2).tolist():
            adapters += [self._adapter(descriptor)] * rows
        tokens, row, chosen = plan.tokens.tolist(), 0, []
        for slot, rows, context, samples in plan.sequences.reshape(-1, 4).tolist():
            for position in range(context - rows, context):
                token = tokens[row]
                if token == LAST_SAMPLED:
                    token = self.last[slot]
                    assert token is not None, "LAST_SAMPLED in a slot that has sampled nothing"
                self.pages[self.tables[slot][position // BLOCK]][position % BLOCK] = token
                row += 1
            if samples:
                seen = [
                    self.pages[self.tables[slot][i // BLOCK]][i % BLOCK] for i in range(context)
                ]
                self.last[slot] = next_token(adapters[row - 1], seen)
                chosen.append(self.last[slot])
        assert row == len(tokens) == len(adapters)
        return SimpleNamespace(
            tokens=torch.tensor(chosen, dtype=torch.int64),
            failed=torch.zeros(len(chosen), dtype=torch.bool),
            logprobs=[None] * len(chosen),
        )


class FakeImage(SimpleNamespace):
    """Page images by name only."""


def image(name: str, pages: int = 2) -> FakeImage:
    """An adapter's image, whose content is its name."""
    return FakeImage(
        name=name,
        pages=torch.zeros((pages, LAYOUT.page_bytes), dtype=torch.uint8),
        record=torch.zeros(8, dtype=torch.int64),
        row_bytes=0,
    )


def fetch_image(digest: str) -> list[Any]:
    """What the store has: adapters of two pages."""
    return [image(digest)]


def make_engine(
    pages: int = 32,
    *,
    slots: int = 4,
    budget: int = 8,
    max_model_len: int = 64,
    prefix_caching: bool = True,
    descriptor_words: int = 1000,
    host_pages: int = 1000,
    adapter_queue: int = 1000,
    fetch: Callable[[str], list[Any]] = fetch_image,
    depth: int = 1,
) -> tuple[Engine, FakeWorker]:
    """An engine over a fake worker."""
    limits = EngineLimits(
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        num_pages=pages,
        descriptor_words=descriptor_words,
        idle_adapter_pages=pages,
        host_pages=host_pages,
        adapter_queue=adapter_queue,
        prefix_caching=prefix_caching,
        eos_ids=(EOS,),
        kv_dtype="float32",
        base_digest="base",
    )
    worker = FakeWorker(pages, slots, LAYOUT.blocks(max_model_len))
    engine = Engine(
        worker,  # type: ignore[arg-type]  # stands in for the real one
        limits,
        fetch=fetch,
        seed=0,
        depth=depth,
    )
    return engine, worker


def add_adapter(engine: Engine, name: str, pages: int = 2) -> Any:
    """Register an adapter; gives its revision."""
    revision = SimpleNamespace(digest=name, max_rank=4, traits=0, source=name)
    engine.roster.register(name, revision, [image(name, pages)])  # type: ignore[arg-type]
    return revision


def submit(
    engine: Engine,
    request_id: str,
    prompt: list[int],
    params: SamplingParams,
    revision: Any = None,
    salt: str = "",
    model: str = "m",
) -> None:
    """Queue one request."""
    message = Submit(request_id=request_id, model=model, prompt=prompt, params=params, salt=salt)
    engine.submit(message, revision.digest if revision else "")


def drive(engine: Engine, steps: int = 10_000) -> dict[str, list[int]]:
    """Step until nothing is open, checking the books each time; the outputs by request."""
    outputs: dict[str, list[int]] = {}
    for _ in range(steps):
        if not engine.requests:
            return outputs
        for output in engine.step():
            assert isinstance(output, Output)
            ended = [] if output.stop_token is None else [output.stop_token]
            outputs.setdefault(output.request_id, []).extend(output.tokens + ended)
        assert engine.check_integrity() == []
    raise AssertionError(f"{len(engine.requests)} requests did not end in {steps} steps")
