"""Draw one tensor of a small plan: `python -m scripts.draw_plan` writes docs/resharding.svg."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.families.shape import ModelShape
from megarl.weights.algebra.plan import Move, Plan, plan
from megarl.weights.algebra.slices import Holding, Layout, Slice, on_gpus
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout

PICTURE = Path("docs/resharding.svg")

_TENSOR = "model.layers.0.mlp.up_proj.weight"
_TENSOR_PARALLEL = 2
_COLORS = ("#4477aa", "#ee9944", "#228866", "#bb5577")
"""Colours of the trainer's shares, from the first row to the last; distinct also for most colour-blind people."""
_ROW = 11
_GAP = 12
_BOX_WIDTH = 150
_LEFT, _RIGHT = 40, 560
_SIZE = (860, 510)


def example() -> Plan:
    """Return a plan from four ranks on node 0 to two engines of two ranks on node 1 and one on node 2."""
    shape = ModelShape(
        family="llama",
        num_layers=2,
        hidden=8,
        ffn_hidden=8,
        num_heads=4,
        num_kv_heads=4,
        head_dim=2,
        vocab=64 * _TENSOR_PARALLEL,
        max_context_tokens=64,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        has_tied_embeddings=False,
        has_qkv_bias=False,
        has_qk_norm=False,
        dtype="bfloat16",
    )
    source = megatron_layout(shape, MegatronParallel(tensor=4), dtype="bfloat16")
    target = sglang_layout(shape, tensor=_TENSOR_PARALLEL, num_engines=3, dtype="bfloat16")
    trainers = [(0, rank) for rank in range(4)]
    engines = [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]
    return plan(source, target, locations=on_gpus(trainers, engines))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """The drawing of a rank with the rows it holds."""

    label: str
    rows: range
    left: int
    top: int

    @property
    def height(self) -> int:
        return _ROW * len(self.rows)

    def middle(self, box: Slice) -> float:
        return self.top + _ROW * (box.offsets[0] - self.rows.start + box.shape[0] / 2)


def draw(moves: Plan) -> str:
    """Return an SVG of the rows of one tensor, their holders and their moves."""
    shares = [_rows(holding) for holding in moves.source.holdings]
    sources = _cards(moves.source, "trainer rank {}", _LEFT, [range(4)])
    targets = _cards(moves.target, "engine {} rank {}", _RIGHT, [range(4), range(4, 6)])
    width, height = _SIZE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#333"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="26" font-size="14" font-weight="bold">One tensor, from four shares to two</text>',
        *_panel("node 0: trainer, TP 4", list(sources.values())),
        *_panel("node 1: two engines, TP 2", [targets[rank] for rank in range(4)]),
        *_panel("node 2: one engine, TP 2", [targets[rank] for rank in range(4, 6)]),
        *(line for card in (*sources.values(), *targets.values()) for line in _card(card, shares)),
        *(line for move in moves.moves if move.slice.name == _TENSOR for line in _arrow(move, sources, targets)),
        *_legend(height - 26),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _rows(holding: Holding) -> range:
    (piece,) = (piece for piece in holding.pieces if piece.slice.name == _TENSOR)
    start = piece.slice.offsets[0]
    return range(start, start + piece.slice.shape[0])


def _cards(layout: Layout, label: str, left: int, nodes: list[range]) -> dict[int, _Card]:
    cards: dict[int, _Card] = {}
    top = 76
    for node in nodes:
        for rank in node:
            words = divmod(rank, _TENSOR_PARALLEL) if "engine" in label else (rank,)
            rows = _rows(layout.by_rank[rank])
            cards[rank] = _Card(label=label.format(*words), rows=rows, left=left, top=top)
            top += cards[rank].height + _GAP
        top += 40
    return cards


def _panel(title: str, cards: list[_Card]) -> Iterator[str]:
    left, top = cards[0].left - 16, cards[0].top - 30
    height = cards[-1].top + cards[-1].height + 14 - top
    width = _BOX_WIDTH + (32 if left < _RIGHT - 16 else 110)
    yield f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="8" fill="#f4f4f4" stroke="#bbb"/>'
    yield f'<text x="{left + 10}" y="{top + 19}" fill="#333">{title}</text>'


def _card(card: _Card, shares: list[range]) -> Iterator[str]:
    for row in card.rows:
        color = next(color for color, share in zip(_COLORS, shares, strict=True) if row in share)
        y = card.top + _ROW * (row - card.rows.start)
        yield (
            f'<rect x="{card.left}" y="{y}" width="{_BOX_WIDTH}" height="{_ROW}" fill="{color}" stroke="white"'
            ' stroke-width="0.6"/>'
        )
    middle = card.top + card.height / 2 + 4
    yield (
        f'<text x="{card.left + _BOX_WIDTH / 2}" y="{middle:g}" text-anchor="middle" fill="white" stroke="#222"'
        f' stroke-width="2.4" paint-order="stroke">{card.label}</text>'
    )


def _arrow(move: Move, sources: dict[int, _Card], targets: dict[int, _Card]) -> Iterator[str]:
    receiver = targets[move.target_rank]
    end = receiver.middle(move.slice)
    if move.hop:
        sender = targets[move.source_rank]
        start, x = sender.middle(move.slice), sender.left + _BOX_WIDTH
        curve = f"M{x},{start:g} C{x + 70},{start:g} {x + 70},{end:g} {x + 3},{end:g}"
        style = 'stroke-dasharray="5 3"'
    else:
        sender = sources[move.source_rank]
        start, x = sender.middle(move.slice), sender.left + _BOX_WIDTH
        curve = f"M{x},{start:g} C{x + 180},{start:g} {receiver.left - 180},{end:g} {receiver.left - 3},{end:g}"
        style = ""
    yield f'<path d="{curve}" fill="none" stroke="#333" stroke-width="1.3" {style} marker-end="url(#tip)"/>'


def _legend(y: int) -> Iterator[str]:
    for x, style, words in (
        (_LEFT, "", "over the network: each share enters a node once"),
        (_LEFT + 400, 'stroke-dasharray="5 3"', "inside the node: passed on by the rank that received it"),
    ):
        yield (
            f'<path d="M{x},{y} h44" fill="none" stroke="#333" stroke-width="1.3" {style} marker-end="url(#tip)"/>'
            f'<text x="{x + 54}" y="{y + 4}" fill="#333">{words}</text>'
        )


if __name__ == "__main__":
    PICTURE.write_text(draw(example()))
