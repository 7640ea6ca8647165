"""Reports as text and pictures: equal layers in one row, lines that fit, names that are whole."""

import contextlib
import dataclasses
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from te_inductor import explain
from te_inductor.api import accuracy_figures as heat_map
from te_inductor.api.accuracy_figures import AccuracyReport, GemmAccuracy, OperandAccuracy
from te_inductor.presentation import paths, tables, weights
from te_inductor.presentation.report import Flops, GraphWeight, Report, Site, Unmet, WeighedLayers, Weighing
from te_inductor.targets import sm90
from tests.rates import H100, rated

NAMES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
GEMMS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}


def report_of(layers: int, other: tuple[int, ...] = ()) -> Report:
    """A report of equal blocks, but for some whose layers are refused, and a head."""
    paths = [(place, f"model.layers.{place}.{name}") for place in range(layers) for name in NAMES]
    sites = []
    for place, path in [*paths, (-1, "lm_head")]:
        kernel, reason = ("high_precision", "too small") if place in other or place < 0 else ("cublaslt", None)
        sites += [
            Site(path, "linear", gemm, (64, 128, 32), "current", kernel, reason, flops=10 if gemm == "fprop" else None)
            for gemm in GEMMS
        ]
    total = 10 * len(sites) // 3
    return Report(sites, flops=Flops(total - 10 - 40 * len(other), total))


def rows_of(text: str) -> list[list[str]]:
    """Cells of the table's body."""
    lines = [*text.splitlines(), ""]
    start = next(number for number, line in enumerate(lines) if set(line) == {"─"}) + 1
    body = lines[start : lines.index("", start)]
    return [re.split(r" {2,}", line.strip()) for line in body]


def test_equal_blocks_are_one_row():
    rows = rows_of(report_of(32).table(columns=140))
    assert [row[:2] for row in rows] == [*([f"model.layers.*.{name}", "32"] for name in NAMES), ["lm_head", "1"]]
    assert rows[0][2:] == ["64 x 128 x 32", "24.8%", "current", "all", "cublaslt"]
    assert len(str(report_of(200)).splitlines()) == len(str(report_of(2)).splitlines())


def test_blocks_that_differ_are_named_by_their_numbers():
    text = report_of(32, other=(0, 1, 2, 30)).table(columns=140)
    names = [row[0] for row in rows_of(text)]
    assert names[:4] == [f"model.layers.{{0-2,30}}.{name}" for name in NAMES]
    assert names[4:8] == [f"model.layers.{{3-29,31}}.{name}" for name in NAMES]
    assert "layers.{0-2,30}.self_attn.q_proj (4)" in text and "lm_head (13.2% of FLOPs): too small" in text


def test_layers_of_one_path_whose_gemms_have_several_kernels():
    sites = report_of(2).sites[:24]
    sites = [Site(**{**vars(site), "kernel": "cutlass:128x192"}) if site.gemm == "wgrad" else site for site in sites]
    rows = rows_of(Report(sites).table(columns=140))
    assert len(rows) == 8 and rows[0][-2:] == ["fprop, dgrad", "cublaslt"] and rows[1] == ["wgrad", "cutlass:128x192"]


def test_details_have_a_row_for_each_layer():
    text = report_of(32).table(details=True, columns=140)
    assert len(rows_of(text)) == 129 and "too small" in text
    assert "pattern" in text.splitlines()[3]


def test_unmet_options_are_told_by_kind():
    unmet = [Unmet("weights", f"layers.{place}.up", "the weight is computed") for place in range(40)]
    sites = [Site(one.fqn, "linear", "fprop", (1, 2, 3), "current", "inductor") for one in unmet]
    assert "option 'weights' does not reach layers.*.up (40): the weight is computed" in str(Report(sites, unmet=unmet))


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 140, 250])
@pytest.mark.parametrize("details", [False, True])
def test_lines_fit(columns, details):
    text = report_of(32, other=(1,)).table(details, columns)
    table = text[text.index("\n\n") :]
    assert max(map(len, table.splitlines())) <= columns
    if columns >= 80:  # no name is broken inside of a word
        words = set(re.findall(r"[a-z_]+", table))
        assert {"self_attn", "q_proj", "gate_proj", "lm_head", "current", "cublaslt", "high_precision"} <= words


def test_the_width_is_the_terminals(monkeypatch):
    monkeypatch.setenv("COLUMNS", "57")
    assert tables.width() == 57 and max(map(len, str(report_of(4)).splitlines()[3:])) <= 57
    monkeypatch.setenv("COLUMNS", "nonsense")
    monkeypatch.setattr(sys, "stdout", open(os.devnull, "w"))  # noqa: SIM115
    assert tables.width() == tables.PIPE


def test_a_pipe_has_lines_that_are_whole_and_a_terminal_has_lines_that_fit(monkeypatch):
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    piped = shown(monkeypatch, *os.pipe())
    assert rows_of(piped)[0][0] == "model.layers.*.self_attn.q_proj" and "\x1b" not in piped
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 62, 0, 0))
    table = shown(monkeypatch, controller, terminal).replace("\r", "").partition("\n\n")[2]
    assert "self_attn" in table and 40 < max(map(len, table.splitlines())) <= 62


def shown(monkeypatch, reader: int, writer: int) -> str:
    """A table that is printed where the process writes to `writer`, as read at the other end."""
    with open(writer, "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        print(report_of(32).table())
    text = b""
    with open(reader, "rb", buffering=0) as source, contextlib.suppress(OSError):  # a terminal's other end is closed
        while chunk := source.read(4096):
            text += chunk
    return text.decode()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["a", "b.c", "x_y", " ", "long_word", ".", "1"])).map("".join), st.integers(1, 20))
def test_breaking_loses_nothing(text, columns):
    lines = tables.broken(text, columns)
    assert all(len(line) <= columns for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("_orig_mod.model.layers.0.q", "model.layers.0.q"),
        ("base_model.model.model.layers.0.q.base_layer", "model.layers.0.q"),
        ("_orig_mod.base_model.model.model.layers.0._orig_mod.q.base_layer", "model.layers.0.q"),
        ("module._orig_mod.base_model.model.layers.0.q.base_layer", "layers.0.q"),
        ("_forward_module.module.layers.0._checkpoint_wrapped_module.q", "layers.0.q"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.q", "layers.0.q"),
        ("policy.base_model.model.layers.0.q.base_layer", "policy.layers.0.q"),
        ("layers.0.q.base_layer.base_layer", "layers.0.q"),
        ("layers.0.base_layers.q", "layers.0.base_layers.q"),
        ("", ""),
    ],
)
def test_paths_are_those_of_the_models_author(path, known):
    """A glob over any of the names matches; the first name that has no more than the author wrote is among them."""
    assert known in paths.names_of(path) and path in paths.names_of(path)
    assert paths.plain(path) == known or path.startswith(("module.", "_forward_module.module."))


def test_names_of_kinds():
    everyone = [f"a.{one}.b.{two}" for one in range(3) for two in range(4)]
    assert paths.named(everyone, everyone) == "a.*.b.*"
    assert paths.named(everyone[:4], everyone) == "a.0.b.0-3"
    assert paths.named(["a.0.b.1"], everyone) == "a.0.b.1" and paths.named([""], [""]) == "(root)"
    assert paths.named(["a.0.b.2", "a.1.b.0", "a.1.b.2"], everyone) == "a.0.b.2, a.1.b.0, a.1.b.2"
    assert paths.named(everyone[1:], everyone) == "a.*.b.* (some)"  # eleven of twelve
    assert paths.named(["base_model.model.a.0.base_layer", "base_model.model.a.1"], ["base_model.model.a.1"]) == "a.*"
    assert paths.kind("w1.layer2.3") == "w1.layer2.*"
    assert [len(chunk) for chunk in paths.chunks(list(map(str, range(10))), 4)] == [2, 3, 3, 2]


def accuracy(layers: int) -> AccuracyReport:
    gemms = []
    for place in range(layers):
        for name in NAMES:
            for gemm, (a, b) in GEMMS.items():
                worst = place == 7 and gemm == "dgrad"
                operands = [
                    OperandAccuracy(tensor, "e4m3 tensor", 1.0, 12.0 if worst else 31.0, 0.01 if worst else 0.0, 0.0)
                    for tensor in (a, b)
                ]
                gemms.append(
                    GemmAccuracy(
                        f"layers.{place}.{name}", gemm, (1, 2, 3), "current", *operands, 9.5 if worst else 28.0
                    )
                )
    return AccuracyReport(gemms)


def test_accuracy_is_grouped_too():
    text = accuracy(32).table(columns=170)
    rows = rows_of(text)
    assert len(rows) == 4 * 6 and rows[0][:4] == [f"layers.*.{NAMES[0]}", "32", "fprop", "current"]
    assert rows[2][-6:] == ["12.0", "31.0", "1.00%", "0.00%", "9.5", "28.0"]
    assert "lowest products: layers.7.self_attn.q_proj dgrad 9.5 dB" in text
    assert len(rows_of(accuracy(32).table(details=True, columns=170))) == 32 * 4 * 6


def test_a_heat_map_of_many_layers_stays_readable(tmp_path):
    gemms = accuracy(200).gemms
    layers = heat_map.picture_rows(gemms)
    assert len(layers) <= heat_map.MOST_ROWS and sum(map(len, layers.values())) == 800
    assert next(iter(layers)) == "layers.0-19.self_attn.q_proj"
    cells = heat_map.picture_cells(gemms, heat_map.PANELS[0], layers)
    assert cells[0] == [31.0, 31.0, 12.0, 12.0, 31.0, 31.0] and cells[1] == [31.0] * 6  # block 7 is in the first row
    assert len(heat_map.picture_rows(accuracy(10).gemms)) == 40  # a row each
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    height, width, _ = imread(accuracy(200).heat_map(tmp_path / "heat.png")).shape
    assert width <= 1700 and height <= 1700
    AccuracyReport().heat_map(tmp_path / "none.png")


def test_no_saturation_is_white(tmp_path):
    pytest.importorskip("matplotlib")
    import matplotlib

    for panel in heat_map.PANELS[1:]:
        red, green, blue, _ = matplotlib.colormaps[panel.colors](0.0)
        assert min(red, green, blue) > 0.9


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.open += [] if tag == "meta" else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_is_whole_and_escaped():
    site = Site("layers.0.<b>", "linear", "fprop", (1, 2, 3), "current", "high_precision", "1 < 2 & 3")
    page, tags = Report([site]).to_html(), Tags()
    tags.feed(page)
    assert not tags.open and "layers.0.&lt;b&gt;" in page and "1 &lt; 2 &amp; 3" in page


def test_speedup_is_unknown_where_nothing_was_timed():
    report = explain(nn.Linear(32, 32), torch.randn(8, 32), options={"recipe": "current"})
    assert report.speedup == "estimated speed-up: unknown, as no GEMM was timed on cpu" and report.speedup in str(
        report
    )
    assert explain(nn.ReLU(), torch.randn(8, 32)).speedup is None


def test_what_was_weighed(monkeypatch):
    """A report has each layer, what it would save and cost, and the sum: of a small layer that is left, of one that the
    policy names, and of one in high precision, which is not weighed."""
    rated(monkeypatch, H100)
    model, x = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))), torch.randn(16, 64)
    report = explain(model, x, options={"recipe": "current", "policy": {"1": "current", "2": "none"}})
    [graph] = report.weights
    found = [(one.layers, one.low, one.by_policy) for one in graph.layers]
    assert found == [(("0",), False, False), (("1",), True, True)]
    high, weight = 3 * 2 * 16 * 64 * 64 / sm90.H200.bf16_flops, graph.layers[1].weight
    assert graph.gain_s == weight.saved_s - weight.cost_s < 0
    # The first layer's input has no gradient, hence no dgrad.
    assert graph.bf16_s == pytest.approx(high * 5 / 3)
    sentence = f"linear layers alone: {high * 8 / 3 / (high * 8 / 3 - graph.gain_s):.2f}"
    assert sentence in report.speedup and "an H100's data sheet" in report.speedup
    text = report.table()
    assert re.search(r"^0 +1 .* left$", text, re.M) and re.search(r"^1 +1 .* FP8$", text, re.M)
    loss = f"FP8 costs {-1e3 * graph.gain_s:.3g} ms more than it saves"
    assert f"{loss}, as a policy entry or an FP8 gather of weights asks for it; these GEMMs take less than" in text
    assert "less than 0.001 ms in bf16; in bf16 the graph takes the device" in text
    assert report.to_dict()["weights"][0]["layers"][0]["weight"][1] == graph.layers[0].weight.saved_s


def test_layers_of_one_input_share_a_row():
    weight = Weighing(1e-3, 5e-4, 1e-4, 3)
    layers = [
        WeighedLayers((f"layers.{place}.attn.q", f"layers.{place}.attn.k"), place != 1, weight) for place in range(4)
    ]
    text = weights.text(Report(weights=[GraphWeight(layers, 5e-3, None, "guessed")]), 200)
    assert re.search(r"^layers\.\{0,2-3\}\.attn\.q, k +3 +3 +1.5 +0.3 +FP8$", text, re.M)
    assert re.search(r"^layers\.1\.attn\.q, k +1 +1 +0.5 +0.1 +left$", text, re.M)
    assert "FP8 gains 1.2 of 4 ms (30%)" in text and "host" not in text and weights.text(Report(), 200) == ""


@pytest.mark.parametrize("seconds", [1e-8, 2e-6, 1.234e-3, 7.3])
def test_times_have_no_exponent(seconds):
    """The layers lose without a policy entry, were left, or gain next to nothing."""
    layer = WeighedLayers(("layer",), True, Weighing(seconds, 0.0, seconds, 3))
    shown = [dataclasses.replace(layer, low=low, weight=layer.weight._replace(cost_s=0.0)) for low in (True, False)]
    for one in (layer, *shown):
        text = weights.text(Report(weights=[GraphWeight([one], seconds, seconds, "guessed")]), 400)
        assert not re.search(r"\de[+-]\d|-\d|policy", text)
        assert ("more than it saves; these GEMMs" in text) == (one is layer)
        assert ("no layer is in FP8" in text) == (not one.low)
    figure = {1e-8: "less than 0.001", 2e-6: "0.002", 1.234e-3: "1.23", 7.3: "7300"}[seconds]
    assert f"takes the device at least {figure} ms, and the host {figure} ms" in text


@pytest.mark.parametrize("made", [report_of, accuracy])
def test_no_line_is_wider_than_it_may_be(made):
    assert max(len(line) for line in made(32).table(columns=64).splitlines()) <= 64
