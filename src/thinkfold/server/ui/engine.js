// The engine of this moment: where KV memory is, who runs, what gave way. Asks once a second, less often when idle.

import { json } from "./api.js";
import { byId, bytes, count, element, plural, put, rows, share } from "./dom.js";

const CLASSES = ["prompt", "thinking", "summary", "answer", "cached", "pinned"];
const CHARTED = ["summary", "prompt", "thinking", "answer"]; // from the ground up
const CELLS = 384; // divides into rows of 32 and of 24
const HOST_CELLS = 96;
const WINDOW_S = 120;
const RUNGS = [
  ["pin", "pinned prefixes given up"], ["probe", "probes dropped"], ["swap_parked", "paused requests moved to the host"], ["offload", "thinking of answers moved to the host"],
  ["quantise", "segments kept in 4 bits"], ["fold", "segments folded"],
  ["forget_parked", "paused requests to be computed again"], ["swap", "running requests swapped"], ["preempt", "running requests preempted"], ["fold_forced", "folded against the gate"],
  ["quota", "tiers held to their quota"],
];
const SVG = "http://www.w3.org/2000/svg";

export class EngineView {
  constructor({ failed }) {
    this.failed = failed;
    this.samples = [];
    this.busy = false;
    this.timer = 0;
    this.cells = cellsIn(byId("map"), CELLS);
    this.hostCells = cellsIn(byId("host-map"), HOST_CELLS);
    this.areas = CHARTED.map((name) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("data-class", name);
      byId("chart").append(path);
      return path;
    });
    document.addEventListener("visibilitychange", () => this.poll());
  }

  get memory() {
    const pages = this.samples.at(-1)?.pages;
    return pages ? { held: pages.held, total: pages.total } : { held: 0, total: 0 };
  }

  // Ask now and then again and again, while somebody looks.
  async poll() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    let pause = 1000;
    try {
      const sample = await json("v1/thinkfold/engine");
      this.#take(sample);
      if (!this.busy && sample.running + sample.waiting === 0) pause = 4000;
    } catch (error) {
      pause = Math.max(5000, 1000 * (error.retryAfter ?? 0));
      if (this.failed(error)) return;
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.poll(), pause);
  }

  #take(sample) {
    const last = this.samples.at(-1);
    if (last && sample.totals.steps < last.totals.steps) this.samples = []; // another process
    this.samples.push(sample);
    while (sample.clock_s - this.samples[0].clock_s > WINDOW_S) this.samples.shift();
    put(byId("state"), sample.ready ? "ready" : sample.reason || "not ready");
    byId("state").dataset.good = sample.ready;
    for (const id of ["map", "chart", "ladder"]) byId(id).closest(".card").hidden = !sample.pages.total; // a remote engine's memory is not ours
    this.#map(sample.pages);
    this.#chart();
    this.#now(sample, last);
    this.#ladder(sample.pressure);
    this.#drift(sample.drift);
  }

  #map(pages) {
    const sizes = CLASSES.map((name) => [name, pages.by_class[name] ?? 0]);
    const spread = cellsOf(sizes, pages.total, CELLS);
    let at = 0;
    for (const [name, cells] of spread) {
      for (const end = at + cells; at < end; at += 1) paint(this.cells[at], name);
    }
    for (; at < CELLS; at += 1) paint(this.cells[at], "free");
    const used = cellsOf([["host", pages.host.used]], pages.host.total, HOST_CELLS)[0][1];
    this.hostCells.forEach((cell, index) => paint(cell, index < used ? "host" : "free"));
    byId("host-map").hidden = !pages.host.total;
    byId("host-map").setAttribute("aria-label", `${pages.host.total} pages of host memory: ${pages.host.used} used`);
    const text = sizes.filter(([, size]) => size).map(([name, size]) => `${name} ${size}`).join(", ");
    byId("map").setAttribute("aria-label", `${pages.total} pages: ${text ? `${text}, ` : ""}free ${pages.free}`);
    put(byId("map-note"), `${count(pages.total)} pages of ${bytes(pages.page_bytes)}, ${(pages.total / CELLS).toFixed(1)} a square`);
    this.#legend([...sizes, ["free", pages.free], ["host", pages.host.used]], pages);
  }

  #legend(sizes, pages) {
    const list = byId("legend");
    sizes.forEach(([name, size], index) => {
      const item = list.children[index] ?? list.appendChild(element("li", { data: { class: name } }, element("i"), element("span", {}, name), element("b")));
      put(item.lastChild, name === "host" ? (pages.host.total ? `${count(size)} of ${count(pages.host.total)}` : "none") : count(size));
    });
  }

  #chart() {
    const { samples } = this;
    const top = Math.max(8, ...samples.map(({ pages }) => pages.held));
    const now = samples.at(-1).clock_s;
    const x = ({ clock_s: at }) => (120 * (1 - (now - at) / WINDOW_S)).toFixed(2);
    let ground = samples.map(() => 0);
    CHARTED.forEach((name, index) => {
      const roof = samples.map(({ pages }, i) => ground[i] + (pages.by_class[name] ?? 0));
      const y = (value) => (39 - (38 * value) / top).toFixed(2);
      const line = (values, order) => order.map((i) => `${x(samples[i])},${y(values[i])}`).join(" L");
      const there = samples.map((_, i) => i);
      this.areas[index].setAttribute("d", samples.length > 1 ? `M${line(roof, there)} L${line(ground, there.toReversed())} Z` : "");
      ground = roof;
    });
    put(byId("chart-note"), `highest: ${count(Math.max(...samples.map(({ pages }) => pages.held)))} pages`);
  }

  #now(sample, last) {
    const { pages, prefix, folds } = sample;
    const passed = last ? sample.clock_s - last.clock_s : 0;
    const rate = passed > 0 ? Math.max(0, sample.totals.generated_tokens - last.totals.generated_tokens) / passed : 0;
    rows(byId("tiles"), [
      ["running", count(sample.running)], ["waiting", count(sample.waiting)], ["tokens a second", rate < 10 ? rate.toFixed(1) : count(rate)],
      ["KV held", share(pages.held, pages.total)], ["prefix hits", share(prefix.hit_tokens, prefix.queried_tokens)], ["folds", `${count(folds.done)}${folds.refused ? ` (${count(folds.refused)} refused)` : ""}`],
    ]);
    put(byId("now-note"), `${bytes(sample.totals.kv_byte_seconds)}·s of KV so far`);
  }

  #ladder(pressure) {
    const known = new Set(RUNGS.map(([key]) => key));
    const rungs = [...RUNGS, ...Object.keys(pressure).filter((key) => !known.has(key)).map((key) => [key, key])];
    rungs.forEach(([key, words], index) => {
      const list = byId("ladder");
      const item = list.children[index] ?? list.appendChild(element("li", {}, element("span", {}, words), element("b")));
      put(item.lastChild, count(pressure[key] ?? 0));
      item.className = pressure[key] ? "used" : "";
    });
  }

  #drift(records) {
    const list = byId("drift");
    records.forEach((record, index) => put(list.children[index] ?? list.appendChild(element("li")), driftText(record)));
    while (list.children.length > records.length) list.lastChild.remove();
    byId("drift-card").hidden = !records.length;
  }
}

// Later turns whose earlier text had changed: which message, which character.
export const driftText = ({ kind, message, role, tool, character, tokens_lost: lost }) =>
  `${kind === "tools" ? `tool ${tool}` : `message ${message} (${role})`} changed at character ${count(character)}: ${plural(lost, "token")} computed again`;

function cellsIn(root, size) {
  const cells = Array.from({ length: size }, () => element("i"));
  root.append(...cells);
  return cells;
}

function paint(cell, name) {
  if (cell.dataset.class !== name) cell.dataset.class = name;
}

// How many of `cells` each [name, size] gets of `total`: at least one if it is there at all.
export function cellsOf(sizes, total, cells) {
  const spread = sizes.map(([name, size]) => [name, size ? Math.max(1, Math.round((cells * size) / total)) : 0]);
  for (let over = spread.reduce((sum, [, n]) => sum + n, 0) - cells; over > 0; over -= 1) spread.reduce((one, other) => (other[1] > one[1] ? other : one))[1] -= 1;
  return spread;
}
