from __future__ import annotations

from xml.etree import ElementTree

from scripts.draw_plan import PICTURE, draw, example
from tests.repository import ROOT


def test_the_picture_of_the_documentation_is_that_of_the_plan() -> None:
    assert (ROOT / PICTURE).read_text() == draw(example()), "run `python -m scripts.draw_plan`"


def test_it_shows_every_move_of_the_tensor() -> None:
    paths = ElementTree.fromstring(draw(example())).iter("{http://www.w3.org/2000/svg}path")
    arrows = [path for path in paths if path.get("marker-end")]
    # Four shares to two nodes, passed on to a second engine in one of them, and two in the legend.
    assert len(arrows) == 4 + 4 + 4 + 2
