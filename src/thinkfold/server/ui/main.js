// Starts the page: theme, key, model, and the two views.

import { hasKey, json, useKey } from "./api.js";
import { byId, put } from "./dom.js";
import { EngineView } from "./engine.js";
import { Playground } from "./playground.js";

const AGAIN_MS = 2000;

const engine = new EngineView({ failed });
const playground = new Playground({
  memory: () => engine.memory,
  busy: (is) => {
    engine.busy = is;
    engine.poll();
  },
});

// True if asking again makes no sense before something has changed.
function failed(error) {
  byId("state").dataset.good = false;
  put(byId("state"), error.status === 401 ? "locked" : error.status ? error.message : "the server does not answer");
  if (error.status !== 401) return false;
  byId("key").hidden = false;
  if (hasKey()) put(byId("key-note"), "That key is not known here.");
  byId("key-value").focus();
  return true;
}

async function start() {
  try {
    const { data } = await json("v1/models");
    put(byId("model"), data[0].id);
    document.title = `${data[0].id} · thinkfold`;
    byId("key").hidden = true;
    playground.serve(data[0]);
    engine.poll();
  } catch (error) {
    if (!failed(error)) setTimeout(start, AGAIN_MS);
  }
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key-value").value.trim());
  byId("key-value").value = "";
  start();
});

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  const dark = name ? name === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  put(byId("theme"), dark ? "Light" : "Dark");
  byId("theme").setAttribute("aria-label", dark ? "Light colours" : "Dark colours");
  return dark;
}

byId("theme").onclick = () => {
  const next = byId("theme").textContent.toLowerCase();
  localStorage.setItem("thinkfold.theme", next);
  theme(next);
};
matchMedia("(prefers-color-scheme: dark)").onchange = () => theme(localStorage.getItem("thinkfold.theme"));
theme(localStorage.getItem("thinkfold.theme"));

start();
