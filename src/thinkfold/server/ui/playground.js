// One question at a time: asks, shows thinking and answer as they come, steers, and says what it cost.

import { AnswerView } from "./answer.js";
import { call, events, json } from "./api.js";
import { byId, bytes, count, element, plural, put, rows, seconds, share } from "./dom.js";
import { ThinkingView } from "./segments.js";
import { VotesView } from "./votes.js";

const SHORT = 0.9; // share of held pages beyond which nobody calls memory free
const LEVELS = ["low", "medium", "high", "custom"];
const EXAMPLES = [
  ["four products", "What is 86 * 185 + 69 * 98 + 34 * 996 + 98 * 760?"],
  ["countdown", "Make 45 from the numbers 10, 4, 11, 4. Use every number exactly once, with + - * / and brackets."],
  ["a longer sum", "What is 901 * 8476 + 8344 * 822 + 575 * 6489 + 3886 * 4036 + 7923 * 704 + 155 * 414?"],
];
const FOLDING = {
  off: "All thinking stays raw.",
  pressure: "Segments are folded only while memory is short.",
  eager: "Segments are folded as soon as they are old enough.",
};
const ENDS = {
  natural: "the model ended its thinking", budget: "the budget ended its thinking", eos: "an end token closed its thinking",
  control: "thinking was ended by order", unclosed: "the response ended while thinking",
  vote: "a settled vote ended its thinking", search: "the search ended its thinking",
  deadline: "its deadline ended its thinking", cost: "its cost limit ended its thinking",
};
const ended = (reason) => reason && (ENDS[reason] ?? `rule ${reason} ended its thinking`);

const SILENT = { waiting: "Waiting for its turn …", voting: "The winner's is shown when the vote is decided." };

export class Playground {
  // `memory` tells the newest {held, total} pages; `busy` is told when a response runs.
  constructor({ memory, busy }) {
    this.memory = memory;
    this.busy = busy;
    this.card = null;
    this.run = null;
    this.thinking = new ThinkingView(byId("thinking"), 512);
    this.answer = new AnswerView(byId("answer"));
    this.votes = new VotesView(byId("votes"));
    byId("examples").append(...EXAMPLES.map(([name, text]) => element("button", { type: "button", onclick: () => { byId("question").value = text; byId("question").focus(); } }, name)));
    byId("question").value = EXAMPLES[0][1];
    byId("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
    });
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.run) this.ask();
    });
    byId("ask").addEventListener("input", () => this.knobs());
    byId("answer-now").onclick = () => this.order("end_thinking");
    byId("pause").onclick = () => this.order(this.run?.paused ? "resume" : "pause");
    byId("stop").onclick = () => this.order("cancel");
    this.knobs();
  }

  // What the model can do, from /v1/models.
  serve(card) {
    this.card = card.thinkfold;
    const { thinking, fold } = this.card;
    byId("depth-set").hidden = !thinking || !this.card.budget_enforced;
    byId("fold-set").hidden = !fold.available;
    if (fold.available) document.querySelector(`input[name="fold"][value="${CSS.escape(fold.policy)}"]`).checked = true;
    this.knobs();
  }

  get level() {
    return LEVELS[byId("depth").valueAsNumber];
  }

  get folding() {
    return document.querySelector('input[name="fold"]:checked').value;
  }

  get samples() {
    return Number(document.querySelector('input[name="vote"]:checked').value);
  }

  knobs() {
    const custom = this.level === "custom";
    const budget = this.card?.thinking?.efforts[this.level];
    byId("budget-label").hidden = !custom;
    put(byId("depth-text"), custom ? "custom:" : `${this.level}${budget ? `: at most ${count(budget)} tokens` : ""}`);
    byId("depth").setAttribute("aria-valuetext", this.level);
    put(byId("fold-text"), FOLDING[this.folding]);
  }

  #body() {
    const body = {
      messages: [{ role: "user", content: byId("question").value }],
      stream: true,
      stream_options: { include_usage: true },
      thinkfold: { events: true },
    };
    if (!byId("fold-set").hidden) body.thinkfold.fold = { policy: this.folding };
    if (!byId("depth-set").hidden) {
      if (this.level === "custom") body.thinking_token_budget = byId("budget").valueAsNumber;
      else body.reasoning_effort = this.level;
    }
    if (this.samples > 1) {
      body.vote = { n: this.samples };
      if (!this.card?.sampling_defaults.temperature) body.temperature = 0.7; // of greedy samples there is only one
    }
    return body;
  }

  async ask() {
    this.#reset();
    const run = { id: null, phase: "waiting", paused: false, tokens: 0, start: performance.now(), stopper: new AbortController(), policy: this.folding, vote: this.samples > 1, ended: null };
    this.run = run;
    this.#buttons();
    this.busy(true);
    const clock = setInterval(() => this.#progress(), 250);
    try {
      const response = await call("v1/chat/completions", this.#body(), run.stopper.signal);
      for await (const { name, data } of events(response)) this.#take(name, data);
      if (!run.ended) throw new Error("the connection ended before the answer did");
    } catch (error) {
      if (error.name !== "AbortError") this.#complain(error);
    } finally {
      clearInterval(clock);
      this.thinking.close();
      this.answer.flush();
      this.run = null;
      this.#sum(run);
      this.#buttons();
      put(byId("progress"), "");
      this.busy(false);
    }
  }

  async order(action) {
    const { run } = this;
    if (!run?.id) return run?.stopper.abort();
    try {
      await json(`v1/thinkfold/responses/${encodeURIComponent(run.id)}/control`, { action });
      if (action === "pause" || action === "resume") run.paused = action === "pause";
    } catch (error) {
      if (action === "cancel") run.stopper.abort();
      else if (this.run === run) this.#complain(error);
    }
    this.#buttons();
    return undefined;
  }

  #take(name, data) {
    const { run } = this;
    if (data.error) throw new Error(data.error.message);
    run.id ??= data.id;
    const own = data.thinkfold ?? {};
    if (name === "thinkfold.segment") this.thinking.segment(own.segment);
    else if (name === "thinkfold.fold") this.thinking.fold(own.fold);
    if (own.vote) this.#voted(own.vote);
    for (const choice of data.choices) {
      run.tokens = own.output_tokens ?? run.tokens;
      if (choice.delta.reasoning) this.#thought(choice.delta.reasoning);
      if (choice.delta.content) this.#said(choice.delta.content);
      if (choice.finish_reason) run.ended = choice;
    }
    if (data.usage) this.#cost(data.usage, own.policy);
    if (name || data.choices.length) this.#sum(run);
    if (run.phase === "waiting" || name) this.#buttons();
  }

  #voted(vote) {
    this.votes.show(vote);
    this.run.samples = vote.running;
    if (vote.running && this.run.phase === "waiting") this.run.phase = "voting";
  }

  #thought(text) {
    this.run.phase = "thinking";
    this.thinking.text(text, this.run.tokens);
  }

  #said(text) {
    if (this.run.phase !== "answering") {
      this.run.phase = "answering";
      this.thinking.close();
      this.#buttons();
    }
    this.answer.add(text);
  }

  #reset() {
    this.thinking.clear();
    this.answer.clear();
    this.votes.clear();
    byId("trouble").hidden = true;
    byId("fold-note").hidden = true;
    put(byId("ending"), "");
    for (const list of ["cost-tokens", "cost-memory", "cost-time"]) rows(byId(list), []);
    put(byId("cost-note"), "Known when the answer is complete.");
  }

  #buttons() {
    const { run } = this;
    byId("go").disabled = Boolean(run);
    byId("answer-now").disabled = run?.phase !== "thinking" || run.vote; // its samples have ids of their own
    byId("pause").disabled = !run?.id || run.vote || this.card?.capabilities.pause === "not available";
    put(byId("pause"), run?.paused ? "Resume" : "Pause");
    byId("stop").disabled = !run;
  }

  #progress() {
    const { run } = this;
    const words = run.paused ? "paused" : run.phase;
    const made = run.phase === "voting" ? `${plural(run.samples, "sample")} running` : plural(run.tokens, "token");
    put(byId("progress"), `${words} · ${made} · ${seconds((performance.now() - run.start) / 1000)}`);
  }

  // Of all that was thought: what is held raw, what as summaries.
  #sum(run) {
    const { tokens, folded, entries, folds, refused } = this.thinking;
    if (!tokens) return put(byId("thinking-sum"), (this.run && SILENT[run.phase]) || "No thinking.");
    const raw = Math.max(0, tokens - folded);
    const text = `${plural(tokens, "token")} thought, ${plural(raw + entries, "entry", "entries")} held`;
    put(byId("thinking-sum"), folds ? `${text} (${count(raw)} raw, ${count(entries)} in summaries)` : text);
    byId("held").firstChild.style.width = `${(100 * raw) / tokens}%`;
    byId("held").lastChild.style.width = `${(100 * entries) / tokens}%`;
    byId("held").setAttribute("aria-label", byId("thinking-sum").textContent);
    const note = byId("fold-note");
    note.hidden = !this.card?.fold.available || (this.thinking.segments.length < 2 && !folds);
    put(note, this.#verdict(run.policy, folds, refused, folded));
    return undefined;
  }

  #verdict(policy, folds, refused, folded) {
    if (folds) return `${plural(folds, "fold")}: ${count(folded)} tokens of thinking are summaries now${refused ? `, ${count(refused)} refused by the gate` : ""}.`;
    if (policy === "off") return "Folding is off: all thinking stays raw.";
    if (policy === "eager") return refused ? "The gate has refused every fold." : "Nothing is old enough to be folded yet.";
    const { held, total } = this.memory();
    if (held > SHORT * total) return `Nothing had to be folded yet: ${share(held, total)} of ${count(total)} pages are held.`;
    return `Nothing is folded, because memory is free${total ? `: ${share(held, total)} of ${count(total)} pages are held` : ""}.`;
  }

  #cost(usage, policy) {
    const { tokens, kv, time } = usage.thinkfold;
    if (tokens.thinking && !this.run.vote) this.thinking.tokens = tokens.thinking; // without the markers; a vote counts all samples
    const some = (list) => list.filter(([, number]) => number > 0);
    const told = (list, show) => list.map(([term, number, name]) => [term, show(number), name]);
    const made = tokens.prompt + tokens.thinking + tokens.answer;
    rows(byId("cost-tokens"), told([["tokens", made, "sum"], ["prompt", tokens.prompt], ...some([["of it cached", tokens.cached]]), ["thinking", tokens.thinking], ["answer", tokens.answer],
      ...some([["discarded", tokens.discarded], ["recomputed", tokens.recomputed], ["probes", tokens.probe]])], count));
    const guessed = usage.thinkfold.estimated?.includes("kv") ? ", estimated" : ""; // a remote engine does not tell
    rows(byId("cost-memory"), [[`KV × time${guessed}`, `${bytes(kv.byte_seconds)}·s`, "sum"], ["peak", plural(kv.peak_entries, "entry", "entries")],
      ...told(some([["folds", usage.thinkfold.folds], ["refused folds", usage.thinkfold.folds_refused], ["folded tokens", usage.thinkfold.folded_tokens], ["preemptions", kv.preemptions]]), count),
      ...told(some([["swapped", kv.swapped_bytes]]), bytes)]);
    const { device_s: device, ...phases } = time; // its part of the device's time lies within the phases
    const total = Object.values(phases).reduce((sum, each) => sum + each, 0);
    rows(byId("cost-time"), told([["time", total, "sum"], ["queue", time.queue_s], ["prefill", time.prefill_s], ["thinking", time.thinking_s], ["answer", time.answer_s], ...some([["paused", time.paused_s], ["of it the device's", device]])], seconds));
    const last = this.run.ended;
    const budget = policy?.thinking.budget;
    put(byId("cost-note"), policy?.thinking.enabled ? `Budget: ${budget === null ? "no limit" : `${count(budget)} tokens`}` : "Without thinking");
    put(byId("ending"), [ended(last?.thinking_end_reason), last && last.finish_reason !== "stop" ? `finish: ${last.finish_reason}` : ""].filter(Boolean).join(" · "));
  }

  #complain(error) {
    put(byId("trouble"), error.message);
    byId("trouble").hidden = false;
  }
}
