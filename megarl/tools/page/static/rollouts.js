// A list of rollouts of which only the visible rows are in the document, and one rollout token by token.
"use strict";

megarl.rollouts = (() => {
  const ROW = 46;
  const PAGE = 200;
  const SPARE = 6;
  const { element, number } = megarl;

  let pages = new Map();
  let total = 0;
  let selected = -1;
  let colour = "gap";
  let generation = 0;
  let parts = null;

  function build(container) {
    const list = element("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": "Rollouts" });
    const inner = element("div", { class: "inner" });
    const detail = element("div", { class: "detail" }, element("p", { class: "empty" }, "Choose a rollout: arrow keys, or j and k."));
    const search = element("input", { type: "search", placeholder: "text or prompt   /", "aria-label": "Search" });
    const step = element("select", { "aria-label": "Step" }, element("option", { value: "" }, "every step"));
    const source = element("select", { "aria-label": "Source" }, element("option", { value: "" }, "every source"));
    const sort = element("select", { "aria-label": "Order" });
    for (const [key, order, label] of [
      ["step", "descending", "newest first"],
      ["step", "ascending", "oldest first"],
      ["score", "descending", "highest reward"],
      ["score", "ascending", "lowest reward"],
      ["num_tokens", "descending", "longest"],
      ["num_tokens", "ascending", "shortest"],
      ["largest_gap", "descending", "largest gap"],
    ]) {
      sort.append(element("option", { value: `${key} ${order}` }, label));
    }
    const count = element("output", {});
    list.append(inner);
    parts = { container, list, inner, detail, search, step, source, sort, count };
    container.replaceChildren(
      element("div", { class: "toolbar" }, search, step, source, sort, count),
      element("div", { class: "browser" }, list, detail),
    );
    search.addEventListener("input", megarl.debounced(reload));
    for (const control of [step, source, sort]) control.addEventListener("change", reload);
    list.addEventListener("scroll", () => requestAnimationFrame(show));
    new ResizeObserver(() => show()).observe(list);
    list.addEventListener("keydown", onKey);
    document.addEventListener("keydown", (event) => {
      const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement.tagName);
      if (event.key === "/" && !isTyping && !container.hidden) {
        event.preventDefault();
        search.focus();
      }
    });
  }

  function query() {
    const [sort, order] = parts.sort.value.split(" ");
    return { step: parts.step.value, source: parts.source.value, text: parts.search.value.trim(), sort, order };
  }

  /** Load the list again from the first row, with another query. */
  async function reload() {
    generation += 1;
    pages = new Map();
    selected = -1;
    parts.list.scrollTop = 0;
    await load(0);
    show();
  }

  async function load(page) {
    if (pages.has(page)) return;
    const asked = generation;
    pages.set(page, []);
    const answer = await megarl.source.rollouts({ ...query(), offset: page * PAGE, limit: PAGE });
    if (asked !== generation) return;
    pages.set(page, answer.rows);
    total = answer.total;
    options(parts.step, answer.steps, (one) => `step ${one}`);
    options(parts.source, answer.sources, (one) => one);
    const left = megarl.source.numLeftOut || 0;
    parts.count.textContent = `${total.toLocaleString("en")} rollouts${left ? `; ${left.toLocaleString("en")} more are not in this file` : ""}`;
    parts.inner.style.height = `${Math.max(1, total) * ROW}px`;
    show();
  }

  function options(select, values, label) {
    if (select.options.length - 1 === values.length) return;
    const chosen = select.value;
    select.replaceChildren(select.options[0], ...values.map((one) => element("option", { value: one }, label(one))));
    select.value = chosen;
  }

  function row(index) {
    return (pages.get(Math.floor(index / PAGE)) || [])[index % PAGE];
  }

  /** Draw the visible rows and a few around them. */
  function show() {
    const { list, inner } = parts;
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - SPARE);
    const end = Math.min(total, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + SPARE);
    const rows = [];
    for (let index = first; index < end; index += 1) {
      const one = row(index);
      if (!one) load(Math.floor(index / PAGE));
      rows.push(item(index, one));
    }
    inner.replaceChildren(...rows);
    if (!total) inner.append(element("p", { class: "empty" }, "No rollout matches."));
  }

  function item(index, one) {
    const isSelected = index === selected;
    const item = element("div", {
      class: `item${isSelected ? " selected" : ""}`,
      role: "option",
      id: `row-${index}`,
      "aria-selected": String(isSelected),
      onclick: () => select(index),
    });
    item.style.transform = `translateY(${index * ROW}px)`;
    if (!one) return item;
    item.append(
      element("span", { class: `reward ${one.is_masked ? "masked" : one.score >= megarl.rightFrom ? "good" : one.score > 0 ? "part" : "bad"}` }, one.is_masked ? "–" : number(one.score)),
      element("span", { class: "line" }, one.line || "(empty)"),
      element(
        "span",
        { class: "meta" },
        `step ${one.step} · ${one.prompt_uid} · ${one.num_tokens} tokens · ${one.ending || one.finish_reason} · gap ${number(one.largest_gap)}`,
      ),
    );
    return item;
  }

  function onKey(event) {
    const move = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (!move) return;
    event.preventDefault();
    select(Math.max(0, Math.min(total - 1, selected + move)));
  }

  async function select(index) {
    const one = row(index);
    if (!one) return;
    selected = index;
    const { list } = parts;
    if (index * ROW < list.scrollTop) list.scrollTop = index * ROW;
    if ((index + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (index + 1) * ROW - list.clientHeight;
    show();
    list.setAttribute("aria-activedescendant", `row-${index}`);
    const detail = await megarl.source.rollout(one.step, one.row);
    if (selected === index) showDetail(detail);
  }

  function showDetail(one) {
    const select = element("select", {
      "aria-label": "Colour of tokens",
      onchange: () => ((colour = select.value), showDetail(one)),
    });
    for (const [key, label] of [
      ["text", "none: conversation"],
      ["gap", "gap of log-probabilities"],
      ["version", "policy version"],
      ["advantage", "advantage"],
    ]) {
      select.append(element("option", { value: key, selected: key === colour }, label));
    }
    const facts = [
      ["reward", one.is_masked ? "not scored" : number(one.score)],
      ...Object.entries(one.components).map(([name, value]) => [name, number(value)]),
      ["read as", one.prediction === null ? "–" : one.prediction],
      ["truth", one.ground_truth],
      ["tokens", `${one.num_tokens}, ${one.ending || one.finish_reason}`],
      ...(one.row_starts && one.row_starts.length ? [["new rows at token", one.row_starts.join(", ")]] : []),
      ["versions", one.first_version === one.last_version ? `${one.first_version}` : `${one.first_version} to ${one.last_version}`],
      ["largest gap", number(one.largest_gap)],
    ];
    parts.detail.replaceChildren(
      element("h2", {}, `${one.prompt_uid}, rollout ${one.index}`),
      element("p", { class: "meta" }, `step ${one.step} · ${one.data_source} · `, element("code", {}, `${one.step}/${one.prompt_uid}/${one.index}`)),
      element("dl", {}, ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
      element("h3", {}, "Prompt"),
      element("pre", { class: "prompt" }, one.prompt),
      ...images(one),
      element("div", { class: "toolbar" }, element("h3", {}, turns(one).length > 1 ? "Episode" : "Response"), select, ...(colour === "text" ? [] : [scale()])),
      ...(turns(one).length > 1 ? [lane(one)] : []),
      ...turns(one).flatMap((turn) => (colour === "text" ? said(one, turn) : tokens(one, turn))),
    );
    parts.detail.scrollTop = 0;
  }

  // The images of the prompt, in their order.
  function images(one) {
    if (!one.images || !one.images.length) return [];
    return [element("div", { class: "images" }, ...one.images.map((digest, i) => image(digest, `image ${i + 1} of ${one.images.length}`)))];
  }

  function image(digest, label) {
    const missing = () => element("p", { class: "meta" }, `${label} is not here: images/${digest}.png`);
    const source = megarl.source.image(digest);
    if (!source) return missing();
    const shown = element("img", { src: source, alt: label, title: `${label}: images/${digest}.png`, onerror: () => shown.replaceWith(missing()) });
    return shown;
  }

  function tokens(one, turn) {
    return [
      ...(turns(one).length > 1 ? [element("p", { class: `meta turn key turn-${turn.kind}` }, headline(one, turn))] : []),
      element("pre", { class: "response" }, ...one.pieces.slice(turn.start, turn.end).map((piece, i) => token(one, piece, turn.start + i))),
    ];
  }

  // A turn as text. A history that was rendered again is folded: it repeats what stands above.
  function said(one, turn) {
    const row = (one.row_starts || []).indexOf(turn.start);
    const mark = row < 0 ? [] : [element("p", { class: "meta branch" }, `row ${row + 2}: the history was written anew`)];
    const text = element("pre", { class: "response" }, one.pieces.slice(turn.start, turn.end).join(""));
    const head = headline(one, turn);
    if (turn.kind === "context") return [...mark, element("details", { class: "said" }, element("summary", { class: "meta" }, head), text)];
    return [...mark, element("section", { class: `said said-${turn.kind}` }, element("p", { class: `meta turn key turn-${turn.kind}` }, head), text)];
  }

  // A single response is one sampled turn; runs of earlier versions have no turns.
  function turns(one) {
    return one.turns && one.turns.length ? one.turns : [{ start: 0, end: one.pieces.length, kind: "sampled", reward: 0, seconds: 0, versions: null }];
  }

  const SPEAKERS = { sampled: "model", given: "environment (not trained on)", context: "history, rendered again in a new row (not trained on)" };

  function headline(one, turn) {
    const trained = one.loss_mask.slice(turn.start, turn.end).filter(Boolean).length;
    const versions = turn.versions ? `version ${[...new Set(turn.versions)].join(" to ")}` : "";
    const reward = turn.reward ? `reward ${number(turn.reward)}` : "";
    const size = `${turn.end - turn.start} tokens` + (turn.kind === "sampled" ? `, ${trained} trained` : "");
    return [SPEAKERS[turn.kind], size, `${turn.seconds.toFixed(2)} s`, versions, reward].filter(Boolean).join(" · ");
  }

  // The time of each turn, side by side.
  function lane(one) {
    const total = turns(one).reduce((sum, turn) => sum + turn.seconds, 0) || 1;
    const spans = turns(one).map((turn) => {
      const span = element("span", { class: `lane-${turn.kind}`, title: headline(one, turn) });
      span.style.width = `${(100 * turn.seconds) / total}%`;
      return span;
    });
    return element("div", { class: "lane", role: "img", "aria-label": `turns over ${total.toFixed(2)} s` }, ...spans);
  }

  const GAPS = [0.01, 0.05, 0.2, 0.5];

  function scale() {
    const labels =
      colour === "gap"
        ? ["≤ 0.01", "0.05", "0.2", "0.5", "more"].map((label, i) => [`gap-${i}`, label])
        : colour === "advantage"
          ? [["advantage-up", "above 0"], ["advantage-down", "below 0"]]
          : [0, 1, 2, 3].map((i) => [`version-${i}`, i === 0 ? "newest" : i === 3 ? "3 or more before" : `${i} before`]);
    return element("span", { class: "legend" }, ...labels.map(([name, label]) => element("span", { class: `token ${name}` }, label)));
  }

  function token(one, piece, i) {
    const gap = Math.abs(one.rollout_logprobs[i] - one.trainer_logprobs[i]);
    const name = !one.loss_mask[i]
      ? "not-chosen"
      : colour === "gap"
        ? `gap-${GAPS.filter((limit) => gap > limit).length}`
        : colour === "version"
          ? `version-${Math.min(3, one.last_version - one.versions[i])}`
          : one.advantages[i] > 0
            ? "advantage-up"
            : one.advantages[i] < 0
              ? "advantage-down"
              : "";
    const title = [
      `token ${one.token_ids[i]}, version ${one.versions[i]}`,
      `log-probability: engine ${number(one.rollout_logprobs[i])}, trainer ${number(one.trainer_logprobs[i])}`,
      `advantage ${number(one.advantages[i])}`,
    ].join("\n");
    return element("span", { class: `token ${name}`, title }, piece);
  }

  return { build, reload };
})();
