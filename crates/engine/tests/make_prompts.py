#!/usr/bin/env python3
"""What transformers says of prompts, for `prompts.rs`.

    python3 -m venv /tmp/v && /tmp/v/bin/pip install torch transformers
    /tmp/v/bin/python make_prompts.py ../../model/tests/fixtures/llama3 data/prompts.json

For each prompt (those of the fixture's `expected.json`, and a long one): the `logprobs` of every
token but the first after those before it, their `ranks` from 1, the three likeliest tokens at each
place (`top`) with their logprobs, and the mean of the normed states of all tokens (`mean_state`).
In 64-bit floating point.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

folder, output = map(Path, sys.argv[1:])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
fixture = json.loads((folder / "expected.json").read_text())
prompts = [sequence["input_ids"] for sequence in fixture["sequences"]]
prompts.append([(i * i * 7 + i * 31 + 11) % 250 for i in range(110)])
found = []
for prompt in prompts:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        states = model.model(ids).last_hidden_state[0]
        logprobs = torch.log_softmax(model.lm_head(states), -1)[:-1]
    own = logprobs.gather(1, ids[0, 1:, None])
    top = logprobs.topk(3, -1)
    found.append({
        "tokens": prompt,
        "logprobs": [round(x, 6) for x in own[:, 0].tolist()],
        "ranks": (1 + (logprobs > own).sum(-1)).tolist(),
        "top": top.indices.tolist(),
        "top_logprobs": [[round(x, 6) for x in row] for row in top.values.tolist()],
        "mean_state": [round(x, 6) for x in states.mean(0).tolist()],
    })
versions = {"transformers": transformers.__version__, "torch": torch.__version__}
text = [json.dumps(prompt, separators=(",", ":")) for prompt in found]
output.write_text(json.dumps(versions)[:-1] + ', "prompts": [\n' + ",\n".join(text) + "\n]}\n")
