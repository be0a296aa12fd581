// What goes to the server and comes back. A key that is asked for is kept until the tab is closed.

import { store } from "./store.js";

const PATIENCE = 15_000; // milliseconds for what is no answer of the model's
const kept = store("sessionStorage", "headstart-key");
let asking = null; // one dialog for all that wait for a key

export const hasKey = () => kept.get() !== null;
export const forgetKey = kept.forget;

/** The response, once it is a good one; an error has the server's own words. `patience`: milliseconds for each try. */
export async function call(path, { method = "GET", body, patience, signal } = {}) {
  for (;;) {
    const key = kept.get();
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const until = patience === undefined ? signal : AbortSignal.timeout(patience);
    const response = await fetch(path, { method, headers, signal: until, cache: "no-store", body: JSON.stringify(body) });
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await reason(response));
    if (key === kept.get()) await (asking ??= askForKey(key !== null));
  }
}

export const read = async (path, options) => (await call(path, { patience: PATIENCE, ...options })).json();

/** Whether the server was not there, or did not answer in time. */
export const isSilence = (error) => error instanceof TypeError || error.name === "TimeoutError";

/** The JSON of server-sent events, to the last. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer broke off.");
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new Error(told.error.message);
      yield told;
    }
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

function askForKey(wrong) {
  const dialog = document.getElementById("locked");
  const input = document.getElementById("key");
  document.getElementById("wrong-key").hidden = !wrong;
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      if (dialog.returnValue === "open") kept.set(input.value); // else it was closed in the middle of a word
      asking = null;
      resolve();
    }, { once: true });
  });
}
