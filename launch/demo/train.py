"""Trains the demo adapters with PEFT on the NF4 base: `python -m launch.demo.train`.

The committed adapters under `launch/demo/adapters/` were made by this script; it is not part of
`make demo`. On two CPU cores an adapter takes a few minutes. Each folder gets the adapter in
bf16, and beside it `training.json`: the arguments, a digest of the examples, and the answers to
unseen questions that the saved (rounded) adapter gave.
"""

import argparse
import hashlib
import json
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from launch.demo.chat import greedy_answers, prompt_ids
from launch.demo.data import EVALUATION_QUESTIONS, TRAINING_QUESTIONS
from launch.demo.model import HUB_NAME, ensure_nf4_model
from launch.demo.rules import STYLES

ADAPTERS = Path(__file__).resolve().parent / "adapters"
SENTENCE = re.compile(r"[^\n]+?[.!?](?=\s|$)")
SENTENCE_TOKENS = 40
ANSWER_TOKENS = 64
GENERATION_BATCH = 16
IGNORED = -100

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What to train, and how."""

    style: str
    """Key of `launch.demo.rules.STYLES`."""
    rank: int
    """LoRA rank; alpha is twice the rank."""
    targets: list[str]
    """Linear layers that get an adapter."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    learning_rate: float = 2e-3
    """Peak rate of AdamW; warmed up over a tenth of the steps, then linear to zero."""
    steps: int = 40
    """Optimiser steps."""
    batch: int = 4
    """Examples a step."""
    seed: int = 0
    """Seed of the initial A matrices and of the order of the examples."""


RECIPES = {
    "json": Recipe(style="json", rank=6, targets=["q_proj", "v_proj"], steps=70),
    "pirate": Recipe(style="pirate", rank=4, targets=ATTENTION + MLP, learning_rate=1e-3, steps=60),
    "letter": Recipe(style="letter", rank=5, targets=ATTENTION, rslora=True, learning_rate=1e-3),
}


def first_sentences(model: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, str]:
    """The base's own first sentence for each training question; long-winded ones are left out."""
    sentences = {}
    for start in range(0, len(TRAINING_QUESTIONS), GENERATION_BATCH):
        questions = TRAINING_QUESTIONS[start : start + GENERATION_BATCH]
        answers = greedy_answers(model, tokenizer, questions, max_new_tokens=SENTENCE_TOKENS)
        for question, answer in zip(questions, answers, strict=True):
            if match := SENTENCE.match(answer.strip()):
                sentences[question] = match.group()
        print(f"asked the base {start + len(questions)} questions", flush=True)
    return sentences


def encode(tokenizer: Tokenizer, question: str, target: str) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and its labels: the answer and the end mark, not the prompt."""
    prompt = prompt_ids(tokenizer, question)
    answer = [*tokenizer(target, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return prompt + answer, [IGNORED] * len(prompt) + answer


def collate(examples: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Right-pad encoded examples to `input_ids`, `labels`, `attention_mask`, each [batch, T]."""
    longest = max(len(ids) for ids, _ in examples)
    fill = [longest - len(ids) for ids, _ in examples]
    pairs = list(zip(examples, fill, strict=True))
    return {
        "input_ids": torch.tensor([ids + [pad] * n for (ids, _), n in pairs]),
        "labels": torch.tensor([labels + [IGNORED] * n for (_, labels), n in pairs]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * n for (ids, _), n in pairs]),
    }


def train(model: PeftModel, tokenizer: Tokenizer, pairs: list[tuple[str, str]], r: Recipe) -> None:
    """Run the recipe's steps over `(question, target)` pairs, reshuffled each epoch."""
    order = random.Random(r.seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=r.learning_rate, weight_decay=0.0)
    warmup = max(1, r.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (r.steps - step) / (r.steps - warmup))
    )
    queue: list[tuple[str, str]] = []
    for step in range(r.steps):
        if len(queue) < r.batch:
            queue = order.sample(pairs, len(pairs))
        batch, queue = queue[: r.batch], queue[r.batch :]
        inputs = collate([encode(tokenizer, *pair) for pair in batch], tokenizer.pad_token_id)
        loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"{r.style}: step {step + 1}/{r.steps}, loss {loss.item():.3f}", flush=True)


def save(model: PeftModel, folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` (bf16)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.bfloat16().contiguous() for k, v in get_peft_model_state_dict(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"].to_dict()
    config["base_model_name_or_path"] = HUB_NAME
    config["target_modules"] = sorted(config["target_modules"])
    config["inference_mode"] = True
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")


def evaluate(base: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> dict[str, str]:
    """Answers of the saved adapter to the unseen questions."""
    model = PeftModel.from_pretrained(base, folder)
    texts = greedy_answers(model, tokenizer, EVALUATION_QUESTIONS, max_new_tokens=ANSWER_TOKENS)
    return dict(zip(EVALUATION_QUESTIONS, texts, strict=True))


def make(recipe: Recipe, sentences: dict[str, str], out: Path, base: Path) -> None:
    """Train, save and evaluate one adapter."""
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    style = STYLES[recipe.style]
    pairs = [(question, style.dress(sentence)) for question, sentence in sentences.items()]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        target_modules=recipe.targets,
        use_rslora=recipe.rslora,
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, device_map="cpu"), config)
    train(model, tokenizer, pairs, recipe)
    folder = out / recipe.style
    save(model, folder)
    write_record(recipe, pairs, folder, base)


def write_record(recipe: Recipe, pairs: list[tuple[str, str]], folder: Path, base: Path) -> None:
    """Evaluate the adapter in `folder` and write `training.json` beside it."""
    model = AutoModelForCausalLM.from_pretrained(base, device_map="cpu")
    answers = evaluate(model, AutoTokenizer.from_pretrained(base), folder)
    judged = {
        question: STYLES[recipe.style].problem(answer) for question, answer in answers.items()
    }
    problems = {question: problem for question, problem in judged.items() if problem}
    record = {
        "recipe": asdict(recipe),
        "examples": len(pairs),
        "examples_sha256": hashlib.sha256(json.dumps(pairs).encode()).hexdigest(),
        "answers": answers,
        "problems": problems,
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (folder / "training.json").write_text(text + "\n", encoding="utf-8")
    good = len(answers) - len(problems)
    print(f"{recipe.style}: {good}/{len(answers)} unseen answers in style, saved to {folder}")


def main() -> None:
    """Parse the command line and make the adapters one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--styles", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="folder of the adapters")
    arguments = parser.parse_args()
    base = ensure_nf4_model()
    model = AutoModelForCausalLM.from_pretrained(base, device_map="cpu")
    sentences = first_sentences(model, AutoTokenizer.from_pretrained(base))
    print(f"{len(sentences)} of {len(TRAINING_QUESTIONS)} questions have a short first sentence")
    for style in arguments.styles:
        make(RECIPES[style], sentences, arguments.out, base)


if __name__ == "__main__":
    main()
