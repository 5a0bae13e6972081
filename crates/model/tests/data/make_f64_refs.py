"""Writes smollm2_f64_refs.json: what exact weights give in 64-bit arithmetic for the reference outputs.

Usage: python make_f64_refs.py MODEL.gguf    (needs numpy and gguf; a minute)

The forward pass is written from the Llama description alone, in numpy, in float64, from the weights that
the `gguf` package dequantises. It says how far any float32 computation is from exact arithmetic,
llama.cpp's included.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

HEADS, KV_HEADS, HEAD_DIM, LAYERS, THETA, EPS = 9, 3, 64, 30, 1e5, 1e-5


def load(path):
    tensors = {}
    for tensor in GGUFReader(path).tensors:
        shape = [int(n) for n in tensor.shape[::-1]]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        tensors[tensor.name] = values.reshape(shape)
    return tensors


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def rotate(x, cos, sin):
    """Rotates neighbouring pairs, as GGUF's llama files are laid out; x is [tokens, heads, dim]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * cos[:, None] - odd * sin[:, None]
    out[..., 1::2] = even * sin[:, None] + odd * cos[:, None]
    return out


def attend(q, k, v):
    tokens = len(q)
    mask = np.triu(np.full((tokens, tokens), -np.inf), 1)
    out = np.empty((tokens, HEADS, HEAD_DIM))
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = q[:, head] @ k[:, kv_head].T / np.sqrt(HEAD_DIM) + mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, kv_head]
    return out.reshape(tokens, -1)


def logprobs(tensors, ids, first):
    """Log-probabilities after each of ids[first:]."""
    weight = lambda name: tensors[name].astype(np.float64)
    x = weight("token_embd.weight")[ids]
    inv_freq = THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = np.outer(np.arange(len(ids)), inv_freq)
    cos, sin = np.cos(angles), np.sin(angles)
    for layer in range(LAYERS):
        at = lambda name: weight(f"blk.{layer}.{name}.weight")
        h = norm(x, at("attn_norm"))
        heads = lambda name, num: (h @ at(name).T).reshape(len(ids), num, HEAD_DIM)
        q = rotate(heads("attn_q", HEADS), cos, sin)
        k = rotate(heads("attn_k", KV_HEADS), cos, sin)
        x = x + attend(q, k, heads("attn_v", KV_HEADS)) @ at("attn_output").T
        h = norm(x, at("ffn_norm"))
        gate, up = h @ at("ffn_gate").T, h @ at("ffn_up").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ at("ffn_down").T
    logits = norm(x[first:], weight("output_norm.weight")) @ weight("token_embd.weight").T
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def main():
    folder = Path(__file__).parent
    tensors = load(sys.argv[1])
    references = json.loads((folder / "smollm2_greedy_refs.json").read_text())
    results = {}
    for reference in references["prompts"]:
        output = reference["token_ids"]
        ids = reference["prompt_ids"] + output[:-1]
        table = logprobs(tensors, ids, len(reference["prompt_ids"]) - 1)
        best = np.sort(table, -1)
        results[reference["name"]] = {
            "logprobs": [round(float(row[i]), 6) for row, i in zip(table, output)],
            "top": [int(i) for i in table.argmax(-1)],
            "margin": [round(float(m), 6) for m in best[:, -1] - best[:, -2]],
        }
    (folder / "smollm2_f64_refs.json").write_text(json.dumps(results) + "\n")


main()
