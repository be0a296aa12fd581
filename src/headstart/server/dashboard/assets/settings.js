// Speculation and the greatest depth for all requests, the prefix cache, and the key of this tab.

import { forgetKey, hasKey, read } from "./api.js";
import { bytes, find, make, number } from "./page.js";

let head = null; // the served model's
let asked = 0; // an answer that is not to the last question is out of date

/** Which model it is about. */
export function serve(model) {
  head = model.native_mtp;
  find("set-depth").replaceChildren(
    ...Array.from({ length: head.max_k }, (_, i) => make("option", { value: i + 1 }, String(i + 1))),
  );
  find("unavailable").hidden = head.available;
  find("unavailable").textContent = `This model cannot draft: ${head.reason}`;
  if (!find("settings").hidden) show();
}

export async function show() {
  find("door").hidden = !hasKey();
  if (head === null) return;
  const question = ++asked;
  try {
    const now = await read("/v1/settings");
    if (question === asked) fill(now);
    tellCache(await read("/v1/cache"));
  } catch (error) {
    find("saved").textContent = error.message;
  }
}

function fill({ speculation, max_k, problem }) {
  for (const id of ["set-speculation", "set-depth"]) find(id).disabled = !head.available;
  find("set-speculation").checked = speculation && head.available;
  find("set-depth").value = String(max_k);
  find("saved").textContent = problem ?? "";
  find("saved").classList.toggle("bad", Boolean(problem));
}

async function change(wanted) {
  const question = ++asked;
  try {
    const now = await read("/v1/settings", { method: "PATCH", body: wanted });
    if (question !== asked) return;
    fill(now);
    if (!now.problem) find("saved").textContent = "Saved.";
  } catch (error) {
    await show(); // what holds is what the server says
    find("saved").textContent = error.message;
    find("saved").classList.add("bad");
  }
}

function tellCache(cache) {
  find("clear").disabled = !cache.enabled;
  find("prefix-state").textContent = cache.enabled
    ? `${number(cache.entries)} chunks of prompts in ${bytes(cache.bytes)} of ${bytes(cache.max_bytes)}. ` +
      `${number(cache.hits)} prompts were resumed, ${number(cache.misses)} were not.`
    : "Off: the server was started without one.";
}

find("set-speculation").addEventListener("change", (event) => change({ speculation: event.target.checked }));
find("set-depth").addEventListener("change", (event) => change({ max_k: Number(event.target.value) }));
find("preferences").addEventListener("submit", (event) => event.preventDefault());
find("prefix").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    tellCache(await read("/v1/cache", { method: "DELETE" }));
  } catch (error) {
    find("prefix-state").textContent = error.message;
  }
});
find("door").addEventListener("submit", (event) => {
  event.preventDefault();
  forgetKey();
  location.reload();
});
