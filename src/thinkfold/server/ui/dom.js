// Small helpers for numbers and elements. Text goes in as text nodes, never as HTML.

export const byId = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(made.dataset, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

export const count = (number) => Math.round(number).toLocaleString("en");

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let step = 0;
  while (number >= 1000 && step < units.length - 1) {
    number /= 1000;
    step += 1;
  }
  return `${step === 0 || number >= 100 ? Math.round(number) : number.toFixed(1)} ${units[step]}`;
}

export const seconds = (number) => (number < 0.995 ? `${Math.round(1000 * number)} ms` : `${number.toFixed(1)} s`);

export const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(part / whole < 0.1 ? 1 : 0)} %` : "–");

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${Math.round(number) === 1 ? one : many}`;

// Rows of a description list: [term, value, class?]. Elements are kept, so that nothing flickers.
export function rows(list, wanted) {
  wanted.forEach(([term, value, name = ""], index) => {
    const row = list.children[index] ?? list.appendChild(element("div", {}, element("dt"), element("dd")));
    row.className = name;
    put(row.firstChild, term);
    put(row.lastChild, value);
  });
  while (list.children.length > wanted.length) list.lastChild.remove();
}

export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
