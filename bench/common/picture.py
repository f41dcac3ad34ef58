"""Draws, for `--picture`. Needs Debian's python3-matplotlib (`scripts/install-packages bench`)."""

from pathlib import Path

COLOURS = [
    "#4682b4", "#d2691e", "#6b8e23", "#8b5a9b", "#c0392b", "#7f8c8d", "#d4a017", "#16a085",
]
MARKERS = "osD^vPX*"


def panels(title: str, columns: int, rows: int = 1, width: float = 6.4, height: float = 4.4):
    """Returns a figure with a title, and its panels as a list of rows."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({
        "font.size": 10, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False,
    })
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False,
        layout="constrained",
    )
    figure.suptitle(title, fontsize=14)
    for row in axes:
        for panel in row:
            panel.grid(axis="y", color="#cccccc", linewidth=0.7)
    return figure, axes


def stacked(panel, names: list, parts: dict) -> None:
    """Draws a bar for each name, of stacked parts: {label: [a value for each name]}."""
    below = [0.0] * len(names)
    for (label, values), colour in zip(parts.items(), COLOURS):
        panel.bar(range(len(names)), values, bottom=below, width=0.7, label=label, color=colour)
        below = [under + value for under, value in zip(below, values)]
    for at, total in enumerate(below):
        panel.text(at, total, f"{total:.0f}", ha="center", va="bottom", fontsize=8)
    panel.set_xticks(range(len(names)), names, fontsize=7)


def grouped(panel, groups: list, bars: dict) -> None:
    """Draws bars side by side in groups: {label: ([a value for each group], colour, hatch)}."""
    width = 0.84 / len(bars)
    for at, (label, (values, colour, hatch)) in enumerate(bars.items()):
        places = [group - 0.42 + width * (at + 0.5) for group in range(len(groups))]
        panel.bar(
            places, values, width=width, label=label, color=colour, hatch=hatch,
            edgecolor="white", linewidth=0.3,
        )
    panel.set_xticks(range(len(groups)), groups)


def save(figure, file: str) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
