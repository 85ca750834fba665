"""Draw benchmarks/results/h200/forward.json as docs/forward_h200.svg: one panel per head pair, one line per sequence set.

    python benchmarks/plot_forward.py [forward.json] [out.svg]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import results
from systems import SYSTEMS
from workload import HEAD_PAIRS, SEQUENCE_SETS, Row, lengths_name

matplotlib.use("Agg")
from matplotlib import pyplot, ticker

# Mid-tones on a transparent ground: each keeps a contrast of about 3 or more against white and against GitHub's dark grey.
INK = "#7d8590"
STYLES = {                               # colour, marker, size; ours is drawn last and largest
    "qla_jit": ("#e5534b", "D", 52),
    "flash_qla": ("#b083f0", "s", 30),
    "flashinfer": ("#3fa45b", "o", 34),
    "flashinfer_cp": ("#3fa45b", "x", 30),
    "fla": ("#4c8ed9", "^", 30),
}
LABELS = {"flash_qla": "FlashQLA", "flashinfer": "FlashInfer", "flashinfer_cp": "FlashInfer, CP forced", "fla": "FLA"}


def main(arguments: Sequence[str]) -> None:
    source = Path(arguments[0]) if arguments else results.RESULTS / "h200" / "forward.json"
    target = Path(arguments[1]) if len(arguments) > 1 else results.RESULTS.parents[1] / "docs" / "forward_h200.svg"
    # A fixed salt and no date: drawing the same numbers twice gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "qla_jit"
    draw(results.load(source)).savefig(target, transparent=True, metadata={"Date": None})
    print(target)


def draw(document: dict[str, Any]) -> pyplot.Figure:
    style = {"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
             "font.size": 9, "axes.titlesize": 10}
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(1, len(HEAD_PAIRS), figsize=(13, 3.4), sharey=True, layout="constrained")
        for panel, (H, HV) in zip(panels, HEAD_PAIRS, strict=True):
            draw_panel(panel, document, H, HV)
        panels[0].set_yticks(range(len(SEQUENCE_SETS)), [lengths_name(seqlens) for seqlens in SEQUENCE_SETS])
        panels[0].invert_yaxis()
        marks = {label: mark for panel in panels for mark, label in zip(*panel.get_legend_handles_labels(), strict=True)}
        names = [name for system in SYSTEMS if (name := label_of(system.name)) in marks]
        figure.legend([marks[name] for name in names], names, loc="outside upper center", ncols=len(names), frameon=False)
        figure.supxlabel(f"milliseconds per forward call, {document['gpu']}, {document['date'][:10]}; less is better", fontsize=9)
    return figure


def draw_panel(panel: Any, document: dict[str, Any], H: int, HV: int) -> None:
    entries = [results.find_row(document, Row(H, HV, seqlens)) for seqlens in SEQUENCE_SETS]
    for system in reversed(SYSTEMS):
        points = [(entry["ms"][system.name], y) for y, entry in enumerate(entries) if entry and system.name in entry["ms"]]
        if points:
            colour, marker, size = STYLES[system.name]
            panel.scatter(*zip(*points, strict=True), s=size, c=colour, marker=marker, label=label_of(system.name))
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            panel.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            panel.xaxis.set_minor_locator(ticker.NullLocator())
    panel.set_title(f"H={H}, HV={HV}")
    panel.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def label_of(system: str) -> str:
    return LABELS.get(system, system)


if __name__ == "__main__":
    main(sys.argv[1:])
