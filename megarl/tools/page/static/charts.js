// The curves of a run, one card each.
"use strict";

megarl.charts = (() => {
  const WIDTH = 380;
  const HEIGHT = 176;
  const LEFT = 50;
  const RIGHT = 10;
  const TOP = 8;
  const BOTTOM = 22;
  const MAX_DOTS = 40;
  const { element, svg, number } = megarl;

  function draw(container, charts) {
    const sections = new Map();
    for (const chart of charts) {
      if (!sections.has(chart.section)) sections.set(chart.section, []);
      sections.get(chart.section).push(card(chart));
    }
    container.replaceChildren(
      ...[...sections].map(([name, cards]) =>
        element("div", { class: "chart-section" }, element("h2", {}, name), element("div", { class: "cards" }, ...cards)),
      ),
    );
    if (!charts.length) container.append(element("p", { class: "empty" }, "No step has finished yet."));
  }

  function card(chart) {
    const steps = [...new Set(chart.series.flatMap((series) => series.steps))].sort((a, b) => a - b);
    const points = chart.series.map((series) => new Map(series.steps.map((step, i) => [step, series.values[i]])));
    const readout = element("output", {});
    const picture = drawing(chart, steps);
    const show = (step) => {
      readout.replaceChildren(
        ...chart.series.map((series, i) =>
          element("span", { class: `key key-${colour(series, i)} ${dash(series)}` }, chart.series.length > 1 ? `${series.name} ` : "", number(value(points[i], step))),
        ),
        element("span", { class: "at" }, `step ${step}`),
      );
      picture.cursor(step);
    };
    const last = steps[steps.length - 1];
    picture.image.addEventListener("pointermove", (event) => show(picture.nearest(event)));
    picture.image.addEventListener("pointerleave", () => (show(last), picture.cursor(null)));
    show(last);
    picture.cursor(null);
    return element("article", { class: "card" }, element("h3", {}, chart.title), readout, picture.image);
  }

  /** Where runs are compared, a run has a colour and a number of it a dash. */
  const colour = (series, i) => (series.run ?? i) % 6;
  const dash = (series) => (series.part ? `dash-${Math.min(series.part, 2)}` : "");

  /** The value at the step, or the last one before it. */
  function value(points, step) {
    if (points.has(step)) return points.get(step);
    const known = [...points.keys()].filter((one) => one <= step);
    return known.length ? points.get(known[known.length - 1]) : null;
  }

  function drawing(chart, steps) {
    const values = chart.series.flatMap((series) => series.values).filter((one) => one !== null);
    const ticks = niceTicks(Math.min(...values), Math.max(...values));
    const [low, high] = [ticks[0], ticks[ticks.length - 1]];
    const [first, last] = [steps[0], steps[steps.length - 1]];
    const x = (step) => LEFT + ((WIDTH - LEFT - RIGHT) * (step - first)) / Math.max(1, last - first);
    const y = (one) => TOP + ((HEIGHT - TOP - BOTTOM) * (high - one)) / (high - low);
    const image = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title });
    for (const tick of ticks) {
      image.append(
        svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }),
        svg("text", { class: "tick", x: LEFT - 6, y: y(tick) + 3.5, "text-anchor": "end" }, number(tick)),
      );
    }
    for (const step of new Set([first, Math.round((first + last) / 2), last])) {
      const anchor = step === first ? "start" : step === last ? "end" : "middle";
      image.append(svg("text", { class: "tick", x: x(step), y: HEIGHT - 6, "text-anchor": anchor }, String(step)));
    }
    const line = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    image.append(line);
    chart.series.forEach((series, i) => {
      image.append(svg("path", { class: `line line-${colour(series, i)} ${dash(series)}`, d: path(series, x, y) }));
      if (series.steps.length > MAX_DOTS) return;
      series.steps.forEach((step, j) => {
        if (series.values[j] === null) return;
        image.append(svg("circle", { class: `dot dot-${colour(series, i)}`, cx: x(step), cy: y(series.values[j]), r: 2.2 }));
      });
    });
    return {
      image,
      cursor: (step) => {
        line.setAttribute("visibility", step === null ? "hidden" : "visible");
        if (step !== null) megarl.fill(line, { x1: x(step), x2: x(step) }, []);
      },
      nearest: (event) => {
        const box = image.getBoundingClientRect();
        const at = ((event.clientX - box.left) / box.width) * WIDTH;
        return steps.reduce((best, step) => (Math.abs(x(step) - at) < Math.abs(x(best) - at) ? step : best));
      },
    };
  }

  /** The path of a series, with a gap where a value is not finite. */
  function path(series, x, y) {
    let isOpen = false;
    return series.steps
      .map((step, i) => {
        if (series.values[i] === null) return (isOpen = false), "";
        const command = isOpen ? "L" : "M";
        isOpen = true;
        return `${command}${x(step).toFixed(1)} ${y(series.values[i]).toFixed(1)}`;
      })
      .join("");
  }

  /** Return three to five round numbers around the values. */
  function niceTicks(low, high) {
    if (!Number.isFinite(low)) return [0, 1];
    if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
    const raw = (high - low) / 3;
    const power = 10 ** Math.floor(Math.log10(raw));
    const size = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw);
    const ticks = [];
    const end = Math.ceil(high / size - 1e-9);
    for (let i = Math.floor(low / size + 1e-9); i <= end; i += 1) ticks.push(Number((i * size).toPrecision(12)));
    return ticks;
  }

  /** Return a table with its title; the first column has the names. */
  function table({ title, header, rows }) {
    const cells = (kind, texts) => element("tr", {}, ...texts.map((text) => element(kind, {}, text)));
    return element(
      "div",
      { class: "chart-section" },
      element("h2", {}, title),
      element("div", { class: "table-box" }, element("table", { class: "compared" }, cells("th", header), ...rows.map((row) => cells("td", row)))),
    );
  }

  return { draw, table };
})();
