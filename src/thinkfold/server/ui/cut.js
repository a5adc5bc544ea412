// Where in a text a token ends. Pure; known are only (tokens, characters) pairs of what came at once.

const REACH = 24; // characters in which a line's or a word's end is looked for

// `marks`: [{tokens, chars}] in order, the last for the whole text; `from` is the token at its begin.
export function charOf(token, marks, from) {
  let before = { tokens: from, chars: 0 };
  for (const mark of marks) {
    if (mark.tokens >= token) {
      const part = mark.tokens === before.tokens ? 1 : (token - before.tokens) / (mark.tokens - before.tokens);
      return Math.round(before.chars + Math.max(0, part) * (mark.chars - before.chars));
    }
    before = mark;
  }
  return before.chars;
}

// A good place to cut near `at`: behind a line's end, else behind a blank, never inside a character.
// Text comes a little later than its tokens are counted, so what lies ahead is tried first.
export function snap(text, at) {
  for (const end of ["\n", " "]) {
    const right = text.indexOf(end, Math.max(0, at - 1)) + 1;
    if (right > 0 && right - at <= REACH) return lineBegin(text, right);
    if (text.length - at <= REACH / 4) return text.length;
    const left = text.lastIndexOf(end, at - 1) + 1;
    if (left > 0 && at - left <= REACH) return left;
  }
  const code = text.charCodeAt(at);
  return code >= 0xdc00 && code <= 0xdfff ? at + 1 : at;
}

function lineBegin(text, at) {
  while (text[at] === "\n") at += 1;
  return at;
}
