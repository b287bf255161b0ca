"""The table and the picture of docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import Peer

BEGIN = "<!-- compare.py writes from here -->"
END = "<!-- to here -->"
OURS = "Attendant"

# Okabe and Ito's colours, which stay apart for every kind of colour vision.
COLOURS = {OURS: "#0072B2", "ONNX Runtime": "#E69F00", "OpenVINO": "#009E73", "PyTorch": "#CC79A7"}
SHORT = {"MultiHeadAttention": "MHA", "GroupQueryAttention": "GQA"}


@dataclass
class Comparison:
    """One case: attend_bench's report of ours, the peers' seconds a call; best of all rounds."""

    ours: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)  # by peer
    unsupported: dict[str, str] = field(default_factory=dict)  # by peer: why there are no seconds

    @property
    def decode(self) -> bool:
        return "read_bandwidth" in self.ours

    @property
    def roof(self) -> float:
        """GFLOP/s of multiply-adds, or GB/s of reading."""
        return float(self.ours["read_bandwidth" if self.decode else "peak_gflops"]["best"])

    @property
    def rate(self) -> float:
        """Ours, in the roof's unit."""
        return float(self.ours["gigabytes_per_second" if self.decode else "gflops"]["best"])

    @property
    def unit(self) -> str:
        return "GB/s" if self.decode else "GFLOP/s"

    @property
    def share(self) -> float:
        return self.rate / self.roof

    def share_of(self, peer: str) -> float:
        work = self.ours["key_value_bytes" if self.decode else "flops"]
        return float(work) / self.seconds[peer] / 1e9 / self.roof

    @property
    def best_peer(self) -> float | None:
        """The largest share of a peer."""
        return max((self.share_of(peer) for peer in self.seconds), default=None)

    @property
    def label(self) -> str:
        """The problem in words."""
        o = self.ours
        heads = f"H {o['H']}" if o["H"] == o["Hkv"] else f"H {o['H']} over {o['Hkv']}"
        tokens = f"T {o['Tq']}" if o["Tq"] == o["Tk"] else f"Tq {o['Tq']}, Tk {o['Tk']}"
        extra = ", causal" if o["causal"] else ""
        extra += ", f64" if o["dtype"] == "float64" else ""
        return f"B {o['B']}, {heads}, {tokens}, D {o['D']}{extra}"


def line(comparison: Comparison) -> str:
    """For the terminal, as soon as a case is done."""
    peers = ", ".join(f"{peer} {comparison.share_of(peer):.3f}" for peer in comparison.seconds)
    return f"{comparison.ours['name']}: {OURS} {comparison.share:.3f}, {peers or 'no peer'}"


def table(comparisons: Sequence[Comparison], peers: Sequence[Peer]) -> str:
    footnotes: list[str] = []

    def cell(comparison: Comparison, peer: str) -> str:
        if peer in comparison.seconds:
            return f"{comparison.share_of(peer):.2f}"
        note = comparison.unsupported[peer]
        if note not in footnotes:
            footnotes.append(note)
        return f"– <sup>{footnotes.index(note) + 1}</sup>"

    names = [peer.name for peer in peers]
    rows = [
        ["case", "problem", "roof", OURS, f"{OURS}'s share", *names, f"{OURS} over the best peer"],
        ["---", "---", *["--:"] * (len(names) + 4)],
    ]
    for c in comparisons:
        lead = "–" if c.best_peer is None else f"{c.share / c.best_peer:.2f}×"
        rates = [f"{c.roof:.1f} {c.unit}", f"{c.rate:.1f}", f"**{c.share:.2f}**"]
        cells = [cell(c, name) for name in names]
        rows.append([f"`{c.ours['name']}`", c.label, *rates, *cells, lead])
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    notes = "\n".join(f"{number}. {note}" for number, note in enumerate(footnotes, 1))
    return f"{text}\n\n{notes}".rstrip()


def bars(comparison: Comparison) -> list[tuple[str, str, float]]:
    """(library, label, share): ours, and of each library its best operator."""
    found: dict[str, tuple[str, str, float]] = {OURS: (OURS, OURS, comparison.share)}
    for peer in comparison.seconds:
        library = next((name for name in COLOURS if peer.startswith(name)), peer)
        operator = peer.removeprefix(library).strip()
        label = f"{library} {SHORT.get(operator, operator)}".strip()
        share = comparison.share_of(peer)
        if library not in found or share > found[library][2]:
            found[library] = (library, label, share)
    return list(found.values())


def picture(comparisons: Sequence[Comparison], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and the same figures give the same file.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "attendant", "font.size": 9}
    )
    from matplotlib import pyplot
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = [
        ("share of the multiply-add peak", [c for c in comparisons if not c.decode]),
        ("share of the read bandwidth (decoding)", [c for c in comparisons if c.decode]),
    ]
    panels = [(title, cases) for title, cases in panels if cases]
    # A bar is one unit high, a case's title two.
    heights = [sum(len(bars(c)) + 2 for c in cases) for _, cases in panels]
    figure, axes = pyplot.subplots(
        len(panels),
        figsize=(7.5, 0.155 * sum(heights) + 0.75 * len(panels)),
        height_ratios=heights,
        squeeze=False,
        layout=ConstrainedLayoutEngine(h_pad=0.12, hspace=0.03),
    )
    for axis, (title, cases), height in zip(axes[:, 0], panels, heights, strict=True):
        y = 0.0
        for case in cases:
            axis.text(0, y + 0.75, case.label, va="center", fontweight="bold")
            y += 2
            for library, label, share in bars(case):
                axis.barh(y, share, height=0.9, color=COLOURS.get(library, "#666666"))
                white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
                text = f"{label} {share:.2f}"
                axis.text(share + 0.008, y, text, va="center", fontsize=8, bbox=white)
                y += 1
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_ylim(height + 0.2, -0.4)
        axis.set_xlim(0, 1.3)
        axis.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
        axis.set_yticks([])
        axis.axvline(1, color="#444444", linewidth=1, zorder=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.spines["bottom"].set_bounds(0, 1)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def write(
    output: Path,
    comparisons: Sequence[Comparison],
    peers: Sequence[Peer],
    differences: str,
    rounds: int,
) -> None:
    """Replaces what is between the markers of `output`, or appends to it where it has none."""
    ours = comparisons[0].ours
    svg = output.with_suffix(".svg")
    picture(comparisons, svg)
    versions = dict.fromkeys(
        f"{next(n for n in COLOURS if peer.name.startswith(n))} {peer.version}" for peer in peers
    )
    text = "\n\n".join(
        [
            BEGIN,
            f"{ours['cpu']}, {ours['target']}, {ours['threads']} threads; {OURS} "
            f"{ours['version']}, {', '.join(versions)}; the best of {rounds} rounds. The peers' "
            f"largest difference from the definition: {differences}.",
            f"![Share of the roof by problem, {OURS} and its peers]({svg.name})",
            table(comparisons, peers),
            END,
        ]
    )
    page = output.read_text() if output.exists() else f"{BEGIN}\n{END}\n"
    if BEGIN not in page or END not in page:
        page += f"\n{BEGIN}\n{END}\n"
    before, _, rest = page.partition(BEGIN)
    output.write_text(before + text + rest.partition(END)[2])
