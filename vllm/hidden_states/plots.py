"""Plots of the rows of a dataset. Needs matplotlib."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from vllm.hidden_states.row_statistics import (
    LayerDifferences,
    RowStatistics,
    TokenNorms,
    principal_components,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_BARS = 50
_MOST_NUMBERS = 12
"""Largest number of layers for which the cosines are written into the plot."""
_MOST_LABELS = 8
"""Most values of a label that get a colour."""
_LABEL_LENGTH = 24
OTHERS = "others"
Draw = Callable[["Figure"], None]


@contextmanager
def drawing() -> Iterator[Any]:
    """Yield pyplot for figures without a screen. ImportError: matplotlib is missing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"axes.titlesize": "medium"}):
        yield pyplot


def make_plots(
    statistics: RowStatistics,
    names: Sequence[str],
    lengths: Sequence[int],
    labels: Sequence[object] = (),
    differences: LayerDifferences | None = None,
) -> dict[str, Draw]:
    """Return functions that draw, by the names of plots.

    names: of the layers.
    labels: one value for each of ``statistics.points``, or none.
    """
    plots: dict[str, Draw] = {"lengths": lambda figure: draw_lengths(figure.subplots(), lengths)}
    if not names:
        return plots
    plots["row_norms"] = lambda figure: draw_norms(figure.subplots(), statistics, names)
    plots["layer_cosines"] = lambda figure: draw_cosines(figure.subplots(), statistics, names)
    if len(statistics.points) > 2:
        plots["pca"] = lambda figure: _draw_components(figure, statistics, names, labels)
    if statistics.tokens:
        first = statistics.tokens[0]
        plots["token_norms"] = lambda figure: _draw_tokens(figure.subplots(), first, names)
    if differences is not None:
        plots["differences"] = lambda figure: _draw_differences(
            figure.subplots(), differences, names
        )
    return plots


def write_plots(plots: Mapping[str, Draw], folder: str) -> list[str]:
    """Write PNG files into ``folder``; returns their paths. ImportError: matplotlib is missing."""
    paths = []
    with drawing() as pyplot:
        os.makedirs(folder, exist_ok=True)
        for name, draw in plots.items():
            figure = pyplot.figure(figsize=(7, 5), layout="constrained")
            draw(figure)
            paths.append(os.path.join(folder, f"{name}.png"))
            figure.savefig(paths[-1], dpi=120)
            pyplot.close(figure)
    return paths


def draw_norms(axes: Axes, statistics: RowStatistics, names: Sequence[str]) -> None:
    ticks = range(1, len(names) + 1)
    axes.boxplot(statistics.norms.numpy(), positions=ticks, whis=(1, 99), showfliers=False,
        manage_ticks=False)  # fmt: skip
    rows = f"{len(statistics.norms):,} rows"
    _name_ticks(axes.set_xticks, ticks, names)
    axes.set(title=f"Row norms\n{rows}; whiskers: 1 % and 99 %", xlabel="layer id",
        ylabel="L2 norm", yscale="log" if (statistics.norms > 0).any() else "linear")  # fmt: skip


def draw_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    if lengths:  # bars around whole numbers
        first, last = min(lengths), max(lengths)
        width = -(-(last - first + 1) // _MOST_BARS)
        edges = [first - 0.5 + width * bar for bar in range((last - first) // width + 2)]
        axes.hist(lengths, bins=edges, edgecolor="white", linewidth=0.5)
    axes.set(title=f"Lengths of {len(lengths):,} samples", xlabel="tokens", ylabel="samples")


def draw_cosines(axes: Axes, statistics: RowStatistics, names: Sequence[str]) -> None:
    image = axes.imshow(statistics.cosines.numpy(), vmin=-1, vmax=1, cmap="RdBu_r")
    ticks = range(len(names))
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        _name_ticks(set_ticks, ticks, names)
    for row, column in itertools.product(ticks, ticks) if len(names) <= _MOST_NUMBERS else ():
        value = float(statistics.cosines[row, column])
        color = "white" if abs(value) > 0.7 else "black"
        axes.text(column, row, f"{value:z.2f}", ha="center", va="center", color=color, fontsize=7)
    title = "Mean cosine of the rows of two layers"
    axes.set(title=title, xlabel="layer id", ylabel="layer id")
    axes.figure.colorbar(image, label="cosine")


def _draw_components(
    figure: Figure, statistics: RowStatistics, names: Sequence[str], labels: Sequence[object]
) -> None:
    layers = statistics.point_layers
    across = 2 if len(layers) > 1 else 1
    all_axes = figure.subplots(-(-len(layers) // across), across, squeeze=False).flatten()
    shown = [label_text(label) for label in labels]
    for place, axes in enumerate(all_axes):
        if place >= len(layers):
            axes.axis("off")
            continue
        coordinates, shares = principal_components(statistics.points[:, place])
        for label, color in label_colors(shown).items() if shown else [(None, "tab:blue")]:
            is_mine = torch.tensor([label in (None, one) for one in _colored(shown, coordinates)])
            axes.scatter(*coordinates[is_mine].T.numpy(), s=5, color=color, label=label)
        title = f"layer {names[layers[place]]} ({sum(shares):.0%} of variance)"
        axes.set_title(title, fontsize=9)
        axes.set(xticks=[], yticks=[])
    if shown:
        entries = all_axes[0].get_legend_handles_labels()
        legend = figure.legend(*entries, loc="outside lower center", ncols=2, fontsize=8)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a label with dollar signs is not a formula


def _colored(shown: Sequence[str], coordinates: torch.Tensor) -> list[str]:
    """Return the label of each point, OTHERS for one without a colour."""
    colors = label_colors(shown)
    return [one if one in colors else OTHERS for one in shown] or [""] * len(coordinates)


def label_colors(shown: Sequence[str]) -> dict[str, str]:
    """Return a colour for each of the most frequent labels, and one for the others."""
    counts = Counter(shown)
    frequent = sorted(counts, key=lambda label: (-counts[label], label))
    colors = {label: f"C{number}" for number, label in enumerate(frequent[:_MOST_LABELS])}
    return colors | ({OTHERS: "lightgrey"} if len(frequent) > _MOST_LABELS else {})


def label_text(label: object) -> str:
    """Return a label as short text that can be printed."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(label))
    # a leading underscore would keep it out of the legend
    text = f" {text}" if text.startswith("_") else text
    return (
        text
        if len(text) <= _LABEL_LENGTH
        else f"{text[: _LABEL_LENGTH - 1]}\N{HORIZONTAL ELLIPSIS}"
    )


def _draw_tokens(axes: Axes, tokens: TokenNorms, names: Sequence[str]) -> None:
    medians = tokens.norms.nanmedian(0).values.clamp(min=1e-30)
    image = axes.imshow((tokens.norms / medians).clamp(min=1e-3).log2().T.numpy(), aspect="auto",
        vmin=-3, vmax=3, cmap="RdBu_r", interpolation="nearest")  # fmt: skip
    _name_ticks(axes.set_yticks, range(len(names)), names)
    title = f"Norms at the tokens of sample {tokens.sample}\nrelative to the layer's median"
    axes.set(title=title, xlabel="token", ylabel="layer id")
    axes.figure.colorbar(image, label="log2 of the ratio")


def _draw_differences(axes: Axes, differences: LayerDifferences, names: Sequence[str]) -> None:
    ticks = range(len(names))
    for label, values in (("largest", differences.largest), ("mean", differences.mean)):
        axes.plot(ticks, values.numpy(), "o-", label=label)
    _name_ticks(axes.set_xticks, ticks, names)
    axes.set(title=f"Differences of values\n{differences.num_rows:,} rows", xlabel="layer id",
        ylabel="absolute difference")  # fmt: skip
    above_zero = differences.mean[differences.mean > 0]
    if len(above_zero):
        axes.set_yscale("symlog", linthresh=float(above_zero.min()))
        axes.set_ylim(0, 2 * float(differences.largest.nan_to_num().max()))
    axes.legend()


def _name_ticks(set_ticks: Callable[..., Any], ticks: range, names: Sequence[str]) -> None:
    """Name at most ``_MOST_NUMBERS`` of the ticks, evenly spaced."""
    step = -(-len(names) // _MOST_NUMBERS) or 1
    set_ticks(ticks[::step], names[::step])
