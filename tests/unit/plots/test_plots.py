"""What stands in the pictures: cells, texts, hatching, the floor, the lines."""

import subprocess
import sys

import pytest
import torch
from matplotlib.collections import PatchCollection
from matplotlib.colors import same_color

from nnsight_pp.plots import logit_lens_grid, norm_by_layer, patching_heatmap
from nnsight_pp.plots.picture import shown

PROMPT = ["The", " sea", " is"]


def grid(**options):
    top = [["a", " b", "c"], [" d", "e", " blue"]]
    table = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.99]])
    return logit_lens_grid(PROMPT, top, table, **options)


def hatched_cells(picture):
    """The (layer, position) of each cell that is drawn as noise."""
    (cells,) = [one for one in picture.axes[0].collections if isinstance(one, PatchCollection)]
    assert cells.get_hatch()
    corners = [path.vertices.min(axis=0) + 0.5 for path in cells.get_paths()]
    return sorted((int(y), int(x)) for x, y in corners)


def texts_of(labels):
    return [label.get_text() for label in labels]


# -- the grid of the logit lens --------------------------------------------------------------------


def test_each_cell_of_the_grid_holds_its_token():
    axes = grid().axes[0]
    placed = {text.get_position(): text.get_text() for text in axes.texts}
    assert placed == {
        (0, 0): "a", (1, 0): "␣b", (2, 0): "c", (0, 1): "␣d", (1, 1): "e", (2, 1): "␣blue",
    }  # fmt: skip


def test_the_first_layer_is_the_lowest_row_and_the_prompt_stands_below():
    axes = grid(layers=["layer 3", "out"]).axes[0]
    assert axes.get_ylim() == (-0.5, 1.5)
    assert texts_of(axes.get_yticklabels()) == ["layer 3", "out"]
    assert texts_of(axes.get_xticklabels()) == ["The", "␣sea", "␣is"]


def test_a_cell_is_coloured_by_its_probability_on_a_scale_from_0_to_1():
    (image,) = grid().axes[0].images
    assert image.get_clim() == (0, 1)
    assert image.get_array()[1, 2] == pytest.approx(0.99)


def test_text_on_a_dark_cell_is_white():
    colours = [text.get_color() for text in grid().axes[0].texts]
    assert same_color(colours[0], "black")
    assert same_color(colours[-1], "white")


def test_the_grid_takes_a_list_of_rows_that_need_a_gradient():
    rows = [torch.rand(3, requires_grad=True), torch.rand(3)]
    image = logit_lens_grid(PROMPT, [["a"] * 3] * 2, rows).axes[0].images[0]
    assert image.get_array().shape == (2, 3)


@pytest.mark.parametrize(
    ("prompt", "top", "table", "words"),
    [
        (PROMPT[:2], [["a"] * 3], torch.ones(1, 3), "prompt_tokens: 2 were given"),
        (PROMPT, [["a"] * 3] * 2, torch.ones(1, 3), "top_tokens: 2 were given"),
        (PROMPT, [["a"] * 2], torch.ones(1, 3), "a row of top_tokens: 2 were given"),
        (PROMPT, [["a"] * 3], torch.full((1, 3), 7.0), "take the softmax"),
        (PROMPT, [["a"] * 3], torch.full((1, 3), torch.nan), "take the softmax"),
        (PROMPT, [["a"] * 3], torch.ones(3), r"not \[3\]"),
        (PROMPT, [], [], r"not \[0\]"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(prompt, top, table, words):
    with pytest.raises(ValueError, match=words):
        logit_lens_grid(prompt, top, table)


# -- the heat map of a patch -----------------------------------------------------------------------

EFFECT = torch.tensor([[0.0, 0.5, -0.1], [-2.0, 0.1, torch.nan], [0.11, -0.05, 1.0]])


def test_cells_that_are_not_above_the_floor_are_hatched_and_no_others():
    picture = patching_heatmap(EFFECT, PROMPT, floor=0.1)
    table = EFFECT.double()
    below = [(row, col) for row in range(3) for col in range(3) if abs(table[row, col]) <= 0.1]
    assert hatched_cells(picture) == below
    assert {(0, 0), (2, 1)} <= set(below)
    assert not {(0, 1), (1, 0), (1, 2), (2, 0)} & set(below)


def test_a_floor_of_zero_hatches_only_what_is_exactly_zero():
    assert hatched_cells(patching_heatmap(EFFECT, PROMPT, floor=0)) == [(0, 0)]


def test_colours_are_symmetric_around_zero():
    (image,) = patching_heatmap(EFFECT, PROMPT, floor=0.1).axes[0].images
    assert image.get_clim() == (-2, 2)


def test_the_floor_is_marked_on_the_colour_bar_and_named():
    picture = patching_heatmap(EFFECT, PROMPT, floor=0.1, metric="logits restored")
    bar = picture.axes[1]
    assert [float(line.get_ydata()[0]) for line in bar.lines] == [-0.1, 0.1]
    assert [patch.get_hatch() for patch in bar.patches] == ["////"]
    assert bar.get_ylabel() == "logits restored"
    assert texts_of(picture.axes[0].get_legend().get_texts()) == ["not above the noise floor, ±0.1"]


def test_a_map_where_nothing_happens_is_hatched_all_over():
    picture = patching_heatmap(torch.zeros(2, 3), PROMPT, floor=0.0)
    assert len(hatched_cells(picture)) == 6


@pytest.mark.parametrize("floor", [-1.0, float("nan")])
def test_a_floor_that_is_none_is_refused(floor):
    with pytest.raises(ValueError, match="floor must be zero or more"):
        patching_heatmap(EFFECT, PROMPT, floor=floor)


# -- norms -----------------------------------------------------------------------------------------


def test_a_line_for_each_column_and_their_median():
    norms = torch.tensor([[1.0, 2.0, 30.0], [4.0, 5.0, 60.0]])
    axes = norm_by_layer(norms, PROMPT).axes[0]
    *lines, median = axes.lines
    assert [list(line.get_ydata()) for line in lines] == norms.T.tolist()
    assert list(median.get_ydata()) == [2.0, 5.0]
    assert list(median.get_xdata()) == [0, 1]
    assert texts_of(axes.get_legend().get_texts()) == [
        "0  The", "1  ␣sea", "2  ␣is", "median of 3",
    ]  # fmt: skip
    assert axes.get_yscale() == "log"


def test_many_lines_are_drawn_and_not_named_one_by_one():
    axes = norm_by_layer(torch.rand(4, 60), ["token"] * 60, log=False).axes[0]
    assert len(axes.lines) == 61
    assert texts_of(axes.get_legend().get_texts()) == ["median of 60"]


def test_a_negative_norm_is_refused():
    with pytest.raises(ValueError, match="zero or more"):
        norm_by_layer([[-1.0]], ["a"])


# -- all of them -----------------------------------------------------------------------------------


def test_odd_tokens_are_drawn_without_a_warning_and_in_full():
    names = ["$x^2$", "_hidden", "\n", "", "日本", "%s {}", "\N{COMBINING ACUTE ACCENT}"]
    table = torch.full((1, len(names)), 0.5)
    title = " ".join(names)
    pictures = [
        logit_lens_grid(names, [names], table, layers=["日"], title=title),
        patching_heatmap(table, names, floor=0.1, metric=title, title=title),
        norm_by_layer(table, names, title=title),
    ]
    for picture in pictures:
        assert picture._repr_png_().startswith(b"\x89PNG")
    assert len(pictures[2].axes[0].get_legend().get_texts()) == len(names) + 1


def test_a_picture_of_a_long_prompt_keeps_a_size_that_can_be_drawn():
    table = torch.rand(90, 300)
    picture = patching_heatmap(table, ["a"] * 300, floor=0.1)
    assert max(picture.get_size_inches()) <= 40
    assert len(picture.axes[0].get_yticks()) <= 40


def test_what_cannot_be_seen_is_shown():
    assert shown(" \n\t") == "␣⏎⇥"
    assert shown("日") == "\N{REPLACEMENT CHARACTER}"


WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None
import nnsight_pp
try:
    from nnsight_pp import plots
except ImportError as error:
    print(error)
"""


def test_without_matplotlib_the_import_says_what_to_install():
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_MATPLOTLIB], capture_output=True, text=True, check=True
    ).stdout
    assert "pip install nnsight_pp[plots]" in told


def test_neither_the_package_nor_the_plots_pull_in_more_than_they_need():
    code = (
        "import sys, nnsight_pp; print('matplotlib' in sys.modules);"
        "import nnsight_pp.plots; print('matplotlib.pyplot' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "False"]
