#!/usr/bin/env python3
"""Rotary tables by the formulas of the papers, in double precision, for `tests/rope.rs`.

    python3 -m venv /tmp/v && /tmp/v/bin/pip install numpy==2.4.6
    /tmp/v/bin/python make_expected.py

Sources: RoFormer (arXiv 2104.09864) for the frequencies theta^(-2i/d); Chen et al. (2306.15595) for
linear interpolation; Llama 3.1's reference model (`apply_scaling`); YaRN (2309.00071), sections 3.2
to 3.4. Where the papers leave a choice (whole dimensions as ends of YaRN's ramp, the ratio of two
mscales), it is that of transformers, `modeling_rope_utils.py`.

`expected.json` holds, for each case: `config`, the rope fields as in config.json; `rotary_dim`; and
for some positions all cosines, then all sines.
"""

import json
from pathlib import Path

import numpy as np

POSITIONS = [0, 1, 2, 31, 4097]


def base_frequencies(theta, dim):
    return theta ** (-np.arange(0, dim, 2) / dim)


def linear(rope, dim):
    return base_frequencies(rope["rope_theta"], dim) / rope["factor"], 1.0


def llama3(rope, dim):
    frequencies = base_frequencies(rope["rope_theta"], dim)
    context = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    rotations = context * frequencies / (2 * np.pi)
    # Kept from `high` rotations on, divided by the factor below `low`, blended between.
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope["factor"], 1.0


def mscale(factor, weight=1.0):
    return 0.1 * weight * np.log(factor) + 1 if factor > 1 else 1.0


def yarn(rope, dim):
    theta, factor = rope["rope_theta"], rope["factor"]
    frequencies = base_frequencies(theta, dim)
    context = rope["original_max_position_embeddings"]

    def pair_with(rotations):
        # theta^(-2 i / d) * context = 2 pi * rotations, solved for i
        return dim / 2 * np.log(context / (2 * np.pi * rotations)) / np.log(theta)

    first = pair_with(rope.get("beta_fast", 32))
    last = pair_with(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    stretched = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
    scale = rope.get("attention_factor")
    if scale is None:
        scale = mscale(factor)
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            scale = mscale(factor, rope["mscale"]) / mscale(factor, rope["mscale_all_dim"])
    return (1 - stretched) * frequencies + stretched * frequencies / factor, scale


def default(rope, dim):
    return base_frequencies(rope["rope_theta"], dim), 1.0


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
# Name, head size, and the rope fields: as Llama 3.1 8B, SmolLM2, Qwen2.5 and others have them.
CASES = [
    ("smollm2", 64, {"rope_type": "default", "rope_theta": 100000.0}),
    ("linear", 64, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    ("llama 3.1", 128, LLAMA3),
    ("llama 3.2", 64, LLAMA3 | {"factor": 32.0}),
    ("qwen2.5 yarn", 128, YARN),
    ("yarn attention factor", 64, YARN | {"attention_factor": 1.25, "beta_fast": 16}),
    ("yarn mscales", 64, YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}),
    (
        "yarn untruncated",
        64,
        YARN
        | {
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_slow": 2.0,
            "truncate": False,
        },
    ),
    (
        "partial",
        64,
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
]
FORMULAS = {"default": default, "linear": linear, "llama3": llama3, "yarn": yarn}


def main():
    cases = []
    for name, head_dim, rope in CASES:
        dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        frequencies, scale = FORMULAS[rope["rope_type"]](rope, dim)
        rows = []
        for position in POSITIONS:
            angles = position * frequencies
            row = np.concatenate([scale * np.cos(angles), scale * np.sin(angles)])
            rows.append([float(f"{value:.9g}") for value in row])
        cases.append(
            {
                "name": name,
                "head_dim": head_dim,
                "rope_parameters": rope,
                "rotary_dim": dim,
                "positions": POSITIONS,
                "rows": rows,
            }
        )
    text = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (Path(__file__).parent / "expected.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
