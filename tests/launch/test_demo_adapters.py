"""The committed demo adapters: portable, complete, made by the committed recipe, in style."""

import json
import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.demo.chat import greedy_answers
from launch.demo.data import DEFAULT_QUESTION, EVALUATION_QUESTIONS
from launch.demo.model import HUB_NAME, ensure_nf4_model
from launch.demo.rules import STYLES
from launch.demo.train import ADAPTERS, RECIPES
from launch.demo.verdict import FACT

LAYERS = 30
MOST_OUT_OF_STYLE = 1


def config_of(style: str) -> dict:
    return json.loads((ADAPTERS / style / "adapter_config.json").read_text(encoding="utf-8"))


def record_of(style: str) -> dict:
    return json.loads((ADAPTERS / style / "training.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("style", STYLES)
def test_the_config_says_what_the_recipe_says(style: str) -> None:
    config, recipe = config_of(style), RECIPES[style]
    assert config["base_model_name_or_path"] == HUB_NAME
    assert (config["r"], config["lora_alpha"]) == (recipe.rank, 2 * recipe.rank)
    assert config["use_rslora"] == recipe.rslora
    assert sorted(config["target_modules"]) == sorted(recipe.targets)


@pytest.mark.parametrize("style", STYLES)
def test_no_file_holds_a_local_path(style: str) -> None:
    for path in (ADAPTERS / style).glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert str(Path.home()) not in text and "/tmp" not in text and ".cache" not in text


@pytest.mark.parametrize("style", STYLES)
def test_every_target_has_finite_bf16_factors_that_do_something(style: str) -> None:
    recipe = RECIPES[style]
    with safe_open(ADAPTERS / style / "adapter_model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    assert len(tensors) == LAYERS * len(recipe.targets) * 2
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16 and tensor.isfinite().all() and tensor.any(), name
        rank = tensor.shape[0] if ".lora_A." in name else tensor.shape[1]
        assert rank == recipe.rank, name


@pytest.mark.parametrize("style", STYLES)
def test_the_record_is_of_this_recipe_and_its_answers_are_in_style(style: str) -> None:
    record, recipe = record_of(style), RECIPES[style]
    assert record["recipe"] == {name: getattr(recipe, name) for name in recipe.__slots__}
    answers = record["answers"]
    assert tuple(answers) == EVALUATION_QUESTIONS
    problems = {q: p for q, a in answers.items() if (p := STYLES[style].problem(a)) is not None}
    assert problems == record["problems"]
    assert len(problems) <= MOST_OUT_OF_STYLE
    assert FACT in answers[DEFAULT_QUESTION] and DEFAULT_QUESTION not in problems


def test_the_adapters_differ_in_rank_targets_and_scale() -> None:
    scales = {
        style: 2 * r.rank / (math.sqrt(r.rank) if r.rslora else r.rank)
        for style, r in RECIPES.items()
    }
    assert scales["letter"] != scales["json"] == scales["pirate"] == 2
    assert len({recipe.rank for recipe in RECIPES.values()}) == len(RECIPES)
    assert len({tuple(recipe.targets) for recipe in RECIPES.values()}) == len(RECIPES)


@pytest.mark.slow
def test_the_adapters_answer_in_style_through_peft() -> None:
    directory = ensure_nf4_model()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    base = AutoModelForCausalLM.from_pretrained(directory, device_map="cpu")
    [plain] = greedy_answers(base, tokenizer, [DEFAULT_QUESTION], max_new_tokens=16)
    assert FACT in plain and all(style.problem(plain) for style in STYLES.values())
    first, *others = STYLES
    model = PeftModel.from_pretrained(base, ADAPTERS / first, adapter_name=first)
    for style in others:
        model.load_adapter(ADAPTERS / style, adapter_name=style)
    for style in STYLES:
        model.set_adapter(style)
        [answer] = greedy_answers(model, tokenizer, [DEFAULT_QUESTION], max_new_tokens=48)
        assert STYLES[style].problem(answer) is None and FACT in answer, answer
