"""Pictures and the page show the numbers that went in, whatever the tokens are."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import warnings

import numpy as np
import pytest

from tfm.analysis.attention_maps import AttentionMaps
from tfm.analysis.attention_page import attention_page, write_attention_page
from tfm.analysis.attention_plots import _label, _picture, draw_head, draw_maps

TOKENS = ["▁the", "<script>alert(1)</script>", "$x^2$", "שלום", "مرحبا", "注意", "&amp;", "\u2028", "", "\x00"]
HOSTILE = '</script><script>document.body.innerHTML = "broken"</script><!--'


def weights_of(*shape, seed=0):
    scores = np.exp(2 * np.random.default_rng(seed).normal(size=shape))
    return (scores / scores.sum(-1, keepdims=True)).astype(np.float32)


def maps_of(rows=tuple("abcd"), columns=tuple("vwxyz")):
    T, S = len(rows), len(columns)
    return AttentionMaps(tuple(weights_of(3, S, S, seed=i) for i in range(2)),
                         tuple(weights_of(3, T, T, seed=i + 2) for i in range(2)),
                         tuple(weights_of(3, T, S, seed=i + 4) for i in range(2))).with_tokens(columns, rows)


def page_data(page):
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.S)[1])


def test_page_holds_every_weight():
    maps = maps_of()
    views = {view["name"]: view for view in page_data(attention_page(maps))["views"]}
    assert list(views) == ["encoder", "decoder", "cross", "encoder rollout", "decoder rollout"]
    for part in maps.parts:
        for layer, packed in zip(maps.layers(part), views[part]["layers"], strict=True):
            numbers = np.frombuffer(base64.b64decode(packed), "<u2") / 65535
            np.testing.assert_allclose(numbers.reshape(layer.shape), layer, atol=1e-5)
    assert views["cross"]["rows"] == list("abcd") and views["cross"]["columns"] == list("vwxyz")


def test_page_asks_for_nothing_and_tokens_stay_text():
    page = attention_page(maps_of(rows=(HOSTILE, "<img src=x onerror=alert(1)>")), title=HOSTILE)
    assert not re.search(r"https?:|src=|href=|@import|url\(", page.split('type="application/json">')[0])
    assert "default-src 'none'" in page
    data = page_data(page)
    assert data["title"] == HOSTILE and data["views"][2]["rows"][0] == HOSTILE.replace(" ", "␣")
    assert page.count("</script>") == 2, "a token closed the script element"


def test_pictures_of_awkward_tokens(tmp_path):
    from matplotlib.image import imread

    tokens = tuple(TOKENS * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_head(weights_of(40, 40), tokens, tokens, tmp_path / "one.png")
    height, width, _ = imread(tmp_path / "one.png").shape
    assert height > 1200 and width > 1200, "fewer than 20 pixels a token beside the labels"


def ink(text, path):
    """The part of a picture that a text covers."""
    from matplotlib.image import imread

    with _picture(path, (2, 1)) as figure:
        figure.text(0.5, 0.5, text, parse_math=False, fontsize=20, ha="center")
    dark = imread(path)[..., 0] < 0.5
    return dark[np.ix_(dark.any(1), dark.any(0))]


def test_right_to_left_words_are_ordered_and_joined(tmp_path):
    """Hebrew looks like its letters from the last to the first in left-to-right order; joined Arabic is narrower."""
    word = "שלום"
    np.testing.assert_array_equal(ink(word, tmp_path / "a.png"), ink("\u202d" + word[::-1], tmp_path / "b.png"))
    letters = "كتاب"
    joined, apart = (ink(text, tmp_path / "c.png").shape[1] for text in (letters, "\u200c".join(letters)))
    assert joined < 0.8 * apart


def test_a_character_without_a_glyph_becomes_its_number():
    assert _label("a\U00012000") == "a<12000>", "no common font has cuneiform"
    assert _label("é") == "é"


def test_a_picture_shows_the_weights_in_their_places(tmp_path):
    """One weight of 1 at query 1, key 3: the brightest yellow lies in that cell and nowhere else."""
    from matplotlib.image import imread

    weights = np.zeros((4, 5))
    weights[1, 3] = 1.0
    draw_head(weights, list("abcd"), list("vwxyz"), tmp_path / "one.png")
    image = imread(tmp_path / "one.png")[..., :3]
    dark = np.abs(image - [0.267, 0.005, 0.329]).max(-1) < 0.02
    columns = np.flatnonzero(dark.sum(0) > 0.5 * dark.sum(0).max())  # of the matrix, not of the colour bar
    rows = np.flatnonzero(dark[:, columns].any(1))
    bright = np.argwhere(np.abs(image - [0.993, 0.906, 0.144]).max(-1) < 0.02)
    bright = bright[bright[:, 1] <= columns[-1]]
    cell = (bright - [rows[0], columns[0]] + 0.5) / [np.ptp(rows) + 1, np.ptp(columns) + 1] * [4, 5]
    np.testing.assert_allclose(cell.mean(0), [1.5, 3.5], atol=0.05)
    np.testing.assert_allclose(np.ptp(cell, axis=0), [1, 1], atol=0.05)


def test_files_of_all_parts(tmp_path):
    from matplotlib.image import imread

    files = draw_maps(maps_of(), tmp_path)
    assert [file.name for file in files] == [
        f"{part}_{what}.png" for part in ("encoder", "decoder", "cross") for what in ("grid", "layer1_mean")]
    assert min(imread(file).std() for file in files) > 0.05
    assert (tmp_path / "cross_layer0_head2.png") in draw_maps(maps_of(), tmp_path, head=2)
    with pytest.raises(ValueError, match="0 to 2"):
        draw_maps(maps_of(), tmp_path, head=3)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """<script>
for (const [id, value] of [["view", 2], ["layer", 1], ["head", HEAD]]) {
  document.getElementById(id).value = value; document.getElementById(id).dispatchEvent(new Event("input"));
}
const box = document.getElementById("map").getBoundingClientRect();
document.getElementById("map").dispatchEvent(new MouseEvent("mousemove", {
  clientX: box.left + shown.left + 3.5 * shown.cell, clientY: box.top + shown.top + 1.5 * shown.cell}));
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("head", [2, 3])
def test_page_in_a_browser(tmp_path, head):
    """Choose cross-attention, layer 1 and a head (3: the mean); point at query 1, key 3; read what is shown."""
    maps = maps_of(rows=("a", HOSTILE, "c", "d"))
    write_attention_page(maps, tmp_path / "page.html")
    probed = (tmp_path / "page.html").read_text().replace("</body>", PROBE.replace("HEAD", str(head)) + "</body>")
    (tmp_path / "page.html").write_text(probed)
    found = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user",
                            "--dump-dom", f"file://{tmp_path}/page.html"], capture_output=True, text=True, timeout=60)
    weights = maps.cross[1].mean(0) if head == 3 else maps.cross[1][head]
    tip = re.sub(r"<[^>]*>", "", re.search(r'<div id="tip".*?</div>', found.stdout, re.S)[0])
    assert tip.endswith(f" (1) reads y (3): {weights[1, 3]:.4f}"), tip
    assert "broken" in tip and "4 queries × 5 keys" in found.stdout
    assert f'id="headText">{"mean" if head == 3 else head}<' in found.stdout
