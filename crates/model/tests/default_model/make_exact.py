#!/usr/bin/env python3
"""Log-probabilities of SmolLM2-135M-Instruct.Q4_1.gguf in double precision, for `default_model.rs`.

    python3 -m venv /tmp/v && /tmp/v/bin/pip install gguf==0.19.0 numpy==2.4.6
    /tmp/v/bin/python make_exact.py MODEL.gguf ../data/smollm2_greedy_refs.json

A forward pass in numpy over the weights as the `gguf` package dequantises them, along the 12 texts
of the references. What llama.cpp computes "in f32" from the same weights differs from this by up to
0.008 in ten of the texts and 0.047 in the two longest; arithmetic that really is f32 throughout
comes within 0.001.

`exact.json` holds for each text: `tokens`, prompt and output together; `first`, the length of the
prompt; and for each token from there on its `logprobs`, the likeliest token there (`top`) and the
`margin` by which it leads the second.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
LAYERS, EPS, THETA = 30, float(np.float32(1e-5)), 100_000.0


def rms_norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def rotate(x, angles):
    """Pairs are neighbours. x: [tokens, heads, HEAD_DIM]."""
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def attention(q, k, v):
    """Head by head, since all scores of the longest text together would not fit in memory."""
    out = np.empty_like(q)
    hidden = ~np.tri(len(q), dtype=bool)
    for head in range(HEADS):
        kv_head = head * KV_HEADS // HEADS
        scores = q[:, head] @ k[:, kv_head].T / np.sqrt(HEAD_DIM)
        scores[hidden] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, kv_head]
    return out.reshape(len(q), -1)


def logits(weights, tokens, first):
    """Logits after each token from place `first` on."""
    angles = np.arange(len(tokens))[:, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    x = weights["token_embd.weight"][tokens]
    for layer in range(LAYERS):

        def project(x, name, layer=layer):
            return x @ weights[f"blk.{layer}.{name}.weight"].T

        normed = rms_norm(x, weights[f"blk.{layer}.attn_norm.weight"])
        q = rotate(project(normed, "attn_q").reshape(-1, HEADS, HEAD_DIM), angles)
        k = rotate(project(normed, "attn_k").reshape(-1, KV_HEADS, HEAD_DIM), angles)
        v = project(normed, "attn_v").reshape(-1, KV_HEADS, HEAD_DIM)
        x = x + project(attention(q, k, v), "attn_output")
        normed = rms_norm(x, weights[f"blk.{layer}.ffn_norm.weight"])
        gate = project(normed, "ffn_gate")
        x = x + project(gate / (1 + np.exp(-gate)) * project(normed, "ffn_up"), "ffn_down")
    return rms_norm(x[first:], weights["output_norm.weight"]) @ weights["token_embd.weight"].T


def main():
    model, references = sys.argv[1:]
    weights = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        for tensor in gguf.GGUFReader(model).tensors
    }
    lines = []
    for prompt in json.loads(Path(references).read_text())["prompts"]:
        first, output = len(prompt["prompt_ids"]), prompt["token_ids"]
        tokens = prompt["prompt_ids"] + output
        rows = logits(weights, tokens[:-1], first - 1)
        rows -= rows.max(-1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
        second, best = np.sort(rows, axis=-1)[:, -2:].T
        logprobs = rows[np.arange(len(output)), output]
        line = {
            "name": prompt["name"],
            "first": first,
            "tokens": tokens,
            "logprobs": [round(float(x), 6) for x in logprobs],
            "top": rows.argmax(-1).tolist(),
            "margin": [round(float(x), 6) for x in best - second],
        }
        lines.append(json.dumps(line, separators=(",", ":")))
        llama_cpp = prompt["variants"]["f32_dequantized"]["forced_logprobs"]
        print(prompt["name"], "llama.cpp in f32 differs by", np.abs(logprobs - llama_cpp).max())
    path = Path(__file__).parent / "exact.json"
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
