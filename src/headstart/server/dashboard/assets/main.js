// The entry point: which part of the page is shown, in which theme, and polling the server every two seconds.

import { choose, isUnreachable, of, read } from "./api.js";
import * as chat from "./chat.js";
import * as live from "./live.js";
import * as models from "./models.js";
import { find, make } from "./page.js";
import * as settings from "./settings.js";
import { store } from "./store.js";

const INTERVAL = 2000; // milliseconds
const TIMEOUT = 10_000; // milliseconds
const kept = store("localStorage", "headstart-theme");
const THEMES = { auto: "◐", light: "☀", dark: "☾" };
const shown = { live: live.show, chat: chat.show, models: models.show, settings: settings.show };
let served = null; // the id of the model that the page shows, once it knows the models

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

const STATES = {
  starting: "The server is starting",
  degraded: "The device had trouble",
  draining: "The server is stopping",
  unhealthy: "The engine is down",
};

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  find("theme").textContent = THEMES[theme];
  find("theme").setAttribute("aria-label", `Theme: ${theme}`);
  live.retheme();
}

function nextTheme() {
  const themes = Object.keys(THEMES);
  const theme = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
  kept.set(theme);
  applyTheme(theme);
}

/** Show what is wrong, or that nothing is. */
function showTrouble(trouble) {
  const state = find("state");
  state.classList.toggle("bad", trouble !== "");
  state.setAttribute("aria-label", trouble ? "error" : "running");
  find("trouble").hidden = trouble === "";
  if (find("trouble").textContent !== trouble) find("trouble").textContent = trouble;
}

async function poll() {
  try {
    const health = await (await fetch("/health", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) })).json();
    const stats = await read("/v1/mtp/stats", { timeout: TIMEOUT });
    if (served !== null && !Object.hasOwn(stats.models, served)) return location.reload(); // another server
    const shown = served ?? Object.keys(stats.models)[0];
    live.update({ ...stats.memory, ...stats.models[shown] }, await read(of("/v1/cache"), { timeout: TIMEOUT }));
    if (served === null) await loadModels();
    showTrouble(health.status === "ok" ? "" : `${STATES[health.status]}: ${health.reason}.`);
  } catch (error) {
    showTrouble(isUnreachable(error) ? "The server does not respond." : error.message);
  }
}

async function loadModels() {
  const models = (await read("/v1/models", { timeout: TIMEOUT })).data;
  const several = models.length > 1;
  find("served").hidden = several;
  find("served").textContent = models[0].id;
  find("model").hidden = !several;
  find("model").replaceChildren(...models.map(({ id }) => make("option", { value: id }, id)));
  find("model").onchange = ({ target }) => {
    choose(target.selectedIndex === 0 ? null : target.value);
    live.reset();
    serve(models[target.selectedIndex]);
  };
  serve(models[0]);
}

function serve(model) {
  chat.serve(model);
  settings.serve(model);
  served = model.parent ?? model.id; // statistics and settings are the model's, whatever its adapter
}

async function watch() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((resolve) => {
      const timer = setTimeout(done, INTERVAL);
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
  event.preventDefault(); // its hash would select another part of the page
  find("main").focus();
}

function begin() {
  document.querySelector(".skip").addEventListener("click", skip);
  find("theme").addEventListener("click", nextTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", live.retheme);
  applyTheme(Object.hasOwn(THEMES, kept.get()) ? kept.get() : "auto");
  addEventListener("hashchange", route);
  route();
  watch();
}

begin();
