"""Offline use, as far as it differs from serving."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.helpers.tiny_models import make_checkpoint, make_peft_adapter
from tests.text.tiny_tokenizers import byte_fallback
from tp_engine import LLM, EngineConfig, SamplingParams


def test_a_rank_that_follows_needs_no_tokenizer() -> None:
    followed: list[object] = []
    llm = object.__new__(LLM)
    llm.engine = None
    rank: Any = SimpleNamespace(worker=SimpleNamespace(follow=followed.append))
    llm.rank = rank
    assert llm.generate(["Hello"]) is None
    assert llm.chat([{"role": "user", "content": "Hello"}]) is None
    assert len(followed) == 2


def test_more_prompts_of_a_call_may_wait_for_an_adapter_than_a_server_lets(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "base", "llama")
    lora = {
        name: str(make_peft_adapter(tmp_path / name, model, targets=["q_proj"], seed=seed))
        for seed, name in enumerate("ab")
    }
    count = EngineConfig(model="m").adapter_queue + 1
    options: dict[str, Any] = {"max_model_len": 16, "max_num_seqs": 256, "num_pages": 512}
    with LLM(str(model), lora=lora, adapter_host_memory=8192, **options) as llm:
        assert llm.engine is not None
        (cold,) = (
            name
            for name, card in llm.registry.adapters.items()
            if not llm.engine.roster.is_warm(card.digest)
        )
        answers = llm.generate([[1, 2]] * count, SamplingParams(max_tokens=1), model=cold)
    assert answers is not None and len(answers) == count


def test_a_completion_begins_with_the_space_that_follows_its_prompt(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "base", "llama", vocab_size=320)
    byte_fallback(model)
    with LLM(str(model), max_model_len=16, num_pages=16) as llm:
        tokenizer = llm._tokenizer
        assert tokenizer is not None
        tokenizer._inner.chat_template = "{{ messages[0].content }}"
        (word,) = tokenizer.encode("w", add_special_tokens=False)
        params = SamplingParams(temperature=0, max_tokens=2, logit_bias={word: 100})
        continued = llm.generate("he", params)
        answered = llm.chat([{"role": "user", "content": "he"}], params)
    assert continued is not None and answered is not None
    assert [continued[0].text, answered[0].text] == [" w w", "w w"]
