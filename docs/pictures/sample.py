"""Draws sample.svg from ../results/cpu/sample.json. Needs matplotlib."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "fp8attn"  # the same file every time
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
COLORS = {"bf16": "#9aa5b1", "per_tensor": "#e07a5f", "fa3": "#f2b880", "default": "#2a6f97"}
LABELS = {"per_tensor": "one scale a tensor", "fa3": "one scale a head (FA3)", "default": "fp8attn default", "bf16": "bf16"}

result = json.loads((HERE.parent / "results" / "cpu" / "sample.json").read_text())
figure, axes = plt.subplots(figsize=(7.2, 2.6), layout="constrained")
names = list(result["mean"])
for i, name in enumerate(names):
    errors = [layer["recipes"][name]["relative_error"] for layer in result["layers"]]
    positions = [row + (i - (len(names) - 1) / 2) * 0.2 for row in range(len(errors))]
    bars = axes.bar(positions, errors, width=0.18, color=COLORS[name], label=LABELS[name])
    axes.bar_label(bars, fmt="%.3f", fontsize=7, padding=1)
axes.set_xticks(range(len(result["layers"])), [layer["layer"].replace("layers.", "layer ") for layer in result["layers"]])
axes.set_ylabel("relative error of the output")
axes.set_title("SmolLM2-135M, 512 tokens, causal: error against exact attention", fontsize=10)
axes.spines[["top", "right"]].set_visible(False)
axes.margins(y=0.15)
figure.legend(frameon=False, fontsize=8, ncols=4, loc="outside lower center")
figure.savefig(HERE / "sample.svg", metadata={"Date": None, "Creator": None})
