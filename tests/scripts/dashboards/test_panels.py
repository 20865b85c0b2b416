from __future__ import annotations

from megarl.observe import catalogue as names
from scripts.dashboards.panels import (
    COLUMNS,
    Dashboard,
    Panel,
    PanelRow,
    complete,
    formula,
    mean,
    metrics_in,
    names_in,
    quantile,
    rate,
    to_grafana,
    value,
)


def test_a_query_asks_for_the_chosen_runs_and_names_its_labels() -> None:
    query = value(names.EVAL, where='number="accuracy"')
    assert query.text == 'megarl_eval{run=~"$run",number="accuracy"}'
    assert query.legend == "{{number}} ({{run}})"
    assert rate(names.PHASE_SECONDS).text == 'rate(megarl_phase_seconds_total{run=~"$run"}[$__rate_interval])'
    assert formula("time() - megarl_step{run}", "").text == 'time() - megarl_step{run=~"$run"}'


def test_the_metrics_of_a_query_are_found_whatever_is_around_them() -> None:
    text = f"{quantile(names.REWARD_SECONDS, 0.5).text} + {mean(names.GROUP_SECONDS).text} + megarl_nothing"
    assert metrics_in(text, names.METRICS) == {names.REWARD_SECONDS, names.GROUP_SECONDS}
    assert "megarl_nothing" in names_in(text, names.PREFIX)


def test_panels_fill_rows_from_left_to_right_and_never_overlap() -> None:
    panels = tuple(
        Panel(title=str(index), queries=(value(names.LOSS),), width=10, height=5 + index) for index in range(5)
    )
    board = Dashboard(
        uid="x",
        title="x",
        text="",
        sections=(),
        rows=(PanelRow(title="a", panels=panels), PanelRow(title="b", panels=panels)),
    )
    drawn = to_grafana(board)["panels"]
    assert isinstance(drawn, list)
    taken: set[tuple[int, int]] = set()
    for panel in drawn:
        assert isinstance(panel, dict)
        place = panel["gridPos"]
        assert isinstance(place, dict)
        left, top, width, height = (int(str(place[key])) for key in ("x", "y", "w", "h"))
        cells = {(column, row) for column in range(left, left + width) for row in range(top, top + height)}
        assert left + width <= COLUMNS
        assert not cells & taken
        taken |= cells


def test_a_metric_that_no_row_shows_gets_a_panel_on_the_board_of_its_section() -> None:
    rows = (PanelRow(title="a", panels=(Panel(title="Epoch", queries=(value(names.EPOCH),)),)),)
    (board,) = complete([Dashboard(uid="x", title="x", text="", sections=("data",), rows=rows)])
    assert [row.title for row in board.rows] == ["a", "Other"]
    metrics = [names.DATA_PROMPTS, names.DATA_DROPPED, names.TRAINED_PROMPTS, names.PROMPT_TOKENS]
    assert [panel.title for panel in board.rows[1].panels] == [metric.text for metric in metrics]
    assert board.rows[1].panels[2].queries[0].text == 'increase(megarl_trained_prompts_total{run=~"$run"}[1h])'
