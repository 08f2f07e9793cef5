"""plot_runs.py OUT.png RUN=LABEL ... - the curves of several runs in one picture: held-out loss as points joined
by lines, training loss thin behind them, the floor where the data has one. A RUN is a run's folder or its
log.jsonl. Needs matplotlib."""

import json
import os
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402


def read(path):
    if os.path.isdir(path):
        path = os.path.join(path, "log.jsonl")
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=110)
    floor = None
    for number, argument in enumerate(sys.argv[2:]):
        path, _, label = argument.partition("=")
        rows = read(path)
        steps = [row for row in rows if row["type"] == "step" and row["loss"] is not None]
        evals = [row for row in rows if row["type"] == "eval" and row["loss"] is not None]
        axes.plot([row["step"] for row in steps], [row["loss"] for row in steps], color=f"C{number}", lw=0.5, alpha=0.35)
        axes.plot([row["step"] for row in evals], [row["loss"] for row in evals], color=f"C{number}", marker="o",
                  ms=4, lw=1.2, ls=["-", "--", ":"][number % 3], label=f"{label or path}: {evals[-1]['loss']:.4f}")
        floor = next((row["floor"] for row in evals if row.get("floor") is not None), floor)
    if floor is not None:
        axes.axhline(floor, color="gray", lw=1, ls="-.", label=f"floor: {floor:.4f}")
    axes.set(xlabel="step", ylabel="nats per token", yscale="log")
    axes.set_yticks([1, 1.5, 2, 3, 5, 8], [f"{tick:g}" for tick in [1, 1.5, 2, 3, 5, 8]])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(title="held-out loss at the end")
    figure.tight_layout()
    figure.savefig(sys.argv[1])


main()
