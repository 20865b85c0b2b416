// The source of the page's data: the server of a live run, or the document itself.
"use strict";

const megarl = {};
/** A score from which on an answer is right; the recipe of the run may say another. */
megarl.rightFrom = 1;

megarl.source = (() => {
  const inlined = document.getElementById("data");
  return inlined ? inDocument(JSON.parse(inlined.textContent)) : onServer();

  function onServer() {
    let tag = null;

    async function get(path, headers = {}) {
      const response = await fetch(path, { headers });
      if (response.status === 304) return null;
      const answer = await response.json();
      if (!response.ok) throw new Error(answer.error);
      tag = path === "api/run" ? response.headers.get("ETag") : tag;
      return answer;
    }

    return {
      isLive: true,
      /** Everything but the rollouts, or null if nothing is new. */
      run: () => get("api/run", tag ? { "If-None-Match": tag } : {}),
      rollouts: (query) => get(`api/rollouts?${new URLSearchParams(query)}`),
      rollout: (step, row) => get(`api/rollout?step=${step}&row=${row}`),
      image: (digest) => `api/image?${new URLSearchParams({ digest })}`,
    };
  }

  function inDocument(data) {
    const details = new Map(data.rollouts.map((one) => [`${one.step}/${one.row}`, one]));
    return {
      isLive: false,
      numLeftOut: data.num_rollouts - data.rows.length,
      run: async () => data.run,
      rollouts: async (query) => {
        const text = (query.text || "").toLowerCase();
        const found = data.rows.filter(
          (row) =>
            (!query.step || row.step === Number(query.step)) &&
            (!query.source || row.data_source === query.source) &&
            (!text || row.line.toLowerCase().includes(text) || row.prompt_uid.toLowerCase().includes(text)),
        );
        const sign = query.order === "descending" ? -1 : 1;
        found.sort((a, b) => sign * (a[query.sort] - b[query.sort]));
        const offset = Number(query.offset || 0);
        return {
          total: found.length,
          rows: found.slice(offset, offset + Number(query.limit)),
          steps: [...new Set(data.rows.map((row) => row.step))],
          sources: [...new Set(data.rows.map((row) => row.data_source))].sort(),
        };
      },
      rollout: async (step, row) => details.get(`${step}/${row}`),
      image: (digest) => (data.images[digest] ? `data:image/png;base64,${data.images[digest]}` : null),
    };
  }
})();
