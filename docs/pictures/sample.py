"""Draws sample.svg from ../results/cpu/sample.json. Needs matplotlib."""

import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RECIPES = {
    "bf16": ("bf16", "#9aa5b1"),
    "per_tensor": ("one scale a tensor", "#e07a5f"),
    "fa3": ("one scale a head (FA3)", "#f2b880"),
    "default": ("fp8attn default", "#2a6f97"),
}


def draw(result: dict) -> Figure:
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    axes = figure.subplots()
    for i, (name, (label, color)) in enumerate(RECIPES.items()):
        errors = [layer["recipes"][name]["relative_error"] for layer in result["layers"]]
        positions = [row + (i - (len(RECIPES) - 1) / 2) * 0.2 for row in range(len(errors))]
        bars = axes.bar(positions, errors, width=0.18, color=color, label=label)
        axes.bar_label(bars, fmt="%.3f", fontsize=7, padding=1)
    axes.set_xticks(range(len(result["layers"])))
    axes.set_xticklabels([layer["layer"].replace("layers.", "layer ") for layer in result["layers"]])
    axes.set_ylabel("relative error")
    axes.set_title("SmolLM2-135M, 512 tokens, causal: attention's output against exact", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    figure.legend(frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    return figure


if __name__ == "__main__":
    with rc_context({"svg.hashsalt": "fp8attn"}):  # the same file every time
        picture = draw(json.loads((HERE.parent / "results" / "cpu" / "sample.json").read_text(encoding="utf-8")))
        picture.savefig(HERE / "sample.svg", metadata={"Date": None, "Creator": None})
