// The timeline: a row per role, a bar per phase; and a lane per episode, a bar per turn.
"use strict";

megarl.timeline = (() => {
  const WIDTH = 1200;
  const ROW = 46;
  const BAR = 24;
  const LABEL = 34;
  const LEFT = 64;
  const AXIS = 24;
  const CHOICES = [4, 16, 64, 0];
  const { element, svg, seconds } = megarl;
  let numShown = 16;

  function draw(container, spans, idle, episodes) {
    if (!spans.length) {
      container.replaceChildren(element("p", { class: "empty" }, "No phase has begun yet."));
      return;
    }
    const last = spans[spans.length - 1].step;
    const shown = numShown ? spans.filter((span) => span.step > last - numShown) : spans;
    const steps = idle.filter((one) => shown.some((span) => span.step === one.step));
    const readout = element("output", {}, "Point at a bar.");
    container.replaceChildren(
      element("div", { class: "toolbar" }, choice(container, spans, idle, episodes), legend(shown), readout),
      bars(shown, steps, readout),
      ...(steps.length ? [element("p", { class: "idle" }, mean(steps))] : []),
      element("h2", {}, "Time by phase"),
      table(shown),
      ...(episodes && episodes.lanes.length ? swimlane(episodes) : []),
    );
  }

  const LANE = 9;
  const SPEAKERS = { sampled: "model", given: "environment" };

  // The episodes of one step, each on a line of its own: who kept it waiting, and which ones ended late.
  function swimlane({ step, total, lanes }) {
    const lengths = lanes.map((one) => one.turns.reduce((sum, turn) => sum + turn.seconds, 0));
    const began = Math.min(...lanes.map((one) => one.began));
    const ended = Math.max(...lanes.map((one, i) => one.began + lengths[i]));
    const x = (time) => ((WIDTH - 8) * (time - began)) / Math.max(1e-9, ended - began);
    const height = lanes.length * LANE + AXIS;
    const readout = element("output", {}, "Point at a turn.");
    const image = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "bars", role: "img", "aria-label": "Turns of each episode" });
    lanes.forEach((one, i) => {
      let time = one.began;
      one.turns.forEach((turn, number) => {
        const start = x(time);
        time += turn.seconds;
        if (!SPEAKERS[turn.kind]) return;
        const told = `${one.name}: turn ${number + 1}, ${SPEAKERS[turn.kind]}, ${seconds(turn.seconds)}; ${one.ending}, score ${megarl.number(one.score)}`;
        const place = { x: start, y: i * LANE + 1, width: Math.max(0.8, x(time) - start), height: LANE - 2 };
        image.append(svg("rect", { class: `bar turn turn-${turn.kind}`, ...place, onpointerenter: () => (readout.textContent = told) }));
      });
    });
    for (let i = 0; i <= 4; i += 1) {
      const anchor = i === 0 ? "start" : i === 4 ? "end" : "middle";
      const time = began + ((ended - began) * i) / 4;
      image.append(svg("text", { class: "tick", x: x(time), y: height - 6, "text-anchor": anchor }, seconds(time - began)));
    }
    const which = total > lanes.length ? `; the ${lanes.length} that ended last` : "";
    return [
      element("h2", {}, `Episodes of step ${step}: ${total}${which}`),
      element("div", { class: "toolbar" }, element("span", { class: "legend" }, ...Object.entries(SPEAKERS).map(([kind, name]) => element("span", { class: `key turn-${kind}` }, name))), readout),
      element("div", { class: "scroll" }, image),
    ];
  }

  const percent = (share) => `${Math.round(100 * share)} %`;

  // Weighted by time: the share of all the time shown in which a role had nothing to do.
  function mean(steps) {
    const shares = ["rollout", "trainer"].filter((role) => role in steps[0].roles).map((role) => {
      const total = steps.reduce((sum, one) => sum + one.seconds, 0);
      return `${role} ${percent(steps.reduce((sum, one) => sum + one.seconds * one.roles[role], 0) / Math.max(1e-9, total))}`;
    });
    return `Idle in ${steps.length === 1 ? "this step" : `these ${steps.length} steps`}: ${shares.join(", ")}`;
  }

  function choice(container, spans, idle, episodes) {
    const select = element("select", {
      "aria-label": "Steps shown",
      onchange: () => ((numShown = Number(select.value)), draw(container, spans, idle, episodes)),
    });
    for (const number of CHOICES) {
      select.append(element("option", { value: number, selected: number === numShown }, number ? `last ${number} steps` : "all steps"));
    }
    return select;
  }

  function legend(spans) {
    const phases = [...new Set(spans.map((span) => span.phase))];
    return element("span", { class: "legend" }, ...phases.map((phase) => element("span", { class: `key phase-${phase}` }, phase)));
  }

  function bars(spans, idle, readout) {
    const roles = [...new Set(spans.flatMap((span) => span.roles))];
    const began = Math.min(...spans.map((span) => span.began));
    const ended = Math.max(...spans.map((span) => span.began + span.seconds));
    const x = (time) => LEFT + ((WIDTH - LEFT - 8) * (time - began)) / Math.max(1e-9, ended - began);
    const height = roles.length * ROW + AXIS;
    const image = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "bars", role: "img", "aria-label": "Phases of each role" });
    roles.forEach((role, i) => {
      image.append(
        svg("text", { class: "role", x: 0, y: i * ROW + BAR / 2 + 9 }, role),
        svg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: (i + 1) * ROW, y2: (i + 1) * ROW }),
      );
    });
    for (let i = 0; i <= 4; i += 1) {
      const time = began + ((ended - began) * i) / 4;
      const anchor = i === 0 ? "start" : i === 4 ? "end" : "middle";
      image.append(svg("text", { class: "tick", x: x(time), y: height - 6, "text-anchor": anchor }, seconds(time - began)));
    }
    for (const span of spans) {
      for (const role of span.roles) {
        image.append(
          svg("rect", {
            class: `bar phase-${span.phase}${span.is_open ? " open" : ""}`,
            x: x(span.began),
            y: roles.indexOf(role) * ROW + 5,
            width: Math.max(0.8, x(span.began + span.seconds) - x(span.began)),
            height: BAR,
            rx: 2,
            onpointerenter: () => {
              const end = span.is_open ? " so far" : "";
              readout.textContent = `step ${span.step}: ${span.phase}, ${seconds(span.seconds)}${end}`;
            },
          }),
        );
      }
    }
    for (const one of idle) {
      const start = Math.max(LEFT, x(one.began));
      const width = x(one.began + one.seconds) - start;
      if (width < LABEL) continue; // the numbers of narrow steps would cover each other
      for (const [role, share] of Object.entries(one.roles)) {
        if (!roles.includes(role)) continue;
        const told = `step ${one.step}: ${role} idle for ${percent(share)} of ${seconds(one.seconds)}`;
        const place = { x: start + width / 2, y: roles.indexOf(role) * ROW + BAR + 16, "text-anchor": "middle" };
        const text = width < 2 * LABEL ? percent(share) : `idle ${percent(share)}`;
        image.append(svg("text", { class: "tick idle", ...place, onpointerenter: () => (readout.textContent = told) }, text));
      }
    }
    return element("div", { class: "scroll" }, image);
  }

  function table(spans) {
    const total = spans.reduce((sum, span) => sum + span.seconds, 0);
    const phases = new Map();
    for (const span of spans) {
      const known = phases.get(span.phase) || { count: 0, seconds: 0, longest: 0 };
      known.count += 1;
      known.seconds += span.seconds;
      known.longest = Math.max(known.longest, span.seconds);
      phases.set(span.phase, known);
    }
    const rows = [...phases].sort((a, b) => b[1].seconds - a[1].seconds);
    const cells = (tag, values) => element("tr", {}, ...values.map((one) => element(tag, {}, one)));
    return element(
      "div",
      { class: "scroll" },
      element(
        "table",
        {},
        element("thead", {}, cells("th", ["phase", "times", "mean", "longest", "together", "share"])),
        element(
          "tbody",
          {},
          ...rows.map(([phase, one]) =>
            cells("td", [
              phase,
              String(one.count),
              seconds(one.seconds / one.count),
              seconds(one.longest),
              seconds(one.seconds),
              `${((100 * one.seconds) / Math.max(1e-9, total)).toFixed(1)} %`,
            ]),
          ),
        ),
      ),
    );
  }

  return { draw };
})();
