"""Logits of the small random models by transformers on this machine's GPU, in bf16.

Usage: python transformers_logits.py FIXTURES OUT.json    (torch, transformers, a GPU)

FIXTURES is crates/model/tests/fixtures. OUT.json maps each folder to the sequences of its
expected.json with what this GPU gives; `cuda_logits CACHE fixtures FIXTURES OUT.json` compares.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def sequence(model, ids):
    with torch.no_grad():
        logits = model(torch.tensor([ids], device="cuda")).logits[0].float().cpu()
    top = logits.topk(2).values
    return {
        "input_ids": ids,
        "argmax": logits.argmax(-1).tolist(),
        "margin": (top[:, 0] - top[:, 1]).tolist(),
        "last_logits": logits[-3:].tolist(),
    }


def main():
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    results = {}
    for expected in sorted(folder.glob("*/expected.json")):
        path = expected.parent
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="eager"
        ).cuda()
        inputs = [s["input_ids"] for s in json.loads(expected.read_text())["sequences"]]
        results[path.name] = {"sequences": [sequence(model.eval(), ids) for ids in inputs]}
    out.write_text(json.dumps(results))


main()
