// The page: its tabs, its head, and polling while the run goes on.
"use strict";

(() => {
  const POLL_MS = 2000;
  const { element, seconds } = megarl;
  const at = (id) => document.getElementById(id);
  const VIEWS = ["curves", "timeline", "rollouts"];

  function theme(choice) {
    if (choice) document.documentElement.dataset.theme = choice;
  }

  function remembered() {
    try {
      return localStorage.getItem("megarl-theme");
    } catch {
      return null; // a page from a file may have no storage
    }
  }

  function switchTheme() {
    const chosen = document.documentElement.dataset.theme;
    const isDark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    theme(isDark ? "light" : "dark");
    try {
      localStorage.setItem("megarl-theme", isDark ? "light" : "dark");
    } catch {
      /* it lasts until the page is closed */
    }
  }

  function open(view) {
    for (const name of VIEWS) {
      at(name).hidden = name !== view;
      at(`tab-${name}`).setAttribute("aria-selected", String(name === view));
    }
    if (location.hash.slice(1) !== view) history.replaceState(null, "", `#${view}`);
    if (view === "rollouts") megarl.rollouts.reload();
  }

  function showHead(run) {
    document.title = `${run.name} · megarl`;
    at("name").textContent = run.name;
    at("status").textContent = run.status;
    at("status").className = `badge status-${run.status}`;
    at("status").hidden = !run.status;
    if (run.shown) for (const view of ["timeline", "rollouts"]) at(`tab-${view}`).textContent = `${view[0].toUpperCase()}${view.slice(1)} of ${run.shown}`;
    const facts = run.facts ?? [
      run.algorithm,
      `step ${run.step} of ${run.steps}`,
      seconds(run.updated - run.began),
      `began ${new Date(run.began * 1000).toLocaleString()}`,
      run.cost,
      run.num_lives > 1 ? `started ${run.num_lives} times` : null,
      `megarl ${run.version}`,
    ];
    at("facts").textContent = facts.filter(Boolean).join(" · ");
    at("reason").hidden = !run.reason;
    at("reason").textContent = run.reason;
    const warnings = at("warnings");
    warnings.hidden = !run.warnings.length;
    warnings.querySelector("summary").textContent = `${run.warnings.length} warning${run.warnings.length === 1 ? "" : "s"}`;
    warnings.querySelector("ol").replaceChildren(...run.warnings.map((one) => element("li", {}, one.text)));
  }

  async function refresh() {
    try {
      const run = await megarl.source.run();
      if (run) {
        showHead(run);
        megarl.rightFrom = run.recipe.evaluation?.right_from ?? 1;
        megarl.charts.draw(at("curves"), run.charts);
        if (run.tables) {
          const [results, ...recipes] = run.tables.map(megarl.charts.table);
          at("curves").prepend(results);
          at("curves").append(...recipes);
        }
        megarl.timeline.draw(at("timeline"), run.spans, run.idle, run.episodes);
      }
    } catch (error) {
      at("reason").hidden = false;
      at("reason").textContent = error instanceof TypeError ? "The server does not answer; start `megarl view` again." : error.message;
    }
    if (megarl.source.isLive) setTimeout(refresh, POLL_MS);
  }

  theme(remembered());
  at("theme").addEventListener("click", switchTheme);
  VIEWS.forEach((view, i) => {
    at(`tab-${view}`).addEventListener("click", () => open(view));
    at(`tab-${view}`).addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      const next = VIEWS[(i + move + VIEWS.length) % VIEWS.length];
      at(`tab-${next}`).focus();
      open(next);
    });
  });
  megarl.rollouts.build(at("rollouts"));
  open(VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "curves");
  refresh();
})();
