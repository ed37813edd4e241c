"""The same requests without HTTP: the engine in this process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launch.bench.load.server import Made
from launch.bench.load.workload import Request
from launch.options import read_options

if TYPE_CHECKING:
    from tp_engine import LLM


def offline_figures(
    made: Made, options: Sequence[str], runs: Sequence[Sequence[Request]], streams: int
) -> dict[str, Any]:
    """Tokens a second of the last of several runs, with at most ``streams`` requests at a time.

    The engine is built from the options that the server had. A run's requests are queued at once:
    whenever one ends the next begins, as in a closed loop of so many streams.
    """
    from tp_engine import LLM  # not above: client processes do without torch
    from tp_engine.steps.warm_up import warm_up

    parsed = read_options([*made.options(), *options], environ={}).config.engine
    config = dataclasses.replace(parsed, max_num_seqs=streams)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    model, lora = fields.pop("model"), dict(fields.pop("lora"))
    with LLM(model, lora=lora, **fields) as llm:
        assert llm.engine is not None
        gpu = llm.rank.comm.device.type == "cuda"
        warm_up(llm.engine, gpu=gpu, max_rank=config.max_lora_rank or 0)
        for requests in runs:
            seconds = _generate(llm, requests)
    tokens = sum(request.tokens for request in runs[-1])
    return {"tokens_per_s": round(tokens / seconds, 1), "seconds": round(seconds, 3)}


def _generate(llm: LLM, requests: Sequence[Request]) -> float:
    """Seconds for all requests."""
    from tp_engine import SamplingParams

    params = [
        SamplingParams(temperature=0.0, max_tokens=request.tokens, ignore_eos=True)
        for request in requests
    ]
    start = time.perf_counter()
    answers = llm.generate(
        [request.prompt for request in requests],
        params,
        model=[request.model for request in requests],
    )
    seconds = time.perf_counter() - start
    assert answers is not None
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer.tokens) == request.tokens, f"request {request.index} is too short"
    return seconds
