"""plot_runs.py [--above-floor] OUT.png RUN=LABEL ... - the curves of several runs in one picture: held-out loss as
points joined by lines, training loss thin behind them, the floor where the data has one; with --above-floor what
each is above it: a held-out loss above its own evaluation's, training above the last one's. A RUN is a run's folder
or its log.jsonl. Needs matplotlib."""

import json
import os
import sys

try:
    import matplotlib
except ImportError as problem:
    sys.exit(f"plot_runs.py: error: {problem}; install it: apt-get install python3-matplotlib, or pip install matplotlib")

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402


def read(path):
    if os.path.isdir(path):
        path = os.path.join(path, "log.jsonl")
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main():
    arguments = sys.argv[1:]
    above = arguments[:1] == ["--above-floor"]
    arguments = arguments[above:]
    if len(arguments) < 2:
        sys.exit(__doc__)
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=110)
    known, lowest = None, 1.0
    for number, argument in enumerate(arguments[1:]):
        path, _, label = argument.partition("=")
        rows = read(path)
        steps = [row for row in rows if row["type"] == "step" and row["loss"] is not None]
        evals = [row for row in rows if row["type"] == "eval" and row["loss"] is not None]
        if not evals:
            sys.exit(f"plot_runs.py: error: {path} has no held-out loss; train it with -eval-every")
        if above and any(row.get("floor") is None for row in evals):
            sys.exit(f"plot_runs.py: error: {path} has evaluations without a floor; leave out --above-floor")
        floor = evals[-1].get("floor")
        known = known if floor is None else floor
        trained = [row["loss"] - (floor if above else 0) for row in steps]
        heldout = [row["loss"] - (row["floor"] if above else 0) for row in evals]
        lowest = min(lowest, *heldout)
        axes.plot([row["step"] for row in steps], trained, color=f"C{number}", lw=0.5, alpha=0.35)
        axes.plot([row["step"] for row in evals], heldout, color=f"C{number}", marker="o", ms=4, lw=1.2,
                  ls=["-", "--", ":"][number % 3], label=f"{label or path}: {heldout[-1]:.4f}")
    if known is not None and not above:
        axes.axhline(known, color="gray", lw=1, ls="-.", label=f"floor: {known:.4f}")
    axes.set(xlabel="step", ylabel="nats per token above the floor" if above else "nats per token", yscale="log")
    if above and lowest > 0:  # a training batch may lie below its floor, which is that of other stories
        axes.set_ylim(bottom=lowest / 2)
    ticks = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5] if above else [1, 1.5, 2, 3, 5, 8]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(title="held-out loss at the end" + (", above the floor" if above else ""))
    figure.tight_layout()
    figure.savefig(arguments[0])


main()
