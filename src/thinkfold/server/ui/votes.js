// A vote as it forms: one bar a class of equal answers.

import { byId, count, element, plural, put } from "./dom.js";

const RULES = {
  lossless: "no vote to come could change it", beta: "the leader is sure enough", dirichlet: "the leader is sure enough",
  likely: "the leader is likely to stay it", in_flight: "the running samples cannot change it",
  short: "enough of the shortest have ended", settled: "its probes have agreed for long", all: "all samples have ended", last_probes: "nothing finished: the last probes vote",
};

export class VotesView {
  constructor(root) {
    this.root = root;
  }

  clear() {
    this.root.replaceChildren();
    byId("vote-card").hidden = true;
  }

  show({ n, finished, running, cancelled, classes, answer, rule, by_reply: byReply }) {
    const whole = classes.reduce((sum, each) => sum + each.weight, 0);
    classes.forEach((each, index) => {
      const item = this.root.children[index] ?? this.root.appendChild(element("li", {}, element("span"), element("b"), element("i", {}, element("i"))));
      const [text, votes, bar] = item.children;
      put(text, each.answer);
      put(votes, plural(each.count, "vote"));
      bar.firstChild.style.width = `${whole ? (100 * each.weight) / whole : 0}%`;
      item.className = rule && each.answer === answer ? "won" : "";
    });
    while (this.root.children.length > classes.length) this.root.lastChild.remove();
    const parts = [`${count(finished)} of ${plural(n, "sample")} finished`, running ? `${count(running)} running` : "", cancelled ? `${count(cancelled)} cancelled` : "", byReply ? "whole replies are compared" : ""];
    put(byId("vote-note"), [...parts, rule ? `settled: ${RULES[rule] ?? rule}` : ""].filter(Boolean).join(", "));
    byId("vote-card").hidden = false;
  }
}
