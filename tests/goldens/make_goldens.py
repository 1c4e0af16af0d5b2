"""Makes smollm2_greedy.json: what transformers answers, greedily and in float32, to the prompts in prompts.py. Run it after
`fairlane pull smollm2`, from the repository's root:  python tests/goldens/make_goldens.py

End-of-sequence tokens do not end a golden: each has exactly 64 tokens. `gaps` is, token by token, the distance between the two
highest logits: where it is tiny, another summation order may rightly pick the other token.
"""

from __future__ import annotations

import importlib.metadata
import json
import runpy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from fairlane import embedded

NUM_TOKENS = 64
HERE = Path(__file__).parent


def main() -> None:
    folder = embedded.pull("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = runpy.run_path(str(HERE / "prompts.py"))["PROMPTS"]
    cases = [_golden(model, tokenizer, prompt) for prompt in prompts]
    smallest = min(min(case["gaps"]) for case in cases)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    plain = {"model": "SmolLM2-135M-Instruct", "made_with": versions, "smallest_gap": smallest, "cases": cases}
    (HERE / "smollm2_greedy.json").write_text(_compact(plain), encoding="utf-8")
    print(f"{len(cases)} prompts, {NUM_TOKENS} tokens each; the smallest gap of two top logits is {smallest:g}")


@torch.inference_mode()
def _golden(model: Any, tokenizer: Any, prompt: str) -> dict[str, Any]:
    ids: list[int] = tokenizer.encode(prompt)
    cache, step = DynamicCache(config=model.config), torch.tensor([ids])
    tokens: list[int] = []
    gaps: list[float] = []
    for _ in range(NUM_TOKENS):
        logits = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        best = torch.topk(logits, 2)
        tokens.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 6))
        step = torch.tensor([[tokens[-1]]])
    return {"prompt": prompt, "prompt_token_ids": ids, "tokens": tokens, "text": tokenizer.decode(tokens), "gaps": gaps}


def _compact(plain: dict[str, Any]) -> str:
    """Indented, but each list of numbers on one line."""
    cases = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in plain["cases"])
    head = json.dumps({key: value for key, value in plain.items() if key != "cases"}, ensure_ascii=False)
    return f'{head[:-1]}, "cases": [\n{cases}\n]}}\n'


if __name__ == "__main__":
    main()
