// Thinking as collapsible segments that fold. Only the open segment is ever written to: 60k tokens stay cheap.

import { charOf, snap } from "./cut.js";
import { element, count, plural, put, share } from "./dom.js";

const OPEN_SEGMENTS = 2; // finished ones that stay open behind the one being written
const SOFT_LIMIT = 24_000; // characters after which a stretch without segments is cut all the same
const LABEL = 120;

export class ThinkingView {
  constructor(root, scale) {
    this.root = root;
    this.scale = scale; // tokens of a full bar
    this.clear();
  }

  clear() {
    this.root.replaceChildren();
    this.segments = [];
    this.open = null;
    this.folded = 0; // tokens in summaries
    this.entries = 0; // what they take
    this.folds = 0;
    this.refused = 0;
    this.tokens = 0;
    this.pending = "";
    this.frame = 0;
    this.following = true;
    this.root.onscroll = () => {
      this.following = this.root.scrollHeight - this.root.scrollTop - this.root.clientHeight < 40;
    };
  }

  // More text; `tokens` are those of the output so far.
  text(piece, tokens) {
    if (!this.open) this.#begin(this.tokens);
    this.tokens = tokens;
    const { open } = this;
    const before = open.text ? null : this.segments.at(-2);
    if (before) { // line ends at a cut belong to what was before it
      const words = piece.replace(/^\n+/, "");
      before.node.appendData(piece.slice(0, piece.length - words.length));
      piece = words;
    }
    this.pending += piece;
    open.text += piece;
    open.marks.push({ tokens, chars: open.text.length });
    if (!this.frame) this.frame = requestAnimationFrame(() => this.#flush());
  }

  // A segment has ended somewhere in the text that is there.
  segment({ id, start, end }) {
    this.#flush();
    const { open } = this;
    if (!open) return;
    this.#cut(snap(open.text, charOf(end, open.marks, open.start)), end);
    Object.assign(open, { id, start, end, state: "closed" });
    this.#show(open);
  }

  // A span of thinking became a summary or was kept in fewer bits, or the gate refused that.
  fold({ start, end, entries, pages_freed: freed, error, refused, quantised }) {
    const tokens = end - start;
    const over = this.segments.filter((one) => Math.min(one.end, end) - Math.max(one.start, start) >= (one.end - one.start) / 2);
    const owner = over.at(-1) ?? this.segments.findLast((one) => one.start < end);
    const doubt = error === null ? "" : ` · error ${share(error, 1)}`;
    if (refused) {
      this.refused += 1;
      const stays = owner?.state === "quantised" ? ["quantised", "kept in 4 bits"] : ["refused", "kept raw"];
      if (owner) this.#mark(owner, stays[0], `${stays[1]}: error ${error === null ? "unknown" : share(error, 1)}`);
      return;
    }
    if (quantised) {
      for (const one of over) this.#mark(one, "quantised", `${count(one.end - one.start)} in 4 bits`);
      if (owner) put(owner.chip, `${count(tokens)} in 4 bits · ${plural(freed, "page")} freed${doubt}`);
      return;
    }
    this.folds += 1;
    this.folded += tokens;
    this.entries += entries;
    for (const one of over) {
      one.entries = (entries * (one.end - one.start)) / tokens;
      this.#mark(one, "folded", one === owner ? "" : `${count(one.end - one.start)} tokens, folded with the next`);
      if (!one.pinned) one.details.open = false;
    }
    if (owner) put(owner.chip, `${count(tokens)} → ${plural(entries, "entry", "entries")} · ${plural(freed, "page")} freed${doubt}`);
  }

  // Thinking is over; what is open is its last stretch.
  close() {
    this.#flush();
    if (this.open) {
      const last = this.open;
      this.open = null;
      Object.assign(last, { end: this.tokens, state: "closed" });
      if (last.text.trim() || this.segments.length === 1) this.#show(last);
      else {
        last.details.remove();
        this.segments.pop();
      }
    }
  }

  #begin(start, text = "") {
    const bar = element("i");
    const line = element("span", { className: "line" });
    const chip = element("span", { className: "chip" }, "…");
    const node = document.createTextNode(text);
    const head = element("summary", {}, element("span", { className: "bar" }, bar), line, chip);
    const details = element("details", { className: "segment", open: true, data: { state: "open" } }, head, element("div", { className: "text" }, node));
    const made = { details, bar, line, chip, node, text, start, end: Infinity, marks: [], state: "open", entries: 0, pinned: false };
    head.addEventListener("click", () => { made.pinned = true; });
    this.root.append(details);
    this.segments.push(made);
    this.open = made;
    const old = this.segments.at(-2 - OPEN_SEGMENTS);
    if (old && !old.pinned) old.details.open = false;
    return made;
  }

  #cut(at, token) {
    const { open } = this;
    const rest = open.text.slice(at);
    const marks = open.marks.filter((mark) => mark.tokens > token).map((mark) => ({ ...mark, chars: Math.max(0, mark.chars - at) }));
    open.text = open.text.slice(0, at);
    open.node.data = open.text;
    this.#begin(token, rest).marks = marks;
    this.#follow();
  }

  #flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    if (!this.open) return;
    this.open.node.appendData(this.pending);
    this.pending = "";
    this.#show(this.open);
    if (this.open.text.length > SOFT_LIMIT) {
      const { open } = this;
      this.#cut(snap(open.text, SOFT_LIMIT), charOf(SOFT_LIMIT, open.marks.map(({ tokens, chars }) => ({ tokens: chars, chars: tokens })), 0));
      Object.assign(open, { end: this.open.start, state: "closed" });
      this.#show(open);
    }
    this.#follow();
  }

  #follow() {
    if (this.following) this.root.scrollTop = this.root.scrollHeight;
  }

  #mark(one, state, text) {
    one.state = state;
    this.#show(one);
    if (text) put(one.chip, text);
  }

  #show(one) {
    const tokens = (one.state === "open" ? this.tokens : one.end) - one.start;
    one.details.dataset.state = one.state;
    one.bar.style.width = `${Math.min(100, (100 * (one.state === "folded" ? one.entries : tokens)) / this.scale)}%`;
    if (one.state === "open" || one.state === "closed") put(one.chip, `${plural(tokens, "token")}${one.state === "open" ? " …" : ""}`);
    if (!one.line.firstChild || one.line.textContent.length < LABEL) put(one.line, one.text.slice(0, LABEL).trim().replaceAll("\n", " "));
  }
}
