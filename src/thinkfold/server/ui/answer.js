// The answer as it comes: paragraphs, of which only the last is ever written again.

import { element } from "./dom.js";
import { write } from "./maths.js";

export class AnswerView {
  constructor(root) {
    this.root = root;
    this.clear();
  }

  clear() {
    this.root.replaceChildren();
    this.text = "";
    this.last = null;
    this.frame = 0;
  }

  add(piece) {
    this.text += piece;
    if (!this.frame) this.frame = requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    if (this.last === null) this.text = this.text.trimStart();
    for (let end = this.text.indexOf("\n\n"); end >= 0; end = this.text.indexOf("\n\n")) {
      this.#show(this.text.slice(0, end));
      this.text = this.text.slice(end).trimStart();
      this.last = null;
    }
    if (this.text) this.#show(this.text);
  }

  #show(text) {
    this.last ??= this.root.appendChild(element("p"));
    write(this.last, text);
  }
}
