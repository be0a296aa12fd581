// Where the page begins: which part of it is shown, in which light, and what the server is asked every two seconds.

import { isSilence, read } from "./api.js";
import * as chat from "./chat.js";
import * as live from "./live.js";
import * as models from "./models.js";
import { find } from "./page.js";
import * as settings from "./settings.js";
import { store } from "./store.js";

const EVERY = 2000; // as often as the server samples itself
const PATIENCE = 10_000; // milliseconds
const kept = store("localStorage", "headstart-theme");
const THEMES = { auto: "◐", light: "☀", dark: "☾" };
const shown = { live: live.show, chat: chat.show, models: models.show, settings: settings.show };
let served = null; // the model's id, once the page knows the model

function route() {
  const asked = location.hash.slice(1);
  const name = Object.hasOwn(shown, asked) ? asked : "live";
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${find(`${name}-title`).textContent} · Headstart`;
  shown[name]();
}

function light(theme) {
  document.documentElement.dataset.theme = theme;
  find("theme").textContent = THEMES[theme];
  find("theme").setAttribute("aria-label", `Theme: ${theme}`);
  live.relight();
}

function nextLight() {
  const themes = Object.keys(THEMES);
  const theme = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
  kept.set(theme);
  light(theme);
}

/** `trouble`: what is wrong, or nothing. */
function tell(trouble) {
  const state = find("state");
  state.classList.toggle("bad", trouble !== "");
  state.setAttribute("aria-label", trouble ? "in trouble" : "running");
  find("trouble").hidden = trouble === "";
  if (find("trouble").textContent !== trouble) find("trouble").textContent = trouble;
}

async function look() {
  try {
    const health = await (await fetch("/health", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) })).json();
    const { models: told } = await read(`/v1/history?after=${live.latest()}`, { patience: PATIENCE });
    const [id] = Object.keys(told);
    if (served !== null && served !== id) return location.reload(); // nothing here is about the model that came
    live.update(told);
    if (served === null) await meet(id);
    tell(health.status === "ok" ? "" : `The engine is down: ${health.problem ?? "the server is stopping"}.`);
  } catch (error) {
    tell(isSilence(error) ? "The server does not answer." : error.message);
  }
}

async function meet(id) {
  const [model] = (await read("/v1/models", { patience: PATIENCE })).data;
  find("served").textContent = model.id;
  chat.serve(model);
  settings.serve(model);
  served = id;
}

async function watch() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((resolve) => {
      const timer = setTimeout(done, EVERY);
      document.addEventListener("visibilitychange", done);
      function done() {
        clearTimeout(timer);
        document.removeEventListener("visibilitychange", done);
        resolve();
      }
    });
  }
}

function skip(event) {
  event.preventDefault(); // its address would be that of another part
  find("main").focus();
}

function begin() {
  document.querySelector(".skip").addEventListener("click", skip);
  find("theme").addEventListener("click", nextLight);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", live.relight);
  light(Object.hasOwn(THEMES, kept.get()) ? kept.get() : "auto");
  addEventListener("hashchange", route);
  route();
  watch();
}

begin();
