// Requests to the server. The API key is kept until the tab is closed.

import { store } from "./store.js";

const TIMEOUT = 15_000; // milliseconds, except for answers of the model
const kept = store("sessionStorage", "headstart-key");
let asking = null; // one dialog for all requests that wait for a key

let model = null; // that the page shows, where it is not the server's first

export const choose = (id) => (model = id);
export const chosen = () => (model === null ? {} : { model });

/** A path whose answer is about the chosen model. */
export const of = (path) => (model === null ? path : `${path}?model=${encodeURIComponent(model)}`);

export const hasKey = () => kept.get() !== null;
export const forgetKey = kept.forget;

/** The response, if it is a success; else an error with the server's message. `timeout`: milliseconds for each try. */
export async function call(path, { method = "GET", body, timeout, signal } = {}) {
  for (;;) {
    const key = kept.get();
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const until = timeout === undefined ? signal : AbortSignal.timeout(timeout);
    const response = await fetch(path, { method, headers, signal: until, cache: "no-store", body: JSON.stringify(body) });
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await reason(response));
    if (key === kept.get()) await (asking ??= askForKey(key !== null));
  }
}

export const read = async (path, options) => (await call(path, { timeout: TIMEOUT, ...options })).json();

/** Whether the server could not be reached, or did not answer in time. */
export const isUnreachable = (error) => error instanceof TypeError || error.name === "TimeoutError";

/** The JSON of server-sent events, to the last. Comments, which begin with a colon, are left out. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection closed before the answer was complete.");
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    for (const event of whole.filter((each) => each.startsWith("data: "))) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const message = JSON.parse(data);
      if (message.error) throw new Error(message.error.message);
      yield message;
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
      if (dialog.returnValue === "open") kept.set(input.value); // else it was dismissed
      asking = null;
      resolve();
    }, { once: true });
  });
}
