// Speculation and the maximum depth for all requests, the prefix cache, and the API key of this tab.

import { forgetKey, hasKey, of, read } from "./api.js";
import { bytes, count, drafting, find, make, number } from "./page.js";

let head = null; // what the served model drafts with: its head, a drafter, or both
let turn = Promise.resolve(); // requests go one after the other, so that the last change wins
let asked = 0; // only the response to the last is shown

/** Set the choices for the served model. */
export function serve(model) {
  head = drafting(model);
  find("set-depth").replaceChildren(
    ...Array.from({ length: head.max_k + 1 }, (_, k) => make("option", { value: k }, String(k))),
  );
  find("unavailable").hidden = head.available;
  find("unavailable").textContent = `This model cannot draft: ${head.reason}`;
  if (!find("settings").hidden) show();
}

export function show() {
  find("door").hidden = !hasKey();
  if (head !== null) inTurn(load);
}

/** `question(isLast)` sends a request, and shows the response if there was no other request since. */
function inTurn(question) {
  const mine = ++asked;
  turn = turn.then(() => question(() => mine === asked));
}

async function load(isLast) {
  try {
    const now = await read(of("/v1/settings"));
    if (isLast()) fill(now);
    showCache(await read(of("/v1/cache")));
  } catch (error) {
    tell(error.message, true);
  }
}

function fill({ speculation, max_k }) {
  for (const id of ["set-speculation", "set-depth"]) find(id).disabled = !head.available;
  find("set-speculation").checked = speculation && head.available;
  find("set-depth").value = String(max_k);
  tell("");
}

function tell(words, bad = false) {
  find("saved").textContent = words;
  find("saved").classList.toggle("bad", bad);
}

const change = (wanted) => inTurn(async (isLast) => {
  try {
    const now = await read(of("/v1/settings"), { method: "PATCH", body: wanted });
    if (!isLast()) return;
    fill(now);
    tell("Applied.");
  } catch (error) {
    await load(isLast); // show what the server has
    tell(error.message, true);
  }
});

function showCache(cache) {
  find("clear").disabled = !cache.enabled;
  find("prefix-state").textContent = cache.enabled
    ? `${count(cache.entries, "chunk")} in ${bytes(cache.bytes)} of ${bytes(cache.max_bytes)}; ` +
      `hits: ${number(cache.hits)}, misses: ${number(cache.misses)}.`
    : "Off, or the model is not loaded.";
}

find("set-speculation").addEventListener("change", (event) => change({ speculation: event.target.checked }));
find("set-depth").addEventListener("change", (event) => change({ max_k: Number(event.target.value) }));
find("preferences").addEventListener("submit", (event) => event.preventDefault());
find("prefix").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    showCache(await read(of("/v1/cache"), { method: "DELETE" }));
  } catch (error) {
    find("prefix-state").textContent = error.message;
  }
});
find("door").addEventListener("submit", (event) => {
  event.preventDefault();
  forgetKey();
  location.reload();
});
