// Maths in answers: a subset of LaTeX to MathML, node by node. What it does not know stays text.

const NAMESPACE = "http://www.w3.org/1998/Math/MathML";
const DEEPEST = 40;
const LONGEST = 4000; // characters of one formula

const OPERATORS = {
  times: "×", cdot: "⋅", div: "÷", pm: "±", mp: "∓", ast: "∗", circ: "∘", oplus: "⊕", cdots: "⋯", ldots: "…", dots: "…",
  leq: "≤", le: "≤", geq: "≥", ge: "≥", neq: "≠", ne: "≠", approx: "≈", equiv: "≡", sim: "∼", cong: "≅", propto: "∝", ll: "≪", gg: "≫",
  in: "∈", notin: "∉", subset: "⊂", subseteq: "⊆", supset: "⊃", cup: "∪", cap: "∩", setminus: "∖", mid: "∣", nmid: "∤", parallel: "∥", perp: "⊥",
  to: "→", rightarrow: "→", Rightarrow: "⇒", implies: "⇒", leftarrow: "←", Leftarrow: "⇐", leftrightarrow: "↔", iff: "⇔", mapsto: "↦",
  sum: "∑", prod: "∏", int: "∫", partial: "∂", nabla: "∇", land: "∧", lor: "∨", neg: "¬", lnot: "¬", forall: "∀", exists: "∃", therefore: "∴", because: "∵",
  lfloor: "⌊", rfloor: "⌋", lceil: "⌈", rceil: "⌉", langle: "⟨", rangle: "⟩", lbrace: "{", rbrace: "}", vert: "|", Vert: "‖", colon: ":", bmod: "mod",
};
const LETTERS = {
  alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ϵ", varepsilon: "ε", zeta: "ζ", eta: "η", theta: "θ", iota: "ι", kappa: "κ", lambda: "λ", mu: "μ",
  nu: "ν", xi: "ξ", pi: "π", rho: "ρ", sigma: "σ", tau: "τ", phi: "ϕ", varphi: "φ", chi: "χ", psi: "ψ", omega: "ω",
  Gamma: "Γ", Delta: "Δ", Theta: "Θ", Lambda: "Λ", Xi: "Ξ", Pi: "Π", Sigma: "Σ", Phi: "Φ", Psi: "Ψ", Omega: "Ω",
  infty: "∞", emptyset: "∅", ell: "ℓ", degree: "°", angle: "∠", triangle: "△", hbar: "ℏ", Re: "ℜ", Im: "ℑ",
};
const FUNCTIONS = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp lim max min sup inf gcd lcm det dim ker deg arg".split(" "));
const SPACES = { quad: "1em", qquad: "2em", ",": "0.17em", ":": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.25em" };
const TEXTS = new Set(["text", "textbf", "textit", "textrm", "mathrm", "mbox", "operatorname"]);
const SAME = new Set(["mathbf", "mathit", "mathbb", "mathcal", "boldsymbol", "displaystyle", "limits", "left", "right", "big", "Big", "bigl", "bigr"]);
const ESCAPED = "{}%$#&_";

function node(tag, ...children) {
  const made = document.createElementNS(NAMESPACE, tag);
  made.append(...children);
  return made;
}

const row = (nodes) => (nodes.length === 1 ? nodes[0] : node("mrow", ...nodes));

class Formula {
  constructor(source) {
    this.source = source;
    this.at = 0;
    this.depth = 0;
  }

  // Everything up to a closing brace or the end.
  nodes(inside = false) {
    const found = [];
    this.depth += 1;
    if (this.depth > DEEPEST) throw new Error("too deep");
    for (;;) {
      this.#blanks();
      const sign = this.source[this.at];
      if (sign === undefined) {
        if (inside) throw new Error("unclosed brace");
        break;
      }
      if (sign === "}") {
        if (!inside) throw new Error("brace without a begin");
        this.at += 1;
        break;
      }
      if ("^_".includes(sign) || sign === "'") found.push(this.#scripts(found.pop() ?? node("mrow")));
      else {
        const one = this.#atom();
        if (one) found.push(one);
      }
    }
    this.depth -= 1;
    return found;
  }

  #blanks() {
    while (/[\s&~]/.test(this.source[this.at] ?? "")) this.at += 1;
  }

  #scripts(base) {
    let below = null;
    let above = null;
    while ("^_'".includes(this.source[this.at] ?? " ")) {
      const sign = this.source[this.at];
      this.at += 1;
      if (sign === "_") below = this.#argument();
      else {
        const more = sign === "'" ? node("mo", "′") : this.#argument();
        above = above ? node("mrow", above, more) : more;
      }
      this.#blanks();
    }
    if (below && above) return node("msubsup", base, below, above);
    return below ? node("msub", base, below) : node("msup", base, above);
  }

  // A group in braces, or the next single thing.
  #argument() {
    this.#blanks();
    if (this.source[this.at] === "{") {
      this.at += 1;
      return node("mrow", ...this.nodes(true));
    }
    if (/[0-9]/.test(this.source[this.at] ?? "")) {
      this.at += 1;
      return node("mn", this.source[this.at - 1]);
    }
    const one = this.#atom();
    if (!one) throw new Error("an argument is missing");
    return one;
  }

  #atom() {
    const rest = this.source.slice(this.at, this.at + 64);
    const number = /^[0-9]+(?:[.,][0-9]+)*/.exec(rest)?.[0];
    if (number) {
      this.at += number.length;
      return node("mn", number);
    }
    const sign = String.fromCodePoint(this.source.codePointAt(this.at) ?? 0xfffd);
    if (this.at >= this.source.length || sign === "}") return null;
    this.at += sign.length;
    if (sign === "\\") return this.#command();
    if (sign === "{") return node("mrow", ...this.nodes(true));
    return /\p{L}/u.test(sign) ? node("mi", sign) : node("mo", sign === "-" ? "−" : sign);
  }

  #command() {
    const name = /^(?:[A-Za-z]+|[^])/u.exec(this.source.slice(this.at, this.at + 40))?.[0] ?? "";
    this.at += name.length;
    if (/^[dtc]?frac$/.test(name)) return node("mfrac", this.#argument(), this.#argument());
    if (name === "binom") return node("mrow", node("mo", "("), stacked(this.#argument(), this.#argument()), node("mo", ")"));
    if (name === "sqrt") return this.#root();
    if (name === "boxed" || name === "fbox") {
      const box = node("mrow", this.#argument());
      box.setAttribute("class", "boxed");
      return box;
    }
    if (TEXTS.has(name)) return node("mtext", this.#words());
    if (name === "left" || name === "right") return this.#fence();
    if (SAME.has(name)) return null;
    if (Object.hasOwn(SPACES, name)) return space(SPACES[name]);
    if (Object.hasOwn(OPERATORS, name)) return node("mo", OPERATORS[name]);
    if (Object.hasOwn(LETTERS, name)) return node("mi", LETTERS[name]);
    if (FUNCTIONS.has(name)) return node("mi", name);
    if (ESCAPED.includes(name) && name) return node("mo", name);
    if (name === "\\") return space("1em");
    return node("mtext", `\\${name}`);
  }

  #fence() {
    this.#blanks();
    if (this.source[this.at] === ".") this.at += 1;
    return null;
  }

  #root() {
    if (this.source[this.at] !== "[") return node("msqrt", this.#argument());
    const end = this.source.indexOf("]", this.at);
    if (end < 0) throw new Error("unclosed root");
    const index = new Formula(this.source.slice(this.at + 1, end)).nodes();
    this.at = end + 1;
    return node("mroot", this.#argument(), row(index));
  }

  #words() {
    this.#blanks();
    if (this.source[this.at] !== "{") throw new Error("text needs braces");
    const end = closing(this.source, this.at);
    if (end < 0) throw new Error("unclosed text");
    const words = this.source.slice(this.at + 1, end);
    this.at = end + 1;
    return words;
  }
}

function stacked(above, below) {
  const made = node("mfrac", above, below);
  made.setAttribute("linethickness", "0");
  return made;
}

function space(width) {
  const made = node("mspace");
  made.setAttribute("width", width);
  return made;
}

// The place of the brace that closes the one at `at`; -1 without.
function closing(text, at) {
  let depth = 0;
  for (let i = at; i < text.length && i - at < LONGEST; i += 1) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "{") depth += 1;
    else if (text[i] === "}") {
      depth -= 1;
      if (depth === 0) return i;
    }
  }
  return -1;
}

// A formula as a MathML element; null for what cannot be read.
export function formula(source, block) {
  if (source.length > LONGEST) return null;
  let nodes;
  try {
    nodes = new Formula(source).nodes();
  } catch {
    return null;
  }
  const math = node("math", node("mrow", ...nodes));
  math.setAttribute("display", block ? "block" : "inline");
  math.setAttribute("alttext", source);
  return math;
}

const FENCES = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

// Parts of a text: strings, and {source, block, raw} for maths.
export function parts(text) {
  const found = [];
  let plain = 0;
  const starts = /\$\$?|\\\[|\\\(|\\boxed\s*\{/g;
  for (let match = starts.exec(text); match; match = starts.exec(text)) {
    const one = match[0].startsWith("\\boxed") ? boxed(text, match) : fenced(text, match);
    if (!one) continue;
    if (match.index > plain) found.push(text.slice(plain, match.index));
    found.push(one);
    plain = starts.lastIndex = match.index + one.raw.length;
  }
  if (plain < text.length) found.push(text.slice(plain));
  return found;
}

function boxed(text, match) {
  const end = closing(text, match.index + match[0].length - 1);
  if (end < 0) return null;
  const raw = text.slice(match.index, end + 1);
  return { source: raw, block: false, raw };
}

function fenced(text, match) {
  const [begin, close, block] = FENCES.find(([sign]) => sign === match[0]);
  const start = match.index + begin.length;
  const size = text.slice(start, start + LONGEST + close.length).indexOf(close);
  if (size <= 0) return null;
  const end = start + size;
  const source = text.slice(start, end);
  // A lone dollar is money unless it hugs what it holds.
  if (close === "$" && (/^\s|\s$|\n/.test(source) || /[0-9]/.test(text[end + 1] ?? ""))) return null;
  return { source, block, raw: text.slice(match.index, end + close.length) };
}

// Writes `text` into `into`, maths rendered, everything else as it is.
export function write(into, text) {
  into.replaceChildren(
    ...parts(text).map((part) => {
      if (typeof part === "string") return document.createTextNode(part);
      const math = formula(part.source, part.block);
      if (!math) return document.createTextNode(part.raw);
      const holder = document.createElement("span");
      holder.className = "maths";
      holder.append(math);
      return holder;
    }),
  );
}
